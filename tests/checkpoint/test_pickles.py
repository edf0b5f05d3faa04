"""Pickles of strangers: whatever they say, no code runs, and nothing in this process changes."""

import dataclasses
import enum
import io
import pathlib
import pickle
import pickletools
import resource
from collections import OrderedDict
from contextlib import contextmanager

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as of_torch
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

import cloudckpt
from cloudckpt.checkpoint.archives import describe_tensor
from cloudckpt.checkpoint.foreign import load_metadata
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.checkpoint.values import load_item, load_tensor
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError
from support.commit_objects import framed
from support.pickles import Call, containing, data_pkl, drop_strides, opcodes, saved, touch

URI = "s3://bucket/run/.metadata"
REFUSED = (UntrustedPickleError, CheckpointCorruptError)
SIZE, INDEX = torch.Size([4]), MetadataIndex("w", torch.Size([0]))
FORMAT = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


def tensor(**changes):
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    made = TensorStorageMetadata(TensorProperties(torch.float32), SIZE, [chunk])
    return dataclasses.replace(made, **changes)


def metadata(**changes):
    fields = {
        "state_dict_metadata": {"w": tensor()},
        "planner_data": "of the planner",
        "storage_data": {INDEX: StorageInfo("__0_0.distcp", 0, len(saved(torch.ones(4))))},
        "storage_meta": StorageMeta(),
        "version": "1.0.0",
    }
    return Metadata(**{**fields, **changes})


HONEST = metadata()


def replaced(value, code):
    """The pickle of metadata with other opcodes in the place of a value."""
    made = opcodes(HONEST)
    assert opcodes(value) in made
    return b"\x80\x05" + made.replace(opcodes(value), code) + b"."


def _describe(data):
    try:
        return describe_tensor(data)
    except Exception as error:
        raise CheckpointCorruptError("not described") from error


READERS = {
    "metadata": lambda data: load_metadata(data, URI),
    "an item": lambda data: load_item(containing(data), "x", URI),
    "an item of an old torch": lambda data: load_item(data, "x", URI),
    "a tensor": lambda data: load_tensor(containing(data), "x", URI, trust=False),
    "a description": _describe,
}


@pytest.fixture
def marker(tmp_path):
    """A file that is there once hostile code has run."""
    return tmp_path / "it-ran"


# ---- code


def raw(module, name, *arguments, protocol=4):
    """A call of a global by its name, in the opcodes of a protocol."""
    named = opcodes(module) + opcodes(name) + b"\x93"
    if protocol < 4:
        named = f"c{module}\n{name}\n".encode()
    start = b"" if protocol < 2 else bytes([0x80, protocol])
    return start + named + opcodes(arguments) + b"R."


