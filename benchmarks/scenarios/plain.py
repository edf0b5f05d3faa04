"""One process saves and loads 1 GiB over a link that is never the bottleneck."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from benchmarks.bench import Bench, rotated
from benchmarks.contenders import CONTENDERS
from benchmarks.meter import Cost
from benchmarks.operation import SINK, Action, prepare, run
from benchmarks.rows import REFERENCE, Limits, Row, limit_for
from benchmarks.states import GIB, MIB, StateSpec, mixed

ACTIONS: tuple[Action, ...] = ("save", "load")


def measure(bench: Bench) -> list[Row]:
    """Returns the numbers of every contender, of ours the one over S3."""
    names = [
        name for name, entry in CONTENDERS.items() if not entry.only_async and not entry.is_model
    ]
    return compare(bench, "plain", bench.taking_part(*names))


def compare(
    bench: Bench,
    scenario: str,
    contenders: Sequence[str],
    *,
    baseline: str = REFERENCE,
    cpu_limit: float = Limits.CPU,
) -> list[Row]:
    """Returns CPU, wall time and extra memory of `contenders`, taken in alternation.

    `cpu_limit` is what ours may take, over `baseline`.
    """
    spec = mixed(bench.sized(GIB, 128 * MIB))
    for name in contenders:
        bench.attempt(name, prepare, bench.server, name, spec, f"{name}-loads")
    costs: dict[tuple[str, Action], list[Cost]] = defaultdict(list)
    for turn in range(max(map(bench.rounds_of, contenders), default=0)):
        for action in ACTIONS:
            for name in rotated(contenders, turn):
                if turn >= bench.rounds_of(name):
                    continue
                done = bench.attempt(name, _once, bench, name, action, spec, turn)
                if done is not None:
                    costs[name, action].append(done)
                bench.server.clear(SINK)
    return [
        row
        for action in ACTIONS
        for name in contenders
        if costs[name, action]
        for row in _rows(
            scenario,
            name,
            action,
            spec,
            costs[name, action],
            costs[baseline, action],
            baseline,
            cpu_limit,
        )
    ]


def _once(bench: Bench, name: str, action: Action, spec: StateSpec, turn: int) -> Cost:
    if action == "save":
        return run(bench.server, name, action, spec, f"{name}-{turn}", bucket=SINK).cost
    return run(bench.server, name, action, spec, f"{name}-loads").cost


def _rows(
    scenario: str,
    name: str,
    action: Action,
    spec: StateSpec,
    costs: list[Cost],
    of_baseline: list[Cost],
    baseline: str,
    cpu_limit: float,
) -> list[Row]:
    gib = spec.total / GIB
    case = f"{action} {spec.total // MIB} MiB"
    cpu = tuple(cost.cpu_s / gib for cost in costs)
    wall = tuple(cost.wall_s / gib for cost in costs)
    memory = tuple(cost.extra_memory / MIB for cost in costs)
    yardstick = [cost.cpu_s / gib for cost in of_baseline]
    ratio = median(cpu) / median(yardstick) if yardstick else None
    return [
        Row(
            scenario=scenario,
            case=case,
            contender=name,
            metric="CPU",
            unit="s/GiB",
            samples=cpu,
            ratio=ratio,
            baseline=baseline,
            limit=limit_for(name, cpu_limit),
        ),
        Row(
            scenario=scenario,
            case=case,
            contender=name,
            metric="wall",
            unit="s/GiB",
            samples=wall,
        ),
        Row(
            scenario=scenario,
            case=case,
            contender=name,
            metric="extra memory",
            unit="MiB",
            samples=memory,
            limit=limit_for(name, Limits.EXTRA_MEMORY_MIB),
        ),
    ]
