"""What it takes to verify a checkpoint or to copy it to another cloud, over loading and saving."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any, Literal

from benchmarks.bench import Bench
from benchmarks.children import in_child
from benchmarks.contenders import limit_threads
from benchmarks.meter import Cost, measure
from benchmarks.operation import KEEP, SINK, prepare, run
from benchmarks.ours import options
from benchmarks.places import CONNECTIONS, Place
from benchmarks.rows import OURS, OURS_ELSEWHERE, Limits, Row
from benchmarks.states import GIB, MIB, mixed

Work = Literal["verify", "copy"]

_NAME = "moving"
_GCS = OURS_ELSEWHERE[0]


def verify(bench: Bench) -> list[Row]:
    """Returns CPU over that of a load, and extra memory."""
    return _compared(bench, "verify", Limits.VERIFY_CPU, Limits.EXTRA_MEMORY_MIB, (OURS,))


def copy(bench: Bench) -> list[Row]:
    """Returns CPU over that of a load and a save together, and extra memory."""
    return _compared(bench, "copy", Limits.COPY_CPU, Limits.COPY_MEMORY_MIB, (OURS, _GCS))


def _compared(
    bench: Bench, work: Work, cpu_limit: float, memory_limit: float, needs: tuple[str, ...]
) -> list[Row]:
    """Measures in turns: a load from S3, a save to Google where that is copied to, and the work."""
    if len(bench.taking_part(*needs)) < len(needs):
        return []
    spec = mixed(bench.sized(GIB, 128 * MIB))
    bench.attempt(OURS, prepare, bench.server, OURS, spec, _NAME)
    costs: list[Cost] = []
    yardsticks: list[float] = []
    for turn in range(bench.rounds_of(OURS)):

        def load() -> Cost:
            return run(bench.server, OURS, "load", spec, _NAME).cost

        def save(name: str = f"{_NAME}-{turn}-saved") -> Cost:
            return run(bench.server, _GCS, "save", spec, name, bucket=SINK).cost

        def done(name: str = f"{_NAME}-{turn}") -> Cost:
            return Cost(**in_child(_perform, bench.server.port, work=work, target=name))

        steps: list[Callable[[], Cost]] = [load, done] if work == "verify" else [load, save, done]
        found = [bench.attempt(OURS, step) for step in steps]
        bench.server.clear(SINK)
        *before, last = found
        if last is None or None in before:
            return []
        costs.append(last)
        yardsticks.append(sum(cost.cpu_s for cost in before if cost is not None))
    gib, case = spec.total / GIB, f"{spec.total // MIB} MiB"
    cpu = tuple(cost.cpu_s / gib for cost in costs)
    baseline = "a load" if work == "verify" else "a load and a save"
    return [
        Row(
            scenario=work,
            case=case,
            contender=OURS,
            metric="CPU",
            unit="s/GiB",
            samples=cpu,
            ratio=median(cost.cpu_s for cost in costs) / median(yardsticks),
            baseline=baseline,
            limit=cpu_limit,
        ),
        Row(
            scenario=work,
            case=case,
            contender=OURS,
            metric="wall",
            unit="s/GiB",
            samples=tuple(cost.wall_s / gib for cost in costs),
        ),
        Row(
            scenario=work,
            case=case,
            contender=OURS,
            metric="extra memory",
            unit="MiB",
            samples=tuple(cost.extra_memory / MIB for cost in costs),
            limit=memory_limit,
        ),
    ]


def _perform(port: int, work: Work, target: str) -> dict[str, Any]:
    """The child's side; a small checkpoint is done first, for what is imported and connected."""
    limit_threads()
    ours = importlib.import_module("cloudckpt")
    source = Place(port, KEEP)
    goal = Place(port, SINK, scheme="gs")
    config = ours.Config(connections=CONNECTIONS, **options(ours, source), **options(ours, goal))

    def carry_out(name: str, to: str) -> None:
        if work == "verify":
            ours.verify(source.uri(name), config=config)
        else:
            ours.copy(source.uri(name), goal.uri(to), config=config)

    carry_out(f"{_NAME}-warm", f"{target}-warm")
    return asdict(measure(lambda: carry_out(_NAME, target)))
