"""``.metadata``: readable for everybody, and a danger to nobody."""

import collections
import pathlib
import pickle
import pickletools
import struct
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.foreign import load_metadata
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError
from support.commit_objects import framed
from support.pickles import touch

URI = "s3://bucket/run/.metadata"


def example(**changes):
    properties = TensorProperties(dtype=torch.bfloat16)
    chunks = [
        ChunkStorageMetadata(torch.Size([2, 4]), torch.Size([2, 4])),
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4])),
    ]
    fields = {
        "state_dict_metadata": {
            "w": TensorStorageMetadata(properties, torch.Size([4, 4]), chunks),
            "b": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([]), []),
            "step": BytesStorageMetadata(),
        },
        "planner_data": {"w": ("model", "w"), "step": ("step",), "list.0": ("list", 0)},
        "storage_data": {
            MetadataIndex("w", torch.Size([0, 0])): StorageInfo("__0_0.distcp", 0, 999),
            MetadataIndex("step"): StorageInfo("__0_0.distcp", 1024, 10),
        },
        "storage_meta": StorageMeta("s3://bucket/run", "cloudckpt-1-ab-7-00000000"),
    }
    return Metadata(**{**fields, **changes})


# there and back


def shapes(tmp_path):
    """Metadata of many shapes, as torch and its planners leave it."""
    state = {
        "model": {"w": torch.randn(4, 5), "half": torch.randn(3).half(), "none": torch.zeros(0)},
        "scalar": torch.tensor(1.0),
        "optimizer": collections.OrderedDict(step=3, betas=(0.9, 0.99), names=["a", {"b": 1}]),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    yield pickle.loads((tmp_path / ".metadata").read_bytes())
    yield example()
    size = torch.Size([2])
    sparse = TensorProperties(torch.float32, layout=torch.sparse_coo, pin_memory=True)
    yield example(state_dict_metadata={"w": TensorStorageMetadata(sparse, size, [])})
    info = StorageInfo("__0_0.distcp", 1 << 40, 1 << 33, ["zstd", "other"])
    yield example(storage_data={MetadataIndex("w", size, 3): info, MetadataIndex("step"): info})
    yield example(storage_data=None, storage_meta=None, version="1.0.0", planner_data=None)
    yield example(storage_meta=StorageMeta(pathlib.PurePosixPath("/a"), None, "load", ["m"]))
    shared = ["shared", ("a", 1)]
    yield example(
        planner_data={
            "plain": [None, True, False, 0, -1, 255, 256, 65536, -(1 << 31), 1 << 62, 1 << 200],
            "texts": ("", "x" * 300, b"", b"bytes", b"\xff" * 300, bytearray(b"b")),
            "floats": (1.5, float("inf")),
            "sets": [set(), {1, 2}, frozenset(), frozenset({"a"}), ()],
            "nested": {1: {"a": {2: [{"b": ()}]}}, ("t", 1): 2, None: 3, False: 4, 1.5: 5, b"k": 6},
            "shared": [shared, shared, {"again": shared}],
            "ordered": collections.OrderedDict(a=1, b=collections.OrderedDict()),
            "complex": 1 + 2j,
            "kinds": [torch.float8_e4m3fn, torch.int8, torch.sparse_csr, torch.Size([1, 2])],
            "halves of pairs": "\ud800",
            "many": list(range(3000)),
        }
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pickler", [pickle.dumps, pickle._dumps], ids=["C", "Python"])
def test_metadata_of_all_shapes_and_protocols_is_what_pickle_makes_of_it(
    tmp_path, protocol, pickler
):
    for written in shapes(tmp_path):
        data = pickler(written, protocol)
        found, expected = load_metadata(data, URI), pickle.loads(data)
        assert found == expected
        assert repr(found) == repr(expected)
        assert load_metadata(pickletools.optimize(data), URI) == expected


def test_what_other_libraries_keep_on_the_metadata_stays():
    written = example()
    written.mcore_data = {"a": [1, 2]}
    found = load_metadata(pickle.dumps(written), URI)
    assert found.mcore_data == {"a": [1, 2]}


@dataclass
class _StorageInfo:
    """As OLMo-core, NeMo and others have it: torch's fields under a name of their own."""

    relative_path: str
    offset: int
    length: int


def test_places_of_another_library_with_the_fields_of_torch_are_read():
    places = {MetadataIndex("step"): _StorageInfo("__0_0.distcp", 1024, 10)}
    found = load_metadata(pickle.dumps(example(storage_data=places)), URI)
    assert found.storage_data == {MetadataIndex("step"): StorageInfo("__0_0.distcp", 1024, 10)}


# damage


@pytest.fixture
def marker(tmp_path):
    """A file that is there once hostile code has run."""
    return tmp_path / "it-ran"


TRAILER = 3 * (8 + 4) + 20


def test_no_flipped_bit_goes_unnoticed():
    """Each bit of it: what is read is what was written, or an error says otherwise."""
    written = framed(example())
    unnoticed = []
    for at in range(len(written)):
        damaged = bytearray(written)
        damaged[at] ^= 1 << (at % 8)
        try:
            found = load_metadata(damaged, URI)
        except CheckpointCorruptError:
            continue
        if found != example() or at < len(written) - TRAILER:
            unnoticed.append(at)
    assert unnoticed == []


@pytest.mark.parametrize("trusted", [True, False])
def test_damage_is_noticed_before_anything_is_unpickled(marker, trusted):
    """Also where pickles are trusted: these are no longer the bytes that were trusted."""
    written = framed(example())
    trailer = written[-TRAILER:]
    with pytest.raises(CheckpointCorruptError):
        load_metadata(pickle.dumps(touch(marker)) + trailer, URI, trust_pickle=trusted)
    assert not marker.exists()


OTHERS = [b"", b"\x80", b"not a pickle", b"<html>404</html>", b"(" * 5000 + b"."]
OTHERS += [framed(example())[:100], b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f"]
OTHERS += map(pickle.dumps, [{"w": 1}, None, [example()], example().storage_meta])


@pytest.mark.parametrize("content", OTHERS, ids=range(len(OTHERS)))
@pytest.mark.parametrize("trusted", [True, False])
def test_what_is_no_metadata_is_refused(content, trusted):
    with pytest.raises(CheckpointCorruptError) as caught:
        load_metadata(content, URI, trust_pickle=trusted)
    assert caught.value.uri == URI


# trust


@dataclass
class OfTheUser:
    value: int


def test_a_class_of_the_user_is_refused_by_name_unless_pickles_are_trusted(marker):
    written = example(planner_data=OfTheUser(7))
    with pytest.raises(UntrustedPickleError, match=r"OfTheUser.*trust_pickle=True"):
        load_metadata(framed(written), URI)
    assert load_metadata(framed(written), URI, trust_pickle=True) == written
    with pytest.raises(CheckpointCorruptError):
        load_metadata(pickle.dumps(touch(marker)), URI, trust_pickle=True)
    assert marker.exists()


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("home", [b"pathlib", b"pathlib._local"])
def test_paths_are_read_whatever_version_of_python_wrote_them(home, trust):
    """torch's file writer puts its folder there; Python 3.13 calls the module pathlib._local."""
    where = pathlib.PosixPath("/ckpt/run")
    written = example(storage_meta=StorageMeta(where, "save"))
    own = type(where).__module__.encode()
    data = pickle.dumps(written, 2).replace(b"c%b\nPosixPath\n" % own, b"c%b\nPosixPath\n" % home)
    assert b"c%b\nPosixPath\n" % home in data
    assert load_metadata(data, URI, trust_pickle=trust) == written


def test_the_trailer_is_what_the_format_says_and_one_of_a_newer_version_is_told():
    data = framed(example())
    size, _, body, _, notes, _, magic = struct.unpack("<QIQIQI20s", data[-TRAILER:])
    assert magic == b"cloudckpt-metadata\0\1"
    assert size == len(data) - TRAILER
    assert (body, notes) == (0, 0)
    with pytest.raises(CheckpointCorruptError, match="newer cloudckpt"):
        load_metadata(data[:-1] + b"\2", URI)
