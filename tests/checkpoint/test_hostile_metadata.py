"""``.metadata`` of a stranger: whatever it says, no code runs, and nothing here changes."""

import enum
import pathlib
import pickle
import struct
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
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

URI = "s3://bucket/run/.metadata"
REFUSED = (UntrustedPickleError, CheckpointCorruptError)
DCP = "torch.distributed.checkpoint.metadata"


def text(value):
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def named(module_name, name):
    return text(module_name) + text(name) + b"\x93"


def number(value):
    return b"J" + struct.pack("<i", value)


def dictionary(*pairs):
    return b"}(" + b"".join(pairs) + b"u"


def instance(module_name, name, *pairs):
    return named(module_name, name) + b")\x81" + dictionary(*pairs) + b"b"


def size(*dims):
    return named("torch", "Size") + b"(" + b"".join(map(number, dims)) + b"t\x85R"


def index(fqn=None, offset=None):
    fields = (text("fqn"), fqn or text("w"), text("offset"), offset or size(0))
    return instance(DCP, "MetadataIndex", *fields)


def place(**changes):
    fields = {"relative_path": text("f"), "offset": number(0), "length": number(9), **changes}
    pairs = [part for name, value in fields.items() for part in (text(name), value)]
    return instance("torch.distributed.checkpoint.filesystem", "_StorageInfo", *pairs)


def properties(encoding=None, dtype=None):
    encoding = encoding or named(DCP, "_MEM_FORMAT_ENCODING") + b"K\0\x85R"
    layout = named("torch.serialization", "_get_layout") + text("torch.strided") + b"\x85R"
    state = b"(" + (dtype or named("torch", "float32")) + layout + b"\x89" + encoding + b"\x89t"
    return named(DCP, "TensorProperties") + b")\x81" + state + b"b"


def chunk(offsets=None, sizes=None):
    fields = (text("offsets"), offsets or size(0), text("sizes"), sizes or size(4))
    return instance(DCP, "ChunkStorageMetadata", *fields)


def tensor(**changes):
    fields = {"properties": properties(), "size": size(4), "chunks": b"](" + chunk() + b"e"}
    pairs = [part for name, value in {**fields, **changes}.items() for part in (text(name), value)]
    return instance(DCP, "TensorStorageMetadata", *pairs)


def metadata(**changes):
    """The pickle of a whole Metadata, assembled by hand, with other opcodes in some places."""
    fields = {
        "state_dict_metadata": dictionary(text("w"), tensor()),
        "planner_data": b"N",
        "storage_data": dictionary(index(), place()),
        "storage_meta": b"N",
        "version": b"N",
        **changes,
    }
    pairs = [part for name, value in fields.items() for part in (text(name), value)]
    return b"\x80\x05" + instance(DCP, "Metadata", *pairs) + b"."


HONEST = Metadata(
    {
        "w": TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size([4]),
            [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))],
        )
    },
    storage_data={MetadataIndex("w", torch.Size([0])): StorageInfo("f", 0, 9)},
)


def test_the_assembled_metadata_is_good():
    assert load_metadata(metadata(), URI) == HONEST
    assert pickle.loads(metadata()) == HONEST


def test_the_member_of_an_enum_may_be_written_by_its_name():
    """As some versions of Python 3.11 do."""
    member = named("__builtin__", "getattr") + named(DCP, "_MEM_FORMAT_ENCODING")
    data = properties(member + text("TORCH_CHANNELS_LAST") + b"\x86R")
    found = load_metadata(
        metadata(state_dict_metadata=dictionary(text("w"), tensor(properties=data))), URI
    )
    assert found.state_dict_metadata["w"].properties == TensorProperties(
        torch.float32, memory_format=torch.channels_last
    )


# live classes

CLASSES = (
    *(Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, StorageMeta),
    *(ChunkStorageMetadata, TensorProperties, StorageInfo, _MEM_FORMAT_ENCODING),
    *(OrderedDict, pathlib.Path, pathlib.PurePosixPath, torch.Size, torch.dtype, enum.Enum),
)


def picture():
    """Everything that a pickle could change about the classes it may name."""
    members = {member: dict(vars(member)) for member in _MEM_FORMAT_ENCODING}
    names = {cls: (cls.__name__, cls.__qualname__, cls.__bases__, cls.__mro__) for cls in CLASSES}
    return {cls: dict(vars(cls)) for cls in CLASSES}, names, members


CHANGES = {
    "a member of an enum": named(DCP, "_MEM_FORMAT_ENCODING")
    + b"K\0\x85R"
    + dictionary(text("_name_"), text("poisoned"), text("poison"), b"K\1")
    + b"b",
    "a member of an enum, by name": named("builtins", "getattr")
    + b"("
    + named(DCP, "_MEM_FORMAT_ENCODING")
    + text("TORCH_CHANNELS_LAST")
    + b"tR"
    + dictionary(text("_value_"), b"K\0")
    + b"b",
    "the bases of a class": named(DCP, "Metadata")
    + b"N"
    + dictionary(text("__bases__"), named(DCP, "StorageMeta") + b"\x85")
    + b"\x86b",
    **{
        f"{field} of a class": named(DCP, kind)
        + b"N"
        + dictionary(text(field), text("poisoned"))
        + b"\x86b"
        for kind in ("Metadata", "MetadataIndex", "ChunkStorageMetadata")
        for field in ("__name__", "__qualname__", "__module__", "poison")
    },
    "a method of a class": named("pathlib", "Path")
    + b"N"
    + dictionary(text("exists"), named("torch", "Size"))
    + b"\x86b",
    "a method of a class, as a dict": named("pathlib", "Path")
    + dictionary(text("exists"), b"N")
    + b"b",
    "an element type": named("torch", "float32") + b"N" + dictionary(text("a"), b"N") + b"\x86b",
    "a layout": named("torch.serialization", "_get_layout")
    + text("torch.strided")
    + b"\x85R"
    + dictionary(text("a"), b"N")
    + b"b",
    "a size": size(4) + dictionary(text("a"), b"N") + b"b",
    "the items of a class": named(DCP, "Metadata") + text("a") + b"Ns",
    "the entries of a class": named("collections", "OrderedDict") + b"Na",
}


