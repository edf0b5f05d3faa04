"""How long training stands still: the time until async_save returns, against a memcpy."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from benchmarks.background import background_saver, completion
from benchmarks.bench import Bench
from benchmarks.children import in_child
from benchmarks.contenders import limit_threads
from benchmarks.operation import SINK
from benchmarks.places import Place
from benchmarks.rows import OURS, OURS_IN_A_PROCESS, Limits, Row, limit_for
from benchmarks.states import GIB, MIB, StateSpec, filled, mixed, uniform

_CALLS = 4


def measure(bench: Bench) -> list[Row]:
    """Returns the first call's stall, which may allocate, and the later calls'."""
    spec = mixed(bench.sized(GIB, 128 * MIB))
    rows: list[Row] = []
    for name in bench.taking_part(OURS, OURS_IN_A_PROCESS, "s3torchconnector", "fsspec"):
        found = bench.attempt(
            name, in_child, _stalls, bench.server.port, contender=name, sizes=spec.sizes
        )
        if found is None:
            continue
        stalls, copies = found["stalls"], found["copies"]
        case = f"async_save {spec.total // MIB} MiB"
        rows += [
            Row(
                scenario="stall",
                case=f"{case}, later calls",
                contender=name,
                metric="stall",
                unit="s",
                samples=tuple(stalls[1:]),
                ratio=median(stalls[1:]) / median(copies),
                baseline="memcpy",
                limit=limit_for(name, Limits.STALL + Limits.STALL_SECONDS / median(copies)),
            ),
            Row(
                scenario="stall",
                case=f"{case}, first call",
                contender=name,
                metric="stall",
                unit="s",
                samples=(stalls[0],),
                ratio=stalls[0] / median(copies),
                baseline="memcpy",
            ),
        ]
    return rows


def _stalls(port: int, contender: str, sizes: list[int]) -> dict[str, list[float]]:
    """In the child: times background saves and plain copies of the same state."""
    limit_threads()
    saver = background_saver(contender, Place(port, SINK))
    state: dict[str, Any] = filled(StateSpec(tuple(sizes)))
    copies = _copies(state)
    completion(saver.async_save(filled(uniform(4, MIB)), "warm")).result()
    stalls: list[float] = []
    for call in range(_CALLS):
        began = time.perf_counter()
        started = saver.async_save(state, f"stall-{call}")
        stalls.append(time.perf_counter() - began)
        completion(started).result()
    return {"stalls": stalls, "copies": copies + _copies(state)}


def _copies(state: dict[str, Any]) -> list[float]:
    """Times copies of `state` into memory that has been touched before."""
    targets = [tensor.clone() for tensor in state.values()]
    times: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        for target, tensor in zip(targets, state.values(), strict=True):
            target.copy_(tensor)
        times.append(time.perf_counter() - began)
    return times