OF_TORCH = of_torch.__name__
HOSTILE = {
    **{f"protocol {n}": lambda path, n=n: pickle.dumps(touch(path), n) for n in range(6)},
    "exec": lambda path: pickle.dumps(Call(exec, f"open({str(path)!r}, 'w')")),
    "open": lambda path: pickle.dumps(Call(open, str(path), "w")),
    "getattr": lambda path: pickle.dumps(Call(getattr, Call(__import__, "os"), "system")),
    "amid others": lambda path: pickle.dumps([torch.Size([3]), {"a": (1, touch(path))}]),
    "in metadata": lambda path: pickle.dumps(metadata(planner_data={"w": touch(path)})),
    "as an entry": lambda path: pickle.dumps(metadata(state_dict_metadata={"w": touch(path)})),
    "as a save id": lambda path: pickle.dumps(metadata(storage_meta=StorageMeta("", touch(path)))),
    "in a key": lambda path: pickle.dumps(metadata(storage_data={touch(path): None})),
    "with a checksum": lambda path: framed(metadata(planner_data={"w": touch(path)})),
    "torch.load": lambda path: pickle.dumps(Call(torch.load, io.BytesIO(b""))),
    "torch.storage._load_from_bytes": lambda path: pickle.dumps(
        Call(torch.storage._load_from_bytes, pickle.dumps(touch(path)))
    ),
    "pathlib.Path.touch": lambda path: raw("pathlib", "Path.touch", path),
    "a method of an allowed class": lambda path: raw(OF_TORCH, "Metadata.__init__"),
    "the globals of a method": lambda path: raw(
        OF_TORCH, "MetadataIndex.__post_init__.__globals__"
    ),
    "a module in an allowed module": lambda path: raw(OF_TORCH, "os.system", f"touch '{path}'"),
    "a module in torch": lambda path: raw("torch", "os.system", f"touch '{path}'"),
    "a name of Python 2": lambda path: raw("__builtin__", "execfile", str(path), protocol=2),
    "an instance of protocol 0": lambda path: f"(S\"touch '{path}'\"\niposix\nsystem\n.".encode(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_code_in_a_pickle_does_not_run(name, reader, marker):
    with pytest.raises(REFUSED) as caught:
        READERS[reader](HOSTILE[name](marker))
    assert not marker.exists()
    if reader == "metadata":
        assert isinstance(caught.value, UntrustedPickleError)
        assert caught.value.uri == URI


# ---- what is there already

CLASSES = (
    *(Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, StorageMeta),
    *(ChunkStorageMetadata, TensorProperties, StorageInfo, _MEM_FORMAT_ENCODING),
    *(OrderedDict, pathlib.Path, pathlib.PurePosixPath, torch.Size, torch.dtype, enum.Enum),
    *(torch.FloatStorage, numpy.ndarray, numpy.dtype),
)


def picture():
    """Everything that a pickle could change about the classes it may name."""
    members = {member: dict(vars(member)) for member in _MEM_FORMAT_ENCODING}
    names = {cls: (cls.__name__, cls.__qualname__, cls.__bases__, cls.__mro__) for cls in CLASSES}
    return {cls: dict(vars(cls)) for cls in CLASSES}, names, members


def with_state(thing, state):
    return opcodes(thing) + opcodes(state) + b"b"


CHANGES = {
    "a member of an enum": with_state(FORMAT, {"_name_": "poisoned", "poison": 1}),
    "a member of an enum, by name": with_state(
        Call(getattr, _MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"), {"_value_": 0}
    ),
    "the bases of a class": with_state(Metadata, (None, {"__bases__": (StorageMeta,)})),
    **{
        f"{field} of {kind.__name__}": with_state(kind, (None, {field: "poisoned"}))
        for kind in (Metadata, MetadataIndex, ChunkStorageMetadata)
        for field in ("__name__", "__qualname__", "__module__", "poison")
    },
    "a method of a class": with_state(pathlib.Path, (None, {"exists": torch.Size})),
    "a method of a class, as a dict": with_state(pathlib.Path, {"exists": None}),
    "an element type": with_state(torch.float32, (None, {"a": None})),
    "a layout": with_state(torch.strided, {"a": None}),
    "a size": with_state(SIZE, {"a": None}),
    "the items of a class": opcodes(Metadata) + opcodes("a") + opcodes(None) + b"s",
    "the entries of a class": opcodes(OrderedDict) + opcodes(None) + b"a",
}
PLACES = ["of the planner", "1.0.0", HONEST.state_dict_metadata, FORMAT]


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_that_was_there_before_is_changed(name):
    before = picture()
    alone = b"\x80\x04" + CHANGES[name] + b"."
    attempts = [("metadata", replaced(place, CHANGES[name])) for place in PLACES]
    for reader, data in (*attempts, *((reader, alone) for reader in READERS)):
        with pytest.raises(REFUSED):
            READERS[reader](data)
        assert picture() == before
    assert load_metadata(framed(HONEST), URI) == HONEST


def test_a_description_changes_no_class_of_torch():
    changed, before = with_state(torch.FloatStorage, (None, {"poison": 1})), picture()
    with pytest.raises(CheckpointCorruptError):
        READERS["a description"](b"\x80\x04" + changed + b".")
    assert picture() == before


VALUES = [numpy.arange(3), {"p": pathlib.PurePosixPath("a")}, OrderedDict(a=frozenset({1}))]
SEEDS = {
    "metadata": [pickle.dumps(HONEST, protocol) for protocol in range(2, 6)],
    "an item": [pickle.dumps(VALUES, 4)],
    "a description": [data_pkl(saved(torch.ones(3), pickle_protocol=4))],
}


@contextmanager
def little_memory():
    """A GiB more than now: an opcode with a large number makes Python's unpickler allocate it."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("reader", SEEDS)
@settings(max_examples=200)
@given(data=st.data())
def test_flipped_bits_without_a_checksum_are_told_or_harmless(reader, data):
    damaged = bytearray(data.draw(st.sampled_from(SEEDS[reader])))
    before = picture()
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        with little_memory():
            found = READERS[reader](bytes(damaged))
    except (*REFUSED, MemoryError):
        pass
    else:
        assert isinstance(found, Metadata) or reader != "metadata"
    assert picture() == before


# ---- there and back


def shapes(tmp_path):
    """Metadata of many shapes, as torch and its planners leave it."""
    state = {
        "model": {"w": torch.randn(4, 5), "half": torch.randn(3).half(), "none": torch.zeros(0)},
        "scalar": torch.tensor(1.0),
        "optimizer": OrderedDict(step=3, betas=(0.9, 0.99), names=["a", {"b": 1}]),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    yield pickle.loads((tmp_path / ".metadata").read_bytes())
    yield metadata()
    size = torch.Size([2])
    sparse = TensorProperties(torch.float32, layout=torch.sparse_coo, pin_memory=True)
    yield metadata(state_dict_metadata={"w": TensorStorageMetadata(sparse, size, [])})
    info = StorageInfo("__0_0.distcp", 1 << 40, 1 << 33, ["zstd", "other"])
    yield metadata(storage_data={MetadataIndex("w", size, 3): info, MetadataIndex("step"): info})
    yield metadata(storage_data=None, storage_meta=None, version="1.0.0", planner_data=None)
    yield metadata(storage_meta=StorageMeta(pathlib.PurePosixPath("/a"), None, "load", ["m"]))
    yield metadata(storage_meta=StorageMeta(5, 1, (7,), None), version=1)  # as torch never writes
    of_another_library, shared = metadata(), ["shared", ("a", 1)]
    of_another_library.mcore_data = {"a": [1, 2]}
    yield of_another_library
    yield metadata(
        planner_data={
            "plain": [None, True, False, 0, -1, 255, 256, 65536, -(1 << 31), 1 << 62, 1 << 200],
            "texts": ("", "x" * 300, b"", b"bytes", b"\xff" * 300, bytearray(b"b")),
            "floats": (1.5, float("inf")),
            "sets": [set(), {1, 2}, frozenset(), frozenset({"a"}), ()],
            "nested": {1: {"a": {2: [{"b": ()}]}}, ("t", 1): 2, None: 3, False: 4, 1.5: 5, b"k": 6},
            "shared": [shared, shared, {"again": shared}],
            "ordered": OrderedDict(a=1, b=OrderedDict()),
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
        drop_strides(expected)
        assert vars(found) == vars(expected)
        assert repr(found) == repr(expected)
        assert load_metadata(pickletools.optimize(data), URI) == expected


@dataclasses.dataclass
class _StorageInfo:
    """As OLMo-core, NeMo and others have it: torch's fields under a name of their own."""

    relative_path: str
    offset: int
    length: int


def test_places_of_another_library_with_the_fields_of_torch_are_read():
    places = {MetadataIndex("step"): _StorageInfo("__0_0.distcp", 1024, 10)}
    found = load_metadata(pickle.dumps(metadata(storage_data=places)), URI)
    assert found.storage_data == {MetadataIndex("step"): StorageInfo("__0_0.distcp", 1024, 10)}


# ---- damage

TRAILER = 3 * (8 + 4) + 20


@pytest.mark.parametrize("trusted", [True, False])
def test_damage_is_noticed_before_anything_is_unpickled(marker, trusted):
    """Also where pickles are trusted: these are no longer the bytes that were trusted."""
    written = framed(metadata())
    trailer = written[-TRAILER:]
    with pytest.raises(CheckpointCorruptError):
        load_metadata(pickle.dumps(touch(marker)) + trailer, URI, trust_pickle=trusted)
    assert not marker.exists()


OTHERS = [b"", b"\x80", b"not a pickle", b"<html>404</html>", b"(" * 5000 + b"."]
OTHERS += [framed(metadata())[:100], framed(metadata())[:-1] + b"\2"]  # of a newer version
OTHERS += [b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f"]
OTHERS += map(pickle.dumps, [{"w": 1}, None, [metadata()], metadata().storage_meta])


@pytest.mark.parametrize("content", OTHERS, ids=range(len(OTHERS)))
@pytest.mark.parametrize("trusted", [True, False])
def test_what_is_no_metadata_is_refused(content, trusted):
    with pytest.raises(CheckpointCorruptError) as caught:
        load_metadata(content, URI, trust_pickle=trusted)
    assert caught.value.uri == URI


# ---- trust


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("home", [b"pathlib", b"pathlib._local"])
def test_paths_are_read_whatever_version_of_python_wrote_them(home, trust):
    """torch's file writer puts its folder there; Python 3.13 calls the module pathlib._local."""
    where = pathlib.PosixPath("/ckpt/run")
    written = metadata(storage_meta=StorageMeta(where, "save"))
    own = type(where).__module__.encode()
    data = pickle.dumps(written, 2).replace(b"c%b\nPosixPath\n" % own, b"c%b\nPosixPath\n" % home)
    assert b"c%b\nPosixPath\n" % home in data
    assert load_metadata(data, URI, trust_pickle=trust) == written


# ---- fields of metadata


def unchecked(cls, **fields):
    """An instance whose constructor was not asked."""
    made = object.__new__(cls)
    vars(made).update(fields)
    return made


def of_place(*fields, **more):
    place = StorageInfo(*fields)
    vars(place).update(more)
    return pickle.dumps(metadata(storage_data={INDEX: place}))


def of_entries(entries):
    return pickle.dumps(metadata(state_dict_metadata=entries))


def of_tensor(**changes):
    return of_entries({"w": tensor(**changes)})


def of_chunk(offsets, sizes):
    return of_tensor(chunks=[ChunkStorageMetadata(offsets, sizes)])


FIELDS = {
    "an item that is a text": of_entries({"w": "x"}),
    "an item that is None": of_entries({"w": None}),
    "an item that is a place": of_entries({"w": StorageInfo("f", 0, 9)}),
    "an item without a name": of_entries({1: tensor()}),
    "no items": of_entries(None),
    "items in a list": of_entries([]),
    "a storage_meta that is none": pickle.dumps(metadata(storage_meta={})),
    "a place without a name": of_place(1, 0, 9),
    "a place before the file": of_place("f", -1, 9),
    "a place of less than nothing": of_place("f", 0, -1),
    "a place too far": of_place("f", 1 << 64, 9),
    "a place that is a float": of_place("f", 0, 1.0),
    "a place with a field of tomorrow": of_place("f", 0, 9, codec="zstd"),
    "a text for a list of codecs": of_place("f", 0, 9, "zstd"),
    "an index without a name": replaced("w", opcodes(None)),
    "a key that is a list": replaced("of the planner", opcodes({}) + opcodes([]) + b"Ns"),
    "a size of its own": of_tensor(size=4),
    "a size below nothing": of_tensor(size=torch.Size([-1])),
    "a size too large": replaced(SIZE, opcodes(Call(torch.Size, (1 << 64,)))),
    "a size beyond all memory": of_tensor(size=torch.Size([1 << 30] * 3), chunks=[]),
    "a size of floats": replaced(SIZE, opcodes(Call(torch.Size, (1.0,)))),
    "no chunks": of_tensor(chunks=None),
    "chunks that are none": of_tensor(chunks=[1]),
    "a chunk of another rank": of_chunk(torch.Size([0, 0]), torch.Size([4, 4])),
    "a chunk of two ranks": of_chunk(torch.Size([0]), torch.Size([4, 4])),
    "a chunk of no size": of_chunk(torch.Size([0]), None),
    "a chunk without sizes": of_tensor(chunks=[unchecked(ChunkStorageMetadata, offsets=SIZE)]),
    "no properties": of_tensor(properties=None),
    "no element type": replaced(torch.float32, opcodes(None)),
    "a text as element type": replaced(torch.float32, opcodes("float32")),
    "a memory format of tomorrow": replaced(FORMAT, opcodes(Call(_MEM_FORMAT_ENCODING, 7))),
    **{
        f"values nested deep {n}": replaced(p, b"N" + b"\x85" * 200_000)
        for n, p in enumerate(PLACES)
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_make_no_sense_are_corrupt(name):
    assert load_metadata(replaced(INDEX, opcodes(INDEX)), URI) == HONEST
    with pytest.raises(CheckpointCorruptError) as caught:
        load_metadata(FIELDS[name], URI)
    assert caught.value.uri == URI
    assert len(str(caught.value)) < 2000


def test_the_member_of_an_enum_may_be_written_by_its_name():
    """As some versions of Python 3.11 do."""
    member = Call(getattr, _MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")
    found = load_metadata(replaced(FORMAT, opcodes(member)), URI)
    assert found.state_dict_metadata["w"].properties == TensorProperties(
        torch.float32, memory_format=torch.channels_last
    )


# ---- through the public functions


@pytest.fixture
def plant(tmp_path):
    """Writes a checkpoint of a tensor by hand; returns its URI."""

    def plant(**changes) -> str:
        folder = tmp_path / "run" / "foreign"
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(saved(torch.ones(4)))
        (folder / ".metadata").write_bytes(framed(metadata(**changes)))
        return folder.as_uri()

    return plant


def loaded(uri, **options):
    state = {"w": torch.zeros(4)}
    cloudckpt.load(state, checkpoint_id=uri, **options)
    return state["w"]


def test_a_load_runs_code_of_metadata_only_where_it_is_trusted(plant, marker):
    uri = plant(planner_data=touch(marker))
    with pytest.raises(UntrustedPickleError, match=r"system.*trust_pickle=True") as caught:
        loaded(uri)
    assert not marker.exists()
    assert caught.value.uri == f"{uri}/.metadata"
    assert torch.equal(loaded(uri, trust_pickle=True), torch.ones(4))
    assert marker.exists()


def test_a_load_runs_code_of_an_item_only_where_it_is_trusted(tmp_path, marker):
    cloudckpt.save({"x": touch(marker)}, checkpoint_id=tmp_path / "run")
    with pytest.raises(UntrustedPickleError, match="trust_pickle=True") as caught:
        cloudckpt.load({"x": None}, checkpoint_id=tmp_path / "run")
    assert not marker.exists()
    assert caught.value.item == "x"
    cloudckpt.load({"x": None}, checkpoint_id=tmp_path / "run", trust_pickle=True)
    assert marker.exists()


def places_named(names):
    indices = (MetadataIndex("w", torch.Size([number])) for number in range(len(names)))
    return {index: StorageInfo(name, 0, 10) for index, name in zip(indices, names, strict=True)}


def test_a_load_is_not_led_out_of_the_checkpoint(plant):
    with pytest.raises(CheckpointCorruptError, match="leads out of the checkpoint"):
        loaded(plant(storage_data=places_named(["../other/__0_0.distcp"])))


@pytest.mark.parametrize(
    "names",
    [["../precious"], [".metadata"], ["__0.metadata"], ["in/.metadata", "in/__0_0.distcp"]],
)
def test_a_save_over_it_runs_no_code_and_deletes_nothing_but_data(plant, tmp_path, marker, names):
    """It reads the metadata that it replaces, which could name their successor as data, too."""
    uri = plant(storage_data=places_named(names), planner_data=touch(marker))
    others = [tmp_path / "run" / "foreign" / name for name in names if name != ".metadata"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"precious")
    cloudckpt.save({"w": torch.full((4,), 2.0)}, checkpoint_id=uri)
    assert not marker.exists()
    assert [other.read_bytes() for other in others] == [b"precious"] * len(others)
    assert torch.equal(loaded(uri), torch.full((4,), 2.0))
