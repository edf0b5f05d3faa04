"""Models in safetensors files over our own format, beside what others do with such files."""

from __future__ import annotations

import os
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.bench import Bench
from benchmarks.children import in_ranks
from benchmarks.contenders import CONTENDERS, limit_threads
from benchmarks.meter import Cost, measure
from benchmarks.operation import SINK
from benchmarks.places import Place
from benchmarks.rows import OURS, OURS_AS_MODEL, Limits, Row
from benchmarks.scenarios.plain import compare
from benchmarks.states import GIB, MIB

_RANKS = 4
_ONLY_LOADS = "runai-streamer"  # its files are saved as those of another contender


def measure_models(bench: Bench) -> list[Row]:
    """Returns CPU over that of our own format, wall time and extra memory."""
    names = bench.taking_part(OURS, OURS_AS_MODEL, "safetensors-boto3", _ONLY_LOADS)
    rows = compare(bench, "safetensors", names, baseline=OURS, cpu_limit=Limits.MODEL_CPU)
    rows = [row for row in rows if row.contender != _ONLY_LOADS or row.case.startswith("load")]
    return [*rows, *_by_columns(bench)]


def _by_columns(bench: Bench) -> list[Row]:
    """What ranks that have columns of all tensors take, the most of any of them."""
    if OURS_AS_MODEL not in bench.taking_part(OURS, OURS_AS_MODEL):
        return []
    total = bench.sized(GIB, 128 * MIB)
    found: dict[str, list[list[Cost]]] = {OURS: [], OURS_AS_MODEL: []}
    for turn in range(bench.rounds_of(OURS_AS_MODEL)):
        for name, costs in found.items():
            done = bench.attempt(
                name,
                in_ranks,
                _save_columns,
                bench.server.port,
                _RANKS,
                contender=name,
                total=total,
                name=f"columns-{turn}",
            )
            bench.server.clear(SINK)
            if done is None:
                return []
            costs.append([Cost(**one) for one in done])
    case, gib = f"save {total // MIB} MiB by columns, {_RANKS} ranks", total / GIB
    cpu = {
        name: tuple(sum(one.cpu_s for one in ranks) / gib for ranks in costs)
        for name, costs in found.items()
    }
    rows: list[Row] = []
    for name, costs in found.items():
        memory = tuple(max(one.extra_memory for one in ranks) / MIB for ranks in costs)
        rows += [
            Row(
                scenario="safetensors",
                case=case,
                contender=name,
                metric="CPU",
                unit="s/GiB",
                samples=cpu[name],
                ratio=median(cpu[name]) / median(cpu[OURS]),
                baseline=OURS,
                note="of all ranks",
            ),
            Row(
                scenario="safetensors",
                case=case,
                contender=name,
                metric="extra memory",
                unit="MiB",
                samples=memory,
                limit=Limits.EXTRA_MEMORY_MIB,
                note="of the rank that takes most",
            ),
        ]
    return rows


def _save_columns(port: int, contender: str, total: int, name: str) -> dict[str, Any]:
    """In each rank: saves its columns of square matrices of 64 MiB."""
    limit_threads()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{os.environ['BENCH_RENDEZVOUS']}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    subject = CONTENDERS[contender].build(Place(port, SINK))

    def state(edge: int, count: int) -> dict[str, DTensor]:
        parts = [torch.rand(edge, edge // size) for _ in range(count)]
        return {
            f"layer.{number}.weight": DTensor.from_local(part, mesh, [Shard(1)], run_check=False)
            for number, part in enumerate(parts)
        }

    subject.save(state(512, 4), f"{name}-warm")
    filled = state(4096, total // (64 * MIB))
    cost = asdict(measure(lambda: subject.save(filled, name)))
    dist.barrier()
    dist.destroy_process_group()
    return cost