@pytest.mark.parametrize("where", ["planner_data", "state_dict_metadata", "version", "encoding"])
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_that_was_there_before_is_changed(name, where):
    before = picture()
    if where == "encoding":
        entry = tensor(properties=properties(encoding=CHANGES[name]))
        data = metadata(state_dict_metadata=dictionary(text("w"), entry))
    else:
        data = metadata(**{where: CHANGES[name]})
    with pytest.raises(REFUSED) as caught:
        load_metadata(data, URI)
    assert picture() == before
    assert caught.value.uri == URI
    assert load_metadata(framed(HONEST), URI) == HONEST
    assert pathlib.Path("/").exists()


# size and depth


@pytest.mark.parametrize("where", ["planner_data", "version", "state_dict_metadata"])
def test_values_nested_deep_are_refused(where):
    with pytest.raises(REFUSED) as caught:
        load_metadata(metadata(**{where: b"N" + b"\x85" * 200_000}), URI)
    assert len(str(caught.value)) < 2000


# opcodes


@settings(max_examples=200)
@given(st.data())
def test_flipped_bits_of_metadata_without_a_checksum_are_told_by_name_or_harmless(data):
    damaged = bytearray(pickle.dumps(HONEST, data.draw(st.integers(2, 5))))
    before = picture()
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = load_metadata(bytes(damaged), URI)
    except REFUSED:
        found = HONEST
    assert isinstance(found, Metadata)
    assert picture() == before


# fields


BIG = b"\x8a\x09" + (1 << 64).to_bytes(9, "little")
FIELDS = {
    "an item that is a text": {"state_dict_metadata": dictionary(text("w"), text("x"))},
    "an item that is None": {"state_dict_metadata": dictionary(text("w"), b"N")},
    "an item that is a place": {"state_dict_metadata": dictionary(text("w"), place())},
    "an item without a name": {"state_dict_metadata": dictionary(b"K\1", tensor())},
    "no items": {"state_dict_metadata": b"N"},
    "items in a list": {"state_dict_metadata": b"]"},
    "a storage_meta that is none": {"storage_meta": b"}"},
    "a version that is none": {"version": b"K\1"},
    "a save_id that is none": {
        "storage_meta": instance(DCP, "StorageMeta", text("save_id"), b"K\1")
    },
    "a place without a name": {"storage_data": dictionary(index(), place(relative_path=b"K\1"))},
    "a place before the file": {"storage_data": dictionary(index(), place(offset=number(-1)))},
    "a place of less than nothing": {"storage_data": dictionary(index(), place(length=number(-1)))},
    "a place too far": {"storage_data": dictionary(index(), place(offset=BIG))},
    "a place that is a float": {
        "storage_data": dictionary(index(), place(length=b"G" + struct.pack(">d", 1.0)))
    },
    "a place with a field of tomorrow": {"storage_data": dictionary(index(), place(codec=b"N"))},
    "an index without a name": {"storage_data": dictionary(index(fqn=b"N"), place())},
    "an index at no offset": {"storage_data": dictionary(index(offset=b"K\1"), place())},
    "a key that is a list": {"planner_data": dictionary(b"]", b"N")},
    **{
        f"a tensor with {what}": {"state_dict_metadata": dictionary(text("w"), tensor(**fields))}
        for what, fields in {
            "a size of its own": {"size": b"K\4"},
            "a size below nothing": {"size": size(-1)},
            "a size too large": {"size": named("torch", "Size") + BIG + b"\x85\x85R"},
            "a size beyond all memory": {"size": size(1 << 30, 1 << 30, 1 << 30)},
            "a size of floats": {"size": named("torch", "Size") + b"G" + bytes(8) + b"\x85\x85R"},
            "no chunks": {"chunks": b"N"},
            "chunks that are none": {"chunks": b"](K\1e"},
            "a chunk of another rank": {"chunks": b"](" + chunk(size(0, 0), size(4, 4)) + b"e"},
            "a chunk of two ranks": {"chunks": b"](" + chunk(size(0), size(4, 4)) + b"e"},
            "a chunk of no size": {"chunks": b"](" + chunk(sizes=b"N") + b"e"},
            "no properties": {"properties": b"N"},
            "no element type": {"properties": properties(dtype=b"N")},
            "a class as element type": {"properties": properties(dtype=text("float32"))},
            "no memory format": {"properties": properties(encoding=b"K\0")},
            "a memory format of tomorrow": {
                "properties": properties(named(DCP, "_MEM_FORMAT_ENCODING") + b"K\7\x85R")
            },
        }.items()
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_make_no_sense_are_corrupt(name):
    with pytest.raises(CheckpointCorruptError) as caught:
        load_metadata(metadata(**FIELDS[name]), URI)
    assert caught.value.uri == URI
