"""What an incremental save costs, where nearly nothing has changed, a tenth, or everything."""

from __future__ import annotations

import os
from functools import partial
from statistics import median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.children import in_ranks
from benchmarks.meter import measure as measured
from benchmarks.operation import KEEP
from benchmarks.ours import options
from benchmarks.places import Place
from benchmarks.rows import OURS, Limits, Row
from benchmarks.server.shaping import Shape
from benchmarks.states import MIB

RANKS = 2
SAVES = 10
_FROZEN = 64  # tensors that never change
_TIMEOUT = 900.0


def measure(bench: Bench) -> list[Row]:
    """Returns bytes, wall time and CPU of later saves over those of the first, on two ranks.

    The state has frozen tensors, and few that are trained, with two moments each: 1 GiB and 24 MiB.
    A full save of the same state stands beside it: what a user has who does not ask for this.
    """
    bench.server.shape(Shape())
    size = bench.sized(1024 * MIB, 128 * MIB) // RANKS
    trained = size // 128
    told: dict[str, list[dict[str, Any]]] = {}
    for case, how in {
        "adapter": {"incremental": True, "changes": "trained"},
        "adapter, all sent": {"incremental": False, "changes": "trained"},
        "a tenth changes": {"incremental": True, "changes": "tenth"},
        "all changes": {"incremental": True, "changes": "all"},
        "all changes, not incremental": {"incremental": False, "changes": "all"},
    }.items():
        bench.say(f"incremental: {case}")
        done = in_ranks(
            _saves,
            bench.server.port,
            RANKS,
            timeout=_TIMEOUT,
            size=size,
            trained=trained,
            run=case.replace(" ", "-").replace(",", ""),
            **how,
        )
        told[case] = done
        bench.server.clear()
    return [
        _over_changed(told["adapter"], 3 * trained * RANKS),
        _over_first("adapter", told["adapter"], "wall", Limits.INCREMENTAL_COST),
        _over_first("adapter", told["adapter"], "CPU", Limits.INCREMENTAL_COST),
        _over_first("adapter, all sent", told["adapter, all sent"], "CPU", None),
        _over_first("a tenth changes", told["a tenth changes"], "bytes", Limits.INCREMENTAL_TENTH),
        _over_all(told["all changes"], told["all changes, not incremental"]),
    ]


def _saves(
    port: int, size: int, trained: int, run: str, incremental: bool, changes: str
) -> dict[str, list[float]]:
    """What each save of one rank took."""
    import torch
    import torch.distributed as dist

    import cloudckpt

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['BENCH_RENDEZVOUS']}",
        rank=rank,
        world_size=RANKS,
    )
    place = Place(port, KEEP)
    config = cloudckpt.Config(
        connections=place.connections, incremental=incremental, **options(cloudckpt, place)
    )
    generator = torch.Generator().manual_seed(rank)
    bits = torch.iinfo(torch.int64)
    state = {
        f"frozen.{rank}.{n}": torch.empty(size // _FROZEN // 8, dtype=torch.int64).random_(
            bits.min, bits.max, generator=generator
        )
        for n in range(_FROZEN)
    }
    state |= {f"trained.{rank}.{n}": torch.zeros(trained // 4) for n in range(3)}
    costs: dict[str, list[float]] = {"bytes": [], "wall": [], "CPU": []}
    for step in range(SAVES):
        for number, value in enumerate(state.values()):
            is_trained = number >= _FROZEN
            if changes == "all" or is_trained or (changes == "tenth" and number % 10 == step % 10):
                value.view(torch.uint8).add_(1)
        writer = cloudckpt.CloudStorageWriter(place.uri(f"{run}/step-{step}"), config=config)
        dist.barrier()
        cost = measured(partial(_save, state, writer))
        assert writer.transferred is not None
        costs["bytes"].append(writer.transferred.nbytes)
        costs["wall"].append(cost.wall_s)
        costs["CPU"].append(cost.cpu_s)
    dist.destroy_process_group()
    return costs


def _save(state: dict[str, Any], writer: Any) -> None:
    import cloudckpt

    cloudckpt.save(state, storage_writer=writer)


def _of_all(done: list[dict[str, list[float]]], what: str) -> list[float]:
    """By save: of all ranks together, or of the slowest."""
    together = max if what == "wall" else sum
    return [together(each) for each in zip(*(one[what] for one in done), strict=True)]


def _over_first(
    case: str, done: list[dict[str, list[float]]], what: str, limit: float | None
) -> Row:
    first, *later = _of_all(done, what)
    return _row(case, what, later, first, "the first save", limit)


def _over_changed(done: list[dict[str, list[float]]], changed: int) -> Row:
    _, *later = _of_all(done, "bytes")
    return _row("adapter", "bytes", later, changed, "what has changed", Limits.INCREMENTAL_BYTES)


def _over_all(done: list[dict[str, list[float]]], without: list[dict[str, list[float]]]) -> Row:
    later, usual = _of_all(done, "CPU")[1:], median(_of_all(without, "CPU")[1:])
    baseline = "saves that are not incremental"
    return _row("all changes", "CPU", later, usual, baseline, Limits.INCREMENTAL_DENSE)


def _row(
    case: str, what: str, later: list[float], over: float, baseline: str, limit: float | None
) -> Row:
    unit, one = ("MiB", MIB) if what == "bytes" else ("s", 1)
    return Row(
        scenario="incremental",
        case=case,
        contender=OURS,
        metric=what,
        unit=unit,
        samples=tuple(each / one for each in later),
        ratio=median(later) / over,
        baseline=baseline,
        limit=limit,
    )
