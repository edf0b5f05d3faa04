"""What stands twice or three times in a checkpoint says the same, or a verification names what not.

All checksums are made right again behind each change: what is tried here no checksum can find.
"""

from __future__ import annotations

import dataclasses
import pickle
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

import cloudckpt
from cloudckpt.checkpoint.inventory import Inventory
from cloudckpt.checkpoint.object_index import code_of
from cloudckpt.checkpoint.pickled import metadata_pickle
from cloudckpt.checkpoint.record import Record, bound
from cloudckpt.checkpoint.trailer import Trailer, with_trailer
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import CheckpointCorruptError, Damage
from cloudckpt.runs.verifying import verify
from dcp.layouts import LAYOUTS, full_state, spread

STATE = {
    "large": torch.arange(60_000.0).reshape(300, 200),
    "a": torch.arange(24.0).reshape(4, 6),
    "b": torch.arange(24, dtype=torch.int32),
    "value": {"step": 7},
}


@dataclasses.dataclass
class Tampered:
    """A checkpoint, the parts of whose commit object can be replaced."""

    path: Path

    def __post_init__(self) -> None:
        data = self._commit.read_bytes()
        trailer = Trailer.at_end_of(data, "")
        assert trailer is not None
        self.pickled = data[: trailer.size]
        self.record = data[trailer.size : trailer.size + trailer.body_size]
        self.notes = data[trailer.size + trailer.body_size :][: trailer.notes_size]

    @property
    def _commit(self) -> Path:
        return self.path / ".metadata"

    def write(self) -> None:
        parts = with_trailer(self.pickled, self.record, self.notes)
        self._commit.write_bytes(b"".join(parts))

    def parsed(self) -> Record:
        return Record.parse(self.record, "", bound(len(self.pickled)))

    def inventory(self) -> Inventory:
        found = self.parsed().inventory
        assert found is not None
        return found

    def change_pickle(self, change: Callable[[Metadata], None]) -> None:
        metadata = pickle.loads(self.pickled)
        change(metadata)
        self.pickled = pickle.dumps(metadata, protocol=4)
        self.write()

    def change_columns(self, change: Callable[[Inventory], Inventory], *, both: bool) -> None:
        """``both``: the pickle says the same then, as after a defect of the save itself."""
        attempt = self.parsed().attempt
        inventory = change(self.inventory())
        if both:
            self.pickled = metadata_pickle(inventory, attempt)
        self.record = Record.of(inventory, attempt).to_bytes()
        self.write()

    def change_index(self, name: str, change: Callable[[Index, int], None]) -> None:
        """Of the object in which an item is."""
        inventory = self.inventory()
        written, offset, _ = inventory.extent_of(inventory.entries[name].first)
        path = self.path / written.name
        data = path.read_bytes()
        start = written.size - written.index_size
        index = Index.of(data[start:])
        change(index, index.at(offset))
        data = data[:start] + index.pack()
        path.write_bytes(data)
        changed = dataclasses.replace(
            written, checksum=CRC32C.of(data), index_crc=CRC32C.of(data[start:])
        )
        objects = [changed if one is written else one for one in inventory.objects]
        self.change_columns(lambda found: dataclasses.replace(found, objects=objects), both=False)

    def damages(self) -> list[Damage]:
        with pytest.raises(CheckpointCorruptError) as caught:
            verify(self.path)
        return list(caught.value.damages)

    def said_of(self, name: str) -> str:
        """What is wrong with an item, by the damages that name it."""
        damages = self.damages()
        assert name in {damage.item for damage in damages}, damages
        return "; ".join(damage.what for damage in damages if damage.item == name)


