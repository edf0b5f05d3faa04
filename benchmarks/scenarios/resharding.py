"""Saving on some ranks and loading on others: how much more is read than is needed."""

from __future__ import annotations

import os
import pickle
import urllib.request
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.bench import Bench
from benchmarks.children import in_ranks
from benchmarks.contenders import CONTENDERS, limit_threads
from benchmarks.geometry import Region, ideal_requests, shard
from benchmarks.operation import KEEP, WrongBytesError
from benchmarks.places import Place
from benchmarks.rows import Limits, Row, limit_for
from benchmarks.server.process import ServerHandle

Shapes = dict[str, tuple[int, int]]
Found = dict[str, dict[str, float]]

_DIMS: Mapping[str, Literal[0, 1]] = {"rows": 0, "columns": 1}
_DIRECTIONS = ((4, 2), (2, 4))


def measure(bench: Bench) -> list[Row]:
    """Returns bytes read over bytes needed, and data requests over the ideal count.

    Data requests are GETs of the objects that `.metadata` names; reads of metadata are left out
    of the ratios and given in the note. `benchmarks.geometry` says what the ideal is.
    """
    wide, narrow, few = (2048, 512, 8) if bench.quick else (8192, 1024, 24)
    shapes = {f"wide.{index}": (wide, max(wide // 2, 1024)) for index in range(2)}
    shapes |= {f"narrow.{index:02d}": (narrow, narrow) for index in range(few)}
    rows: list[Row] = []
    for name in bench.taking_part("cloudckpt", "s3torchconnector"):
        found = bench.attempt(name, _all_directions, bench.server, name, shapes)
        for case, numbers in (found or {}).items():
            rows += _rows(name, case, numbers)
    return rows


def _all_directions(server: ServerHandle, contender: str, shapes: Shapes) -> Found:
    found: Found = {}
    saved: set[int] = set()
    for source, target in (*_DIRECTIONS, _DIRECTIONS[0]):
        # A job of `target` ranks saves its own, and loads what the other has saved by then.
        loads = [source] if source in saved else []
        answers = in_ranks(
            _job,
            server.port,
            target,
            contender=contender,
            shapes=shapes,
            loads=loads,
            save=target not in saved,
        )
        saved.add(target)
        found |= answers[0]
    return found


def _rows(name: str, case: str, numbers: Mapping[str, float]) -> list[Row]:
    by_rows = "rows" in case
    note = f"{numbers['metadata_bytes'] / 1e6:.2f} MB of metadata besides"
    return [
        Row(
            scenario="resharding",
            case=case,
            contender=name,
            metric="bytes read",
            unit="MB",
            samples=(numbers["bytes"] / 1e6,),
            ratio=numbers["bytes"] / numbers["needed"],
            baseline=f"needed {numbers['needed'] / 1e6:.0f} MB",
            limit=limit_for(name, Limits.BYTES_READ) if by_rows else None,
            note=note,
        ),
        Row(
            scenario="resharding",
            case=case,
            contender=name,
            metric="requests",
            unit="",
            samples=(numbers["requests"],),
            ratio=numbers["requests"] / numbers["ideal"],
            baseline=f"ideal {numbers['ideal']:.0f}",
            limit=limit_for(name, Limits.REQUESTS) if by_rows else None,
        ),
    ]


def _job(
    port: int, contender: str, shapes: Mapping[str, list[int]], loads: list[int], save: bool
) -> Found:
    """In each rank: saves for others, and loads what others saved; rank 0 counts."""
    limit_threads()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{os.environ['BENCH_RENDEZVOUS']}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    sizes = {name: (shape[0], shape[1]) for name, shape in shapes.items()}
    subject = CONTENDERS[contender].build(Place(port, KEEP))
    server = ServerHandle(port)
    found: Found = {}
    for label, dim in _DIMS.items():
        if save:
            subject.save(_sharded(sizes, dim, mesh, blank=False), f"{contender}-{world_size}-{dim}")
        for source in loads:
            name = f"{contender}-{source}-{dim}"
            state = _sharded(sizes, dim, mesh, blank=True)
            if rank == 0:
                server.record(True)
                server.reset()
            dist.barrier()
            subject.load(state, name)
            dist.barrier()
            if rank == 0:
                numbers = _numbers(server, name, dim, world_size, sizes)
                found[f"{source} to {world_size} ranks, {label}"] = numbers
            _check(state, sizes, dim, mesh)
            dist.barrier()
    dist.destroy_process_group()
    return found


def _numbers(
    server: ServerHandle, name: str, dim: int, world_size: int, sizes: Shapes
) -> dict[str, float]:
    counts = server.counts()
    server.record(False)
    with urllib.request.urlopen(f"{server.endpoint}/{KEEP}/{name}/.metadata", timeout=20) as answer:
        metadata = pickle.loads(answer.read())  # Written by this very run.
    objects = {f"{name}/{stored.relative_path}" for stored in metadata.storage_data.values()}
    reads = [entry for entry in counts.log if entry[0] == "GetObject"]
    data = [entry for entry in reads if entry[2] in objects]
    data_bytes = sum(entry[4] for entry in data)
    return {
        "bytes": data_bytes,
        "metadata_bytes": sum(entry[4] for entry in reads) - data_bytes,
        "needed": sum(rows * columns * 4 for rows, columns in sizes.values()),
        "requests": len(data),
        "ideal": ideal_requests(metadata, dim, world_size),
    }


def _sharded(sizes: Shapes, dim: int, mesh: DeviceMesh, *, blank: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for seed, (name, shape) in enumerate(sizes.items()):
        region = shard(shape, dim, mesh.get_rank(), mesh.size())
        local = _content(region, shape, seed)
        if blank:
            local.zero_()
        state[name] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    return state


def _check(state: Mapping[str, Any], sizes: Shapes, dim: int, mesh: DeviceMesh) -> None:
    for seed, (name, shape) in enumerate(sizes.items()):
        region = shard(shape, dim, mesh.get_rank(), mesh.size())
        if not torch.equal(state[name].to_local(), _content(region, shape, seed)):
            raise WrongBytesError(f"wrong bytes in {name} on rank {mesh.get_rank()}")


def _content(region: Region, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Returns the elements of `region`: each tells its own place in the whole tensor."""
    rows = torch.arange(region.row, region.row + region.rows, dtype=torch.int32)
    columns = torch.arange(region.column, region.column + region.columns, dtype=torch.int32)
    return rows[:, None] * shape[1] + columns[None, :] + seed * 1009
