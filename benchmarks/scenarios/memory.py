"""Whether extra memory grows with the checkpoint: ours at 1 GiB and at 4 GiB."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.operation import KEEP, SINK, prepare, run
from benchmarks.rows import OURS, Limits, Row, limit_for
from benchmarks.scenarios.plain import ACTIONS
from benchmarks.states import GIB, MIB, mixed


def measure(bench: Bench) -> list[Row]:
    """Returns the extra peak memory of saves and loads at two sizes."""
    rows: list[Row] = []
    for name in bench.taking_part(OURS):
        for total in (bench.sized(GIB, 128 * MIB), bench.sized(4 * GIB, 512 * MIB)):
            spec = mixed(total)
            loads = f"{name}-{total}"
            bench.attempt(name, prepare, bench.server, name, spec, loads)
            for action in ACTIONS:
                bucket = SINK if action == "save" else KEEP
                done = bench.attempt(
                    name, run, bench.server, name, action, spec, loads, bucket=bucket
                )
                if done is None:
                    continue
                rows.append(
                    Row(
                        scenario="memory",
                        case=f"{action} {total // MIB} MiB",
                        contender=name,
                        metric="extra memory",
                        unit="MiB",
                        samples=(done.cost.extra_memory / MIB,),
                        limit=limit_for(name, Limits.EXTRA_MEMORY_MIB),
                    )
                )
            bench.server.clear()
    return rows
