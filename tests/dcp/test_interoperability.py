"""torch's own readers and writers, and ours, on each other's checkpoints."""

import dataclasses
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

import cloudckpt
from cloudckpt.checkpoint.torch_private import with_strides
from cloudckpt.errors import CheckpointCorruptError

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
# their layouts say what is different: more ranks, fewer, other cuts
PAIRS = [("4 rows", "2 columns"), ("2x2 blocks", "3 rows"), ("2 replicas of 2 rows", "4 columns")]


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
def test_what_torch_wrote_is_read_by_us(writer, local):
    dcp.save(_mixed(), storage_writer=WRITERS[writer](local))
    loaded = blank_like(_mixed())
    local.load(loaded)
    assert_same(loaded, {k: v.detach() if k == "parameter" else v for k, v in _mixed().items()})


def _save_by(writer: str, name: str, place: Place) -> None:
    dcp.save(spread(full_state(), LAYOUTS[name]), storage_writer=WRITERS[writer](place))


def _load_by_us(name: str, place: Place) -> None:
    state = spread(full_state(), LAYOUTS[name], blank=True)
    place.load(state)
    check_local_parts(state, LAYOUTS[name])


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("before", "after"), PAIRS[:1])
def test_what_torch_wrote_is_resharded_by_us(writer, before, after, local, ranks):
    ranks(LAYOUTS[before].world, _save_by, writer, before, local)
    ranks(LAYOUTS[after].world, _load_by_us, after, local)


_SIGNS = {
    "conjugate": torch.complex(numbered(4, 3), numbered(4, 3, first=100)).conj(),
    "conjugate, transposed": torch.complex(numbered(4, 3), numbered(4, 3, first=9)).t().conj(),
    "negative": torch._neg_view(numbered(4, 4, first=1)),
}


@pytest.mark.parametrize("kind", _SIGNS)
def test_what_torch_wrote_with_a_lazy_sign_has_its_sign(kind, local):
    dcp.save({"v": _SIGNS[kind]}, storage_writer=FileSystemWriter(local.path))
    loaded = blank_like({"v": _SIGNS[kind].resolve_conj().resolve_neg()})
    local.load(loaded)
    assert_same(loaded["v"], _SIGNS[kind])


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


# ---- ours, read by them


def _save_by_us(name: str, place: Place) -> None:
    place.save(spread(full_state(), LAYOUTS[name]))


def _load_by_torch(name: str, place: Place) -> None:
    state = spread(full_state(), LAYOUTS[name], blank=True)
    dcp.load(state, storage_reader=FileSystemReader(place.path))
    check_local_parts(state, LAYOUTS[name])


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_what_we_wrote_is_resharded_by_torch(before, after, local, ranks):
    ranks(LAYOUTS[before].world, _save_by_us, before, local)
    ranks(LAYOUTS[after].world, _load_by_torch, after, local)


def test_the_properties_in_our_metadata_are_those_that_torch_writes(local):
    ours, theirs = local.at("ours"), local.at("theirs")
    ours.save(_mixed())
    dcp.save(_mixed(), storage_writer=FileSystemWriter(theirs.path))
    mine = FileSystemReader(ours.path).read_metadata()
    stock = FileSystemReader(theirs.path).read_metadata()
    for entry in stock.state_dict_metadata.values():
        if hasattr(entry, "properties"):  # what torch 2.15 adds, and torch 2.14 can't read
            entry.properties = with_strides(entry.properties, None)
    assert mine.state_dict_metadata == stock.state_dict_metadata
    assert mine.planner_data == stock.planner_data
    assert mine.storage_data.keys() == stock.storage_data.keys()


# ---- in each other's place


@pytest.mark.parametrize("writer", WRITERS)
def test_a_checkpoint_by_torch_is_replaced_whole(writer, local):
    dcp.save(_mixed(), storage_writer=WRITERS[writer](local))
    theirs = set(local.names())
    local.save({"t": numbered(10)})
    assert theirs & set(local.names()) == {".metadata"}
    loaded = {"t": torch.zeros(10)}
    local.load(loaded)
    assert_same(loaded["t"], numbered(10))


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
