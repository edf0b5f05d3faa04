"""What coordination costs a job of hundreds of ranks, simulated; and the second save of four."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from benchmarks.bench import Bench
from benchmarks.children import in_child, in_ranks
from benchmarks.contenders import limit_threads
from benchmarks.meter import cpu_seconds, high_water, start_high_water
from benchmarks.operation import KEEP, SINK
from benchmarks.places import Place, local_root
from benchmarks.rows import OURS, Row
from benchmarks.server.process import ServerHandle
from benchmarks.simulated import begin, counted_gatherings, of, others, sharded
from benchmarks.states import MIB, StateSpec, filled

TORCH = "torch alone"
_LOADING = 0.75
"""Ranks that load, of those that saved."""
_SMALL = 4096


@dataclass(frozen=True)
class Aim:
    """What a number must reach at 512 ranks with 1,000 tensors, and what it should."""

    metric: str
    unit: str
    limit: float
    aim: float
    grows: bool = True
    """Whether twice the ranks may take 2.2 times as much."""


_AIMS: Mapping[str, Aim] = {
    "gathered": Aim("second save: gathered of a rank", "B", 2048, 512, grows=False),
    "commit_cpu": Aim("second save: CPU of the coordinator until the commit", "s", 0.6, 0.3),
    "plan_cpu": Aim("second save: CPU of another rank for planning", "ms", 20, 5, grows=False),
    "first_cpu": Aim("first save: finish, CPU", "s", 4, 1.5),
    "first_memory": Aim("first save: finish, memory", "MiB", 400, 400),
    "read_cpu": Aim("load: metadata, CPU of a rank", "s", 0.3, 0.05),
    "read_memory": Aim("load: metadata, memory of a rank", "MiB", 64, 64),
    "load_plan_cpu": Aim("load: planning of a rank of another layout, CPU", "s", 1, 0.2),
    "chunk": Aim("bytes of a chunk besides stock's .metadata", "B", 40, 24, grows=False),
}


def measure(bench: Bench) -> list[Row]:
    """Returns the costs of coordination by jobs of several sizes, and of 20,000 small tensors."""
    rows: list[Row] = []
    for ranks, tensors in bench.fleets:
        case = f"{ranks} ranks x {tensors:,} tensors"
        for who in (OURS, TORCH):
            found = bench.attempt(who, _simulated, bench.server.port, who, ranks, tensors)
            for name, value in (found or {}).items():
                rows.append(_row(case, who, name, value, ranks, tensors))
    if bench.taking_part(OURS):
        rows += _many_small(bench)
        rows += _real(bench)
    return rows


def _row(case: str, who: str, name: str, value: float, ranks: int, tensors: int) -> Row:
    if (aim := _AIMS.get(name)) is None:
        return Row(
            scenario="fleet", case=case, contender=who, metric=name, unit="", samples=(value,)
        )
    judged = who == OURS and (ranks, tensors) in ((512, 1000), (1024, 1000))
    limit = aim.limit * (2.2 if aim.grows and ranks == 1024 else 1)
    return Row(
        scenario="fleet",
        case=case,
        contender=who,
        metric=aim.metric,
        unit=aim.unit,
        samples=(value,),
        limit=limit if judged else None,
        note=f"aim {aim.aim:g} {aim.unit}" if judged else "",
    )


def _simulated(port: int, who: str, ranks: int, tensors: int) -> dict[str, float]:
    job = {"who": who, "tensors": tensors, "timeout": 600}
    saved = in_child(_coordinator, port, ranks=ranks, **job)
    other = in_child(_other_rank, port, ranks=ranks, **job)
    read = in_child(_reading, port, ranks=ranks, **job)
    return {**saved, **other, **read}


def _folder(port: int, who: str) -> Path:
    return local_root(port) / f"fleet-{who.replace(' ', '-')}"


def _save(
    who: str, folder: Path, state: dict[str, Any], stock: type[FileSystemWriter] = FileSystemWriter
) -> None:
    if who.startswith(OURS):
        import cloudckpt

        cloudckpt.save(state, checkpoint_id=folder)
    else:
        state_dict_saver.save(state, storage_writer=stock(folder, sync_files=False))


def _coordinator(port: int, who: str, ranks: int, tensors: int) -> dict[str, float]:
    """Rank 0 saves twice; the other ranks' objects are there, without their bytes."""
    limit_threads()
    begin(0, ranks)
    state, folder = sharded(tensors, ranks), _folder(port, who)
    marks: dict[str, float] = {}

    def gathered() -> None:
        for written in folder.glob("__0_*"):
            for rank in range(1, ranks):
                with (folder / of(written.name, rank)).open("wb") as other:
                    other.truncate(written.stat().st_size)
        marks["memory"] = start_high_water()
        marks["cpu"] = cpu_seconds()

    def saved() -> float:
        _save(who, folder, state)
        return marks.pop("committed", cpu_seconds()) - marks["cpu"]

    with others(gathered), _marked(marks):
        first = saved()
        memory = high_water() - marks["memory"]
        return {"first_cpu": first, "first_memory": memory / MIB, "commit_cpu": saved()}