@dataclasses.dataclass
class Index:
    """The index of an object, to be changed."""

    header: bytes
    heads: list[int]
    tails: list[int]
    codes: list[int]
    raws: list[int]
    sums: bytes

    @classmethod
    def of(cls, data: bytes) -> Index:
        (count,) = struct.unpack_from("<I", data, 8)
        found = struct.unpack_from(f"<{count}H{count}H{count}B{count}Q", data, 16)
        columns = [list(found[start : start + count]) for start in range(0, 4 * count, count)]
        return cls(data[:16], *columns, data[16 + 13 * count :])

    def pack(self) -> bytes:
        count = len(self.heads)
        numbers = struct.pack(
            f"<{count}H{count}H{count}B{count}Q",
            *(*self.heads, *self.tails, *self.codes, *self.raws),
        )
        return self.header + numbers + self.sums

    def at(self, offset: int) -> int:
        """The number of the item that begins at a byte."""
        start = 0
        for number, sizes in enumerate(zip(self.heads, self.raws, self.tails, strict=True)):
            if start == offset:
                return number
            start += -(-sum(sizes) // 64) * 64
        raise AssertionError("nothing begins there")


@pytest.fixture
def saved(tmp_path) -> Tampered:
    cloudckpt.save(STATE, checkpoint_id=tmp_path / "step-1")
    return Tampered(tmp_path / "step-1")


def place(metadata: Metadata, name: str) -> Any:
    """What torch's metadata say of where an item is."""
    return next(found for index, found in metadata.storage_data.items() if index.fqn == name)


def other_object(metadata: Metadata, name: str) -> str:
    names = {found.relative_path for found in metadata.storage_data.values()}
    return min(names - {place(metadata, name).relative_path})


def of_place(name: str, **fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for field, value in fields.items():
            found = place(metadata, name)
            setattr(found, field, value(metadata, getattr(found, field)))

    return change


def of_chunk(name: str, field: str, sizes: tuple[int, ...]) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        chunk = metadata.state_dict_metadata[name].chunks[0]
        metadata.state_dict_metadata[name].chunks[0] = dataclasses.replace(
            chunk, **{field: torch.Size(sizes)}
        )

    return change


def of_properties(name: str, field: str, value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata[name].properties, field, value)


def without_place(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex("a", torch.Size((0, 0)))]


def with_a_place(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("a", torch.Size((2, 0)))] = place(metadata, "a")


def without_a_name(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["a"]


def with_a_name(metadata: Metadata) -> None:
    metadata.state_dict_metadata["new"] = metadata.state_dict_metadata["a"]


def a_value(metadata: Metadata) -> None:
    metadata.state_dict_metadata["a"] = BytesStorageMetadata()


def two_chunks(metadata: Metadata) -> None:
    metadata.state_dict_metadata["a"].chunks *= 2


def other_path(metadata: Metadata) -> None:
    metadata.planner_data["a"] = ("elsewhere", "a")


def a_smaller_shape(metadata: Metadata) -> None:
    metadata.state_dict_metadata["large"].size = torch.Size((299, 200))


IN_THE_PICKLE = {
    "object": (of_place("large", relative_path=lambda m, _: other_object(m, "large")), "large"),
    "object of nobody": (of_place("a", relative_path=lambda *_: "__9_9.distcp"), "a"),
    "offset": (of_place("a", offset=lambda _, offset: offset + 64), "a"),
    "length": (of_place("b", length=lambda _, length: length - 1), "b"),
    "offset of a value": (
        of_place("value.step", offset=lambda _, offset: offset + 64),
        "value.step",
    ),
    "compression": (of_place("a", transform_descriptors=lambda *_: ["zstd"]), "a"),
    "offsets of a chunk": (of_chunk("large", "offsets", (1, 0)), "large"),
    "sizes of a chunk": (of_chunk("large", "sizes", (299, 200)), "large"),
    "dtype": (of_properties("b", "dtype", torch.float32), "b"),
    "gradient": (of_properties("b", "requires_grad", True), "b"),
    "shape": (a_smaller_shape, "large"),
    "kind": (a_value, "a"),
    "number of chunks": (two_chunks, "a"),
    "missing name": (without_a_name, "a"),
    "name too many": (with_a_name, "new"),
    "missing place": (without_place, "a"),
    "place too many": (with_a_place, "a"),
    "path": (other_path, "a"),
    "save": (lambda m: setattr(m.storage_meta, "save_id", "cloudckpt-1-" + "0" * 16), ""),
    "paths": (lambda m: setattr(m, "planner_data", None), ""),
    "places": (lambda m: setattr(m, "storage_data", None), ""),
}


@pytest.mark.parametrize("fact", IN_THE_PICKLE)
def test_what_the_pickle_says_otherwise_is_told_by_name(saved, fact) -> None:
    change, name = IN_THE_PICKLE[fact]
    saved.change_pickle(change)
    damages = [damage for damage in saved.damages() if damage.item == name]
    assert {damage.object for damage in damages} == {(saved.path / ".metadata").as_uri()}
    assert any("by torch's metadata" in damage.what for damage in damages)
    if fact != "places":
        assert {damage.item for damage in saved.damages()} == {name}


def test_the_old_object_of_an_item_that_has_moved_is_told(saved) -> None:
    """As a save once left it: new place and length, and the object of before."""
    saved.change_pickle(
        of_place(
            "large",
            relative_path=lambda m, _: other_object(m, "large"),
            offset=lambda *_: 0,
            length=lambda *_: 1234,
        )
    )
    with pytest.raises(CheckpointCorruptError, match=r"metadata contradict themselves") as caught:
        verify(saved.path)
    assert caught.value.item == "large"
    assert "bytes 0 to 1234" in str(caught.value)


def test_of_large_metadata_the_pickle_is_read_and_compared_too(saved, monkeypatch) -> None:
    monkeypatch.setattr("cloudckpt.checkpoint.committed._TAIL", 700)  # which is 4 MiB
    verify(saved.path)
    saved.change_pickle(of_place("b", length=lambda _, length: length - 1))
    assert "by torch's metadata" in saved.said_of("b")


def test_a_pickle_that_can_not_be_read_is_told_and_runs_nothing(saved) -> None:
    class Harm:
        def __reduce__(self):
            return (Path.touch, (saved.path / "harm",))

    saved.pickled = pickle.dumps(Harm(), protocol=4)
    saved.write()
    assert [damage.what for damage in saved.damages()] == ["can't be read by torch"]
    assert not (saved.path / "harm").exists()


def test_of_many_contradictions_each_name_is_told_once(tmp_path) -> None:
    state = {f"t{number}": torch.ones(3) for number in range(50)}
    cloudckpt.save(state, checkpoint_id=tmp_path)
    saved = Tampered(tmp_path)

    def shift(metadata: Metadata) -> None:
        for found in metadata.storage_data.values():
            found.offset += 64

    saved.change_pickle(shift)
    assert sorted(damage.item for damage in saved.damages()) == sorted(state)


def moved(name: str, column: int, by: int) -> Callable[[Inventory], Inventory]:
    def change(inventory: Inventory) -> Inventory:
        columns = [found.clone() for found in inventory.extents.columns]
        columns[column][inventory.entries[name].first] += by
        return dataclasses.replace(inventory, extents=type(inventory.extents)(*columns))

    return change


def onto(name: str, other: str) -> Callable[[Inventory], Inventory]:
    def change(inventory: Inventory) -> Inventory:
        columns = [found.clone() for found in inventory.extents.columns]
        for found in columns:
            found[inventory.entries[name].first] = found[inventory.entries[other].first]
        return dataclasses.replace(inventory, extents=type(inventory.extents)(*columns))

    return change


def entry(name: str, **fields: Any) -> Callable[[Inventory], Inventory]:
    def change(inventory: Inventory) -> Inventory:
        entries = dict(inventory.entries)
        entries[name] = dataclasses.replace(entries[name], **fields)
        return dataclasses.replace(inventory, entries=entries)

    return change


def chunk(name: str, field: str, sizes: tuple[int, ...]) -> Callable[[Inventory], Inventory]:
    def change(inventory: Inventory) -> Inventory:
        known = inventory.entries[name]
        found = inventory.chunks[len(sizes)]
        matrix = getattr(found, field).clone()
        matrix[known.place] = torch.tensor(sizes)
        chunks = {**inventory.chunks, len(sizes): dataclasses.replace(found, **{field: matrix})}
        return dataclasses.replace(inventory, chunks=chunks)

    return change


def typed(name: str, dtype: torch.dtype) -> Callable[[Inventory], Inventory]:
    def change(inventory: Inventory) -> Inventory:
        number = inventory.entries[name].properties
        properties = [
            dataclasses.replace(one, dtype=dtype) if place == number else one
            for place, one in enumerate(inventory.properties)
        ]
        return dataclasses.replace(inventory, properties=properties)

    return change


def renamed(inventory: Inventory) -> Inventory:
    entries = {"z" if name == "a" else name: one for name, one in inventory.entries.items()}
    return dataclasses.replace(inventory, entries=entries)


def on_another_path(inventory: Inventory) -> Inventory:
    return dataclasses.replace(inventory, paths={**(inventory.paths or {}), "a": ("x",)})


IN_THE_COLUMNS = {
    "offset": (moved("a", 1, 64), "a"),
    "length": (moved("b", 2, -1), "b"),
    "offset of a value": (moved("value.step", 1, -64), "value.step"),
    "the place of another": (onto("a", "b"), "a"),
    "offsets of a chunk": (chunk("a", "offsets", (1, 0)), "a"),
    "sizes of a chunk": (chunk("a", "sizes", (3, 6)), "a"),
    "shape": (entry("a", shape=(5, 6)), "a"),
    "dtype": (typed("b", torch.float32), "b"),
    "name": (renamed, "z"),
    "path": (on_another_path, "a"),
}


@pytest.mark.parametrize("fact", IN_THE_COLUMNS)
def test_what_the_columns_say_otherwise_is_told_by_name(saved, fact) -> None:
    change, name = IN_THE_COLUMNS[fact]
    if fact in ("offsets of a chunk",):  # that stays within its tensor
        saved.change_columns(entry("a", shape=(5, 6)), both=True)
    saved.change_columns(change, both=False)
    assert "by torch's metadata" in saved.said_of(name)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (moved("a", 1, 64), "a"),
        (moved("b", 2, -1), "b"),
        (moved("value.step", 1, -64), "value.step"),
        (chunk("a", "sizes", (3, 6)), "a"),
        (onto("a", "b"), "a"),
    ],
)
def test_what_the_index_says_otherwise_than_the_columns_is_told_by_name(
    saved, change, name, both
) -> None:
    """Also if pickle and columns agree."""
    saved.change_columns(change, both=both)
    told = [damage for damage in saved.damages() if damage.object.endswith(".distcp")]
    assert {damage.item for damage in told} <= {"a", "b", "value.step"}
    assert "index" in saved.said_of(name) or "another item" in saved.said_of(name)


def test_an_item_outside_of_its_object_is_named(saved) -> None:
    saved.change_columns(moved("b", 1, 1 << 30), both=False)
    with pytest.raises(CheckpointCorruptError, match="b lies outside of its object"):
        verify(saved.path)


def test_a_chunk_outside_of_its_tensor_is_named(saved) -> None:
    saved.change_columns(chunk("a", "offsets", (1, 0)), both=False)
    with pytest.raises(CheckpointCorruptError, match="a chunk of a lies outside of it"):
        verify(saved.path)


def _element_type(index: Index, number: int) -> None:
    """One whose elements have as many bytes."""
    was_whole = index.codes[number] == code_of(torch.int32)
    index.codes[number] = code_of(torch.float32 if was_whole else torch.int32)


def _no_tensor(index: Index, number: int) -> None:
    index.codes[number] = 0


def _unknown(index: Index, number: int) -> None:
    index.codes[number] = 255


def _a_tensor(index: Index, number: int) -> None:
    index.codes[number] = code_of(torch.uint8)


def _shifted(index: Index, number: int) -> None:
    index.heads[number] += 4
    index.tails[number] -= 4


def _shorter(index: Index, number: int) -> None:
    index.raws[number] -= 4
    index.tails[number] += 4


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_element_type, "a"),
        (_element_type, "b"),
        (_element_type, "large"),
        (_no_tensor, "a"),
        (_unknown, "b"),
        (_a_tensor, "value.step"),
        (_shifted, "a"),
        (_shorter, "b"),
    ],
)
def test_what_an_index_says_otherwise_is_told_by_name(saved, change, name) -> None:
    saved.change_index(name, change)
    damages = saved.damages()
    assert name in {damage.item for damage in damages}
    assert all(damage.object.endswith(".distcp") for damage in damages)
    assert any("index" in damage.what for damage in damages)


