"""Whether a transfer finds by itself how many connections pay, on links that differ."""

from __future__ import annotations

from statistics import median

from benchmarks.bench import Bench
from benchmarks.operation import KEEP, SINK, USUAL, Operation, Surroundings, prepare, run
from benchmarks.places import Connections
from benchmarks.rows import OURS, Limits, Row
from benchmarks.scenarios.plain import ACTIONS
from benchmarks.server.shaping import Shape
from benchmarks.states import MIB, StateSpec, mixed

FIXED = (4, 8, 16, 32, 64)
PEER = "s3torchconnector"

LINKS = tuple(
    Shape(latency_ms=latency, connection_rate=rate, total_rate=total)
    for latency, rate, total in (
        (50, 10e6, 0),
        (5, 10e6, 0),
        (50, 10e6, 200e6),
        (50, 30e6, 0),
        (50, 30e6, 200e6),
        (50, 80e6, 0),
        (5, 80e6, 0),
        (5, 80e6, 400e6),
    )
)


def measure(bench: Bench) -> list[Row]:
    """Returns wall time, CPU and memory by ``"auto"`` over the best of `FIXED`, on each link.

    Of the numbers that are within 3 % of the fastest, the one that takes least CPU is the best. All
    are of a second transfer of their process, whose connections are open; so is the one by
    ``"auto"`` that is judged, which begins with what the first has found. That first one stands
    beside it.
    """
    spec = mixed(256 * MIB)
    links = LINKS[:1] if bench.quick else LINKS
    rows: list[Row] = []
    for name in bench.taking_part(OURS, PEER):
        bench.server.shape(Shape())
        bench.attempt(name, prepare, bench.server, name, spec, f"{name}-loads")
    for link in links:
        bench.server.shape(link)
        for action in ACTIONS:
            rows += _Link(bench, link, action, spec).rows()
    return rows


class _Link:
    """One way over one link."""

    def __init__(self, bench: Bench, link: Shape, action: str, spec: StateSpec) -> None:
        total = f" of {link.total_rate / 1e6:.0f} MB/s in all" if link.total_rate else ""
        self._case = (
            f"{action} {spec.total // MIB} MiB, {link.connection_rate / 1e6:.0f} MB/s a "
            f"connection{total}, {link.latency_ms:.0f} ms"
        )
        self._bench = bench
        self._action = action
        self._spec = spec

    def rows(self) -> list[Row]:
        fixed = {count: self._done(OURS, count, is_again=True) for count in FIXED}
        known = {count: done for count, done in fixed.items() if done is not None}
        if not known:
            return []
        fastest = min(done.cost.wall_s for done in known.values())
        good = [one for one, done in known.items() if done.cost.wall_s <= 1.03 * fastest]
        best = min(good, key=lambda one: known[one].cost.cpu_s)
        rows = [self._row(OURS, "wall", [known[best]], f"{best} connections")]
        self._bench.say(f"{self._case}: {best} connections are best")
        first, later = self._several("auto"), self._several("auto", is_again=True)
        if not (first and later):
            return rows
        over = known[best]
        rows += [
            self._row(OURS, "wall, first", first, _peaks(first), over),
            self._row(OURS, "wall, later", later, _peaks(later), over, Limits.LANES_WALL),
            self._row(OURS, "CPU, later", later, "", over, Limits.LANES_CPU),
            self._row(OURS, "extra memory", later, "", None, Limits.EXTRA_MEMORY_MIB),
        ]
        if (peer := self._done(PEER, 1)) is not None:
            rows.append(self._row(PEER, "wall", [peer], _peaks([peer]), over))
        return rows

    def _several(self, count: Connections, *, is_again: bool = False) -> list[Operation]:
        rounds = 1 if self._bench.quick else 3
        found = [self._done(OURS, count, is_again=is_again) for _ in range(rounds)]
        return [done for done in found if done is not None]

    def _done(self, name: str, count: Connections, *, is_again: bool = False) -> Operation | None:
        if not self._bench.standing(name) or name not in self._bench.contenders:
            return None
        around: Surroundings = USUAL.but(connections=count, is_again=is_again)
        bucket = SINK if self._action == "save" else KEEP
        return self._bench.attempt(
            name,
            run,
            self._bench.server,
            name,
            self._action,
            self._spec,
            f"{name}-loads",
            bucket=bucket,
            around=around,
        )

    def _row(
        self,
        name: str,
        metric: str,
        done: list[Operation],
        note: str,
        best: Operation | None = None,
        limit: float | None = None,
    ) -> Row:
        def value(one: Operation) -> float:
            if metric.startswith("wall"):
                return one.cost.wall_s
            return one.cost.cpu_s if metric.startswith("CPU") else one.cost.extra_memory / MIB

        samples = tuple(map(value, done))
        return Row(
            scenario="lanes",
            case=self._case,
            contender=name,
            metric=metric,
            unit="MiB" if metric == "extra memory" else "s",
            samples=samples,
            ratio=None if best is None else median(samples) / value(best),
            baseline="" if best is None else "the best",
            limit=limit,
            note=note,
        )


def _peaks(done: list[Operation]) -> str:
    return f"{max(one.counts.connections_peak for one in done)} connections"
