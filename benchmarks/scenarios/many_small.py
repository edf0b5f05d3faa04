"""What a tensor costs beyond its bytes: 20,000 of 4 KiB against one of the same bytes."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from benchmarks.bench import Bench, rotated
from benchmarks.operation import KEEP, SINK, Action, prepare, run
from benchmarks.rows import OURS, Limits, Row, limit_for
from benchmarks.states import StateSpec, uniform

_SIZE = 4096
_ROUNDS = 3
_YARDSTICK = "plan-only"


def measure(bench: Bench) -> list[Row]:
    """Returns wall times of many and of one, for us and for a writer that only plans.

    The yardstick shows how much of the time is DCP's own planning; the row `planning allowed for`,
    which is judged, divides by that plus one tensor's save. Planning falls away in later saves of
    the same structure, which `fleet` measures.
    """
    count = bench.sized(20_000, 2_000)
    specs = {f"{count} tensors": uniform(count, _SIZE), "1 tensor": uniform(1, count * _SIZE)}
    many, one = specs
    contenders = bench.taking_part(OURS, "s3torchconnector")
    walls = _saves(bench, [*contenders, _YARDSTICK], specs)
    rows: list[Row] = []
    for name in (*contenders, _YARDSTICK):
        if not (walls[name, many] and walls[name, one]):
            continue
        ratio = median(walls[name, many]) / median(walls[name, one])
        rows.append(_row(f"save {many}", name, walls[name, many], ratio, f"save {one}"))
        rows.append(_row(f"save {one}", name, walls[name, one]))
    if walls[OURS, many] and walls[_YARDSTICK, many]:
        least = median(walls[_YARDSTICK, many]) + median(walls[OURS, one])
        ratio = median(walls[OURS, many]) / least
        base = f"planning {many} + save {one}"
        case, judged = f"save {many}, planning allowed for", limit_for(OURS, Limits.MANY_SMALL)
        rows.append(_row(case, OURS, walls[OURS, many], ratio, base, judged))
    return rows + _loads(bench, contenders, specs)


def _saves(
    bench: Bench, contenders: list[str], specs: dict[str, StateSpec]
) -> dict[tuple[str, str], list[float]]:
    walls: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(_ROUNDS):
        for name in rotated(contenders, turn):
            if turn and name not in (OURS, _YARDSTICK):
                continue
            for case, spec in specs.items():
                called = f"{name}-{spec.sizes[0]}-{turn}"
                if (wall := _wall(bench, name, "save", spec, called, SINK)) is not None:
                    walls[name, case].append(wall)
    return walls


def _loads(bench: Bench, contenders: list[str], specs: dict[str, StateSpec]) -> list[Row]:
    rows: list[Row] = []
    for name in contenders:
        for case, spec in specs.items():
            called = f"{name}-{spec.sizes[0]}-loads"
            bench.attempt(name, prepare, bench.server, name, spec, called)
            wall = _wall(bench, name, "load", spec, called, KEEP)
            if wall is not None:
                rows.append(_row(f"load {case}", name, [wall]))
    return rows


def _wall(
    bench: Bench, name: str, action: Action, spec: StateSpec, called: str, bucket: str
) -> float | None:
    done = bench.attempt(name, run, bench.server, name, action, spec, called, bucket=bucket)
    return None if done is None else done.cost.wall_s


def _row(
    case: str,
    name: str,
    walls: list[float],
    ratio: float | None = None,
    baseline: str = "",
    limit: float | None = None,
) -> Row:
    return Row(
        scenario="many-small",
        case=case,
        contender=name,
        metric="wall",
        unit="s",
        samples=tuple(walls),
        ratio=ratio,
        baseline=baseline,
        limit=limit,
    )