def test_contradictions_hide_no_other_damage(saved) -> None:
    saved.change_pickle(of_place("b", length=lambda _, length: length - 1))
    [large] = saved.path.glob("__0_0.*.distcp")
    data = bytearray(large.read_bytes())
    data[100_000] ^= 1
    large.write_bytes(data)
    assert {damage.item for damage in saved.damages()} == {"b", "large"}


class Own(DefaultSavePlanner):
    """Metadata with a field that columns have no room for."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.kept = [1, 2]
        return plans, metadata


@pytest.fixture
def without(tmp_path) -> Tampered:
    """A checkpoint without columns."""
    cloudckpt.save(STATE, checkpoint_id=tmp_path / "own", planner=Own())
    found = Tampered(tmp_path / "own")
    assert found.parsed().inventory is None
    verify(found.path)
    return found


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (of_place("large", relative_path=lambda m, _: other_object(m, "large")), "large"),
        (of_place("a", relative_path=lambda *_: "__9_9.distcp"), "a"),
        (of_place("a", offset=lambda _, offset: offset + 64), "a"),
        (of_place("b", length=lambda _, length: length + (1 << 30)), "b"),
        (of_chunk("large", "sizes", (299, 200)), "large"),
        (without_place, "a"),
    ],
)
def test_without_columns_the_pickle_is_compared_with_objects_and_indexes(without, change, name):
    without.change_pickle(change)
    assert name in {damage.item for damage in without.damages()}


def test_without_columns_another_save_is_told(without) -> None:
    of_another = dataclasses.replace(without.parsed(), attempt="f" * 16)
    without.record = of_another.to_bytes()
    without.write()
    assert "the save is" in without.said_of("")


NAMES = st.sampled_from(["a", "b.c", "d", "Ω", "layers.0.weight"])
TENSORS = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 7), max_size=3).map(tuple) | st.just((200, 300)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
)
TENSORS |= TENSORS.map(lambda tensor: tensor.t() if tensor.dim() == 2 else tensor)
VALUES = st.integers() | st.text(max_size=9) | st.just("x" * 70_000) | st.none()
STATES = st.dictionaries(
    NAMES, TENSORS | VALUES | st.dictionaries(NAMES, TENSORS | VALUES, max_size=3), max_size=5
)


@settings(max_examples=40)
@given(st.lists(STATES, min_size=1, max_size=3), st.booleans())
def test_of_good_checkpoints_nothing_is_told(states, by_pickle) -> None:
    """Neither of the first save at a location nor of the next ones, of whatever structure."""
    with tempfile.TemporaryDirectory() as folder:
        for state in states:
            planner = Own() if by_pickle else None
            cloudckpt.save(state, checkpoint_id=folder, planner=planner)
            verify(folder)
        cloudckpt.copy(folder, f"{folder}-copy")
        verify(f"{folder}-copy")
        cloudckpt.delete(f"{folder}-copy")


def _save_spread(name: str, uri: str) -> None:
    for first in (0, 5):
        state = {**spread(full_state(), LAYOUTS[name]), "value": "x" * (first * 20_000)}
        cloudckpt.save(state, checkpoint_id=uri)


@pytest.mark.parametrize("name", ["2 rows", "2 columns", "2x2 blocks", "2 replicas of 2 rows"])
def test_of_good_checkpoints_of_ranks_nothing_is_told(ranks, tmp_path, name) -> None:
    ranks(LAYOUTS[name].world, _save_spread, name, str(tmp_path / "step-1"))
    assert verify(tmp_path / "step-1").has_checksums


class HalfPrecision(DefaultSavePlanner):
    """Stores another type than the metadata say, which every reader converts."""

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        return found.to(torch.float16) if isinstance(found, torch.Tensor) else found


def test_a_planner_that_converts_contradicts_nothing(tmp_path) -> None:
    cloudckpt.save({"a": torch.ones(3)}, checkpoint_id=tmp_path, planner=HalfPrecision())
    verify(tmp_path)
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=str(tmp_path))
    assert loaded["a"].tolist() == [1, 1, 1]