@contextmanager
def _marked(marks: dict[str, float]) -> Iterator[None]:
    """Notes when the commit is sent; torch's own is taken to be sent at the end."""
    from cloudckpt.stores.local import LocalStore

    usual = LocalStore.put

    def put(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.endswith("/.metadata"):
            marks["committed"] = cpu_seconds()
        return usual(self, key, *args, **kwargs)

    LocalStore.put = put
    try:
        yield
    finally:
        LocalStore.put = usual


def _other_rank(port: int, who: str, ranks: int, tensors: int) -> dict[str, float]:
    """Rank 1 saves twice: what it sends, and what it takes until it begins to write."""
    limit_threads()
    begin(1, ranks)
    state, folder = sharded(tensors, ranks), _folder(port, f"{who}-rank")
    began = planned = 0.0

    def note(*_: Any) -> None:
        nonlocal planned
        planned = planned or cpu_seconds()

    class Writer(FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            note()
            return super().write_data(plan, planner)

    if who == OURS:
        from cloudckpt.events import subscribe

        subscribe(lambda event: note() if event.phase == "plan" else None)
        heard: dict[str, Any] = {
            "planned": lambda plan: (_all_of(plan), 7, []),
            "committed": "0" * 16,
        }
    else:
        heard = {}
    with others(**heard) as sent:
        for _ in range(2):
            sent.clear()
            began, planned = cpu_seconds(), 0.0
            _save(who, folder, state, Writer)
    return {"gathered": sum(sent), "plan_cpu": (planned - began) * 1000}


def _all_of(plan: bytes) -> Any:
    """The part of a rank that writes all that it has."""
    from cloudckpt.checkpoint.record import Record

    table = Record.parse(plan, "").table
    assert table is not None
    return list(range(table.count))


def _reading(port: int, who: str, ranks: int, tensors: int) -> dict[str, float]:
    """A rank of a job of another size reads the metadata, and plans its part."""
    limit_threads()
    folder = _folder(port, who)
    if who == OURS:
        import cloudckpt
        from cloudckpt.dcp.load_plan import CloudLoadPlanner

        reader: Any = cloudckpt.CloudStorageReader(folder)
        planner: DefaultLoadPlanner = CloudLoadPlanner(str(folder))
    else:
        reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    resident, cpu = start_high_water(), cpu_seconds()
    metadata = reader.read_metadata()
    found = {"read_cpu": cpu_seconds() - cpu, "read_memory": (high_water() - resident) / MIB}
    begin(5, int(ranks * _LOADING))
    state = sharded(tensors, ranks)
    cpu = cpu_seconds()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    planner.create_local_plan()
    found["load_plan_cpu"] = cpu_seconds() - cpu
    if who == OURS:
        indexes = sum(one.index_size for one in reader.commit.objects)
        stored = io.BytesIO((folder / ".metadata").read_bytes())
        pickle.load(stored)  # of this very run
        behind = len(stored.getbuffer()) - stored.tell()
        found["chunk"] = (behind + indexes) / (ranks * tensors)
    return found


def _many_small(bench: Bench) -> list[Row]:
    """The CPU of the second save of many small tensors over that of one of the same bytes."""
    count = bench.sized(20_000, 2_000)
    samples: dict[int, list[float]] = {count: [], 1: []}
    for _ in range(bench.rounds_of(OURS)):
        for tensors, found in samples.items():
            spec = [count * _SMALL // tensors] * tensors
            cost = bench.attempt(OURS, in_child, _second_save, bench.server.port, sizes=spec)
            found.append(float("nan") if cost is None else cost)
    ratio = median(samples[count]) / median(samples[1])
    return [
        Row(
            scenario="fleet",
            case=f"{count:,} tensors of 4 KiB, one process",
            contender=OURS,
            metric="second save: CPU",
            unit="s",
            samples=tuple(samples[count]),
            ratio=ratio,
            baseline="one tensor",
            limit=15,
            note="aim 5x",
        )
    ]


def _second_save(port: int, sizes: list[int]) -> float:
    import cloudckpt

    limit_threads()
    place = Place(port, SINK)
    options = cloudckpt.S3Options(endpoint_url=place.endpoint, addressing_style="path")
    config = cloudckpt.Config(connections=place.connections, s3=options)
    state = filled(StateSpec(tuple(sizes)))
    cloudckpt.save(state, checkpoint_id=place.uri("small"), config=config)
    began = cpu_seconds()
    cloudckpt.save(state, checkpoint_id=place.uri("small"), config=config)
    return cpu_seconds() - began


def _real(bench: Bench) -> list[Row]:
    """What four real ranks exchange in their second save, and read to load replicated tensors."""
    tensors = bench.sized(1000, 100)
    answers = bench.attempt(OURS, in_ranks, _rank_of_four, bench.server.port, 4, tensors=tensors)
    if answers is None:
        return []
    case = f"4 real ranks x {tensors:,} tensors"
    sent = max(answer["sent"] for answer in answers)
    needed = answers[0]["needed"]
    rows = [_row(case, OURS, "gathered", sent, 4, tensors)]
    rows += [
        _row(case, OURS, "plan_cpu", max(answer["plan_cpu"] for answer in answers), 4, tensors)
    ]
    rows += [
        Row(
            scenario="fleet",
            case="4 real ranks load replicated tensors",
            contender=OURS,
            metric="bytes read",
            unit="MB",
            samples=(answers[0]["read"] / 1e6,),
            ratio=answers[0]["read"] / needed,
            baseline="unique bytes",
            limit=1.05,
            note="aim 1.01x",
        ),
        Row(
            scenario="fleet",
            case="4 real ranks load replicated tensors",
            contender=OURS,
            metric="requests for metadata",
            unit="",
            samples=(answers[0]["metadata"],),
            limit=4,
            note="aim 2",
        ),
    ]
    return rows


def _rank_of_four(port: int, tensors: int) -> dict[str, float]:
    import cloudckpt
    from cloudckpt.events import subscribe

    limit_threads()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{os.environ['BENCH_RENDEZVOUS']}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    place, server = Place(port, KEEP), ServerHandle(port)
    options = cloudckpt.S3Options(endpoint_url=place.endpoint, addressing_style="path")
    config = cloudckpt.Config(connections=place.connections, s3=options)
    sent: list[int] = []
    began = planned = 0.0

    def note(event: Any) -> None:
        nonlocal planned
        planned = cpu_seconds() if event.phase == "plan" else planned

    subscribe(note)
    state = sharded(tensors, world)
    with counted_gatherings(sent):
        for _ in range(2):
            sent.clear()
            dist.barrier()
            began = cpu_seconds()
            cloudckpt.save(state, checkpoint_id=place.uri("sharded"), config=config)
    planning = planned - began
    replicated = {f"{index}": torch.full((MIB,), float(index)) for index in range(32)}
    cloudckpt.save(replicated, checkpoint_id=place.uri("replicated"), config=config)
    if rank == 0:
        server.record(True)
        server.reset()
    dist.barrier()
    cloudckpt.load(replicated, checkpoint_id=place.uri("replicated"), config=config)
    dist.barrier()
    reads = [entry for entry in server.counts().log if entry[0] in ("GetObject", "HeadObject")]
    dist.barrier()
    data = [entry for entry in reads if entry[2].endswith(".distcp")]
    found = {
        "sent": sum(sent),
        "plan_cpu": planning * 1000,
        "read": sum(entry[4] for entry in data),
        "needed": sum(tensor.nbytes for tensor in replicated.values()),
        "metadata": len(reads) - len(data),
    }
    dist.destroy_process_group()
    return found
