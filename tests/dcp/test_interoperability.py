"""torch's own readers and writers, and ours, on each other's checkpoints."""

import dataclasses
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, _async_process_executor
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt.errors import CheckpointCorruptError
from support.pickles import drop_strides

from .layouts import LAYOUTS, check_local_parts, full_state, spread
from .places import Place
from .stock import FsspecWriter
from .values import assert_same, blank_like, numbered

WRITERS = {
    "FileSystemWriter": lambda place: FileSystemWriter(place.path),
    "a file an item, two threads": lambda place: FileSystemWriter(
        place.path, single_file_per_rank=False, thread_count=2
    ),
    "FsspecWriter, two threads": lambda place: FsspecWriter(place.uri, thread_count=2),
    "zstd, FsspecWriter, a file an item": lambda place: FsspecWriter(
        place.uri, _extensions=[ZStandard()], single_file_per_rank=False
    ),
}


def _mixed() -> dict:
    """Values that are no tensors, and tensors that torch stores in its own ways."""
    return {
        "nested": {"values": [1, "two", numbered(5)], "none": None},
        "transposed": numbered(30, 40).t(),
        "slice of a large one": numbered(50, 60)[10:20, 5:9],
        "no dimension": torch.tensor(2.5),
        "no element": torch.empty(0, 3),
        "bf16": numbered(200, dtype=torch.bfloat16),
        "bytes off alignment": numbered(90, dtype=torch.uint8)[7:],
        "parameter": torch.nn.Parameter(numbered(4, 4)),
        "large": numbered(700, 1000),
    }


# ---- theirs, read by us


@pytest.mark.parametrize("writer", WRITERS)
def test_what_torch_wrote_is_read_by_us_and_replaced_whole(writer, local):
    dcp.save(_mixed(), storage_writer=WRITERS[writer](local))
    local.load(loaded := blank_like(_mixed()))
    assert_same(loaded, {k: v.detach() if k == "parameter" else v for k, v in _mixed().items()})
    theirs = set(local.names())
    local.save({"t": numbered(10)})
    assert theirs & set(local.names()) == {".metadata"}
    local.load(loaded := {"t": torch.zeros(10)})
    assert_same(loaded["t"], numbered(10))


def _save_by(writer: str, place: Place) -> None:
    dcp.save(spread(full_state(), LAYOUTS["2 columns"]), storage_writer=WRITERS[writer](place))


def _load_by_us(place: Place) -> None:
    place.load(state := spread(full_state(), LAYOUTS["3 rows"], blank=True))
    check_local_parts(state, LAYOUTS["3 rows"])


@pytest.mark.parametrize("writer", WRITERS)
def test_what_torch_wrote_is_resharded_by_us(writer, local, ranks):
    ranks(2, _save_by, writer, local)
    ranks(3, _load_by_us, local)


def test_what_torch_wrote_with_a_lazy_sign_has_its_sign(local):
    complex_ = torch.complex(numbered(4, 3), numbered(4, 3, first=100))
    negated = torch._neg_view(numbered(4, 4, first=1))
    signs = {"conjugate": complex_.conj(), "turned": complex_.t().conj(), "negative": negated}
    dcp.save(signs, storage_writer=FileSystemWriter(local.path))
    plain = {name: value.resolve_conj().resolve_neg() for name, value in signs.items()}
    local.load(loaded := blank_like(plain))
    assert_same(loaded, plain)


def test_a_compressed_item_of_an_unknown_transform_is_no_silent_garbage(local):
    dcp.save(
        {"t": numbered(100)}, storage_writer=FileSystemWriter(local.path, _extensions=[ZStandard()])
    )
    metadata = FileSystemReader(local.path).read_metadata()
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.unheard-of/1"]
    with open(f"{local.path}/.metadata", "wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(cloudckpt.errors.CloudCheckpointError, match=r"stream\.unheard-of"):
        local.load({"t": torch.zeros(100)})


# ---- ours, read by them; what torch reads of drawn states: see tests/evolving


def _save_by_torch(place: Place, kind: AsyncCheckpointerType) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where the saving processes meet
    try:
        layout = LAYOUTS["2 rows" if dist.get_world_size() == 2 else "one rank"]
        state = {**spread({"sharded": numbered(101, 400)}, layout), "step": 6}
        writer = place.writer()
        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        assert isinstance(future.result(150), Metadata)
    finally:
        del os.environ["MASTER_ADDR"]
        _async_process_executor._CHECKPOINT_PROCESS = None  # which ends it


@pytest.mark.parametrize(
    ("world", "kind"), [(2, AsyncCheckpointerType.THREAD), (1, AsyncCheckpointerType.PROCESS)]
)
def test_async_save_of_torch_saves_by_our_writer(world, kind, s3, ranks):
    ranks(world, _save_by_torch, s3, kind, deadline=280)
    s3.load(loaded := {"sharded": torch.zeros(101, 400), "step": 0})
    assert_same(loaded, {"sharded": numbered(101, 400), "step": 6})


def test_the_properties_in_our_metadata_are_those_that_torch_writes(local):
    ours, theirs = local.at("ours"), local.at("theirs")
    ours.save(_mixed())
    dcp.save(_mixed(), storage_writer=FileSystemWriter(theirs.path))
    mine = FileSystemReader(ours.path).read_metadata()
    stock = FileSystemReader(theirs.path).read_metadata()
    drop_strides(stock)
    assert mine.state_dict_metadata == stock.state_dict_metadata
    assert mine.planner_data == stock.planner_data
    assert mine.storage_data.keys() == stock.storage_data.keys()


# ---- damage


@pytest.mark.parametrize(
    ("field", "value"),
    [(8, b"\x01"), (10, b"\x63"), (46, b"\xff")],
    ids=["encrypted", "compressed in an unknown way", "a name of no encoding"],
)
def test_a_damaged_directory_in_a_shard_of_torch_is_corrupt_by_name(local, field, value):
    """Python's zipfile has errors of many kinds for it."""
    dcp.save({"t": numbered(10)}, storage_writer=FileSystemWriter(local.path))
    (name,) = local.data()
    with open(f"{local.path}/{name}", "r+b") as file:
        data = file.read()
        file.seek(data.index(b"PK\x01\x02") + field)  # the directory's entry of data.pkl
        file.write(value)
    with pytest.raises(CheckpointCorruptError):
        local.load({"t": torch.zeros(10)})


@pytest.mark.parametrize("partial", [False, True])
def test_metadata_of_torch_that_lack_a_part_of_a_tensor_are_damaged(local, partial):
    """torch's reader leaves as it is what no chunk has."""
    dcp.save({"t": numbered(6, 4), "u": numbered(3)}, checkpoint_id=local.path)
    with open(f"{local.path}/.metadata", "r+b") as file:
        metadata = pickle.load(file)
        [chunk] = metadata.state_dict_metadata["t"].chunks
        metadata.state_dict_metadata["t"].chunks = [
            dataclasses.replace(chunk, sizes=torch.Size([5, 4]))
        ]
        file.seek(0)
        file.truncate()
        pickle.dump(metadata, file)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True) if partial else None
    with pytest.raises(CheckpointCorruptError, match="20 of the 24 elements of t"):
        cloudckpt.load(
            {"t": torch.zeros(6, 4), "u": torch.zeros(3)}, checkpoint_id=local.uri, planner=planner
        )
    cloudckpt.load({"u": torch.zeros(3)}, checkpoint_id=local.uri)
