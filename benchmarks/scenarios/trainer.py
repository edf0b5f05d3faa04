"""How much slower a training step gets while a checkpoint uploads in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

import torch

from benchmarks.background import background_saver, completion
from benchmarks.bench import Bench
from benchmarks.children import in_child
from benchmarks.contenders import limit_threads
from benchmarks.operation import SINK, USUAL, Surroundings
from benchmarks.places import Place
from benchmarks.rows import OURS, OURS_IN_A_PROCESS, Limits, Row
from benchmarks.server.shaping import Shape
from benchmarks.states import GIB, MIB, StateSpec, filled, mixed, uniform

LINK = Shape(total_rate=200e6)

_PYTHON_OPERATIONS = 60_000
_MATMULS = 4
_WIDTH = 384


def measure(bench: Bench) -> list[Row]:
    """Returns mean and p99 of the step time during uploads, over the same without.

    The step is half Python that never releases the GIL and half a matmul that does, on one
    thread. The call of async_save itself is `stall`'s business and not counted as a step.
    """
    names = bench.taking_part(OURS, OURS_IN_A_PROCESS, "s3torchconnector", "fsspec")
    return beside_training(bench, names, USUAL, Limits.STEP_MEAN, Limits.STEP_P99)


def beside_training(
    bench: Bench,
    contenders: Sequence[str],
    around: Surroundings,
    most_mean: Mapping[str, float],
    most_p99: Mapping[str, float],
) -> list[Row]:
    """The same, in these surroundings; the limits are by contender."""
    spec = mixed(bench.sized(GIB, 256 * MIB))
    rows: list[Row] = []
    bench.server.shape(LINK)
    for name in contenders:
        found = bench.attempt(
            name,
            in_child,
            _train,
            bench.server.port if around.port is None else around.port,
            bundle=around.bundle,
            contender=name,
            sizes=spec.sizes,
            certificate=around.bundle,
            saves=bench.sized(2, 1),
            idle_s=bench.sized(4, 2),
        )
        if found is None:
            continue
        idle, busy = sorted(found["idle"]), sorted(found["busy"])
        case = f"training beside an upload of {spec.total // MIB} MiB"
        note = f"upload took {mean(found['uploads']):.1f} s, {len(busy)} steps"
        for metric, before, during, limits in (
            ("mean step", mean(idle), mean(busy), most_mean),
            ("p99 step", _p99(idle), _p99(busy), most_p99),
        ):
            rows.append(
                Row(
                    scenario=bench.scenario,
                    case=case,
                    contender=name,
                    metric=metric,
                    unit="ms",
                    samples=(during * 1000,),
                    ratio=during / before,
                    baseline=f"no upload, {before * 1000:.1f} ms",
                    limit=limits.get(name),
                    note=note,
                )
            )
    bench.server.shape(Shape())
    return rows


def _p99(ordered: list[float]) -> float:
    return ordered[int(len(ordered) * 0.99)]


def _train(
    port: int,
    contender: str,
    sizes: list[int],
    certificate: str | None,
    saves: int,
    idle_s: float,
) -> dict[str, list[float]]:
    """In the child: steps without an upload, during uploads, and without again."""
    limit_threads()
    saver = background_saver(contender, Place(port, SINK, bundle=certificate))
    state: dict[str, Any] = filled(StateSpec(tuple(sizes)))
    completion(saver.async_save(filled(uniform(4, MIB)), "warm")).result()
    step = _step()
    idle, busy, uploads = [], [], []
    idle += _steps_until(step, _after(idle_s))
    for save in range(saves):
        began = time.perf_counter()
        future = completion(saver.async_save(state, f"train-{save}"))
        busy += _steps_until(step, future.done)
        future.result()
        uploads.append(time.perf_counter() - began)
    idle += _steps_until(step, _after(idle_s))
    return {"idle": idle, "busy": busy, "uploads": uploads}


def _step() -> Callable[[], None]:
    weight = torch.randn(_WIDTH, _WIDTH)

    def step() -> None:
        total = 0
        for index in range(_PYTHON_OPERATIONS):
            total += index & 7
        value = weight
        for _ in range(_MATMULS):
            value = (value @ weight).clamp_(-1, 1)

    for _ in range(5):
        step()
    return step


def _after(seconds: float) -> Callable[[], bool]:
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() > deadline


def _steps_until(step: Callable[[], None], done: Callable[[], bool]) -> list[float]:
    times: list[float] = []
    while not done():
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times
