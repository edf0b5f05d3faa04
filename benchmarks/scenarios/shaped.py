"""Whether all connections are busy on a link of 10 MB/s each and 50 ms to the first byte."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.operation import KEEP, SINK, prepare, run
from benchmarks.places import CONNECTIONS
from benchmarks.rows import Limits, Row, limit_for
from benchmarks.scenarios.plain import ACTIONS
from benchmarks.server.shaping import Shape
from benchmarks.states import MIB, mixed

LINK = Shape(latency_ms=50, connection_rate=10e6)


def measure(bench: Bench) -> list[Row]:
    """Returns wall time over the ideal, bytes / (connections x rate), latency not counted.

    A client that opens more connections than the eight it was asked for can beat the ideal; the
    note says how many the server saw at once.
    """
    spec = mixed(bench.sized(256 * MIB, 128 * MIB))
    ideal = spec.total / (CONNECTIONS * LINK.connection_rate)
    rows: list[Row] = []
    for name in bench.taking_part("reference", "cloudckpt", "s3torchconnector"):
        loads = f"{name}-loads"
        bench.server.shape(Shape())
        bench.attempt(name, prepare, bench.server, name, spec, loads)
        bench.server.shape(LINK)
        for action in ACTIONS:
            bucket = SINK if action == "save" else KEEP
            done = bench.attempt(name, run, bench.server, name, action, spec, loads, bucket=bucket)
            if done is None:
                continue
            rows.append(
                Row(
                    scenario="shaped",
                    case=f"{action} {spec.total // MIB} MiB",
                    contender=name,
                    metric="wall",
                    unit="s",
                    samples=(done.cost.wall_s,),
                    ratio=done.cost.wall_s / ideal,
                    baseline=f"ideal {ideal:.2f} s",
                    limit=limit_for(name, Limits.SHAPED),
                    note=f"{done.counts.connections_peak} connections",
                )
            )
    return rows
