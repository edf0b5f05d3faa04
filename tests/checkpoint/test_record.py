"""A record's document and objects: they come back, or what makes no sense in them is refused."""

import dataclasses

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from cloudckpt.checkpoint import record
from cloudckpt.checkpoint.inventory import Chunks, Entry, Inventory
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.written import Extents
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import CheckpointCorruptError

URI = "s3://bucket/run"
OURS = WrittenObject(0, 0, "0" * 16, 100, (1 << 64) - 1, 100, (1 << 32) - 1)
OTHERS = WrittenObject(3, 7, "f" * 16, 1 << 40, 0, 0, 0, folder="step-1")
ANOTHER = dataclasses.replace(OTHERS, ordinal=8, folder="step-2")
WHOLE = Record("0123456789abcdef", (OURS, OTHERS, ANOTHER), CRC32C)


def inventory(*, digests=False, written=True) -> Inventory:
    """A matrix in two parts, a value, and a tensor of no dimensions, one behind the other."""
    entries = {
        "w": Entry(0, 2, (4, 6), 0, 0),
        "v": Entry(2, 1, None, 0, 0),
        "s": Entry(3, 1, (), 1, 0),
    }
    properties = [
        TensorProperties(dtype=torch.float32, requires_grad=True),
        TensorProperties(dtype=torch.int8, memory_format=torch.preserve_format),
    ]
    halves = Chunks(
        torch.tensor([0, 1]), torch.tensor([[0, 0], [2, 0]]), torch.tensor([[2, 6]] * 2)
    )
    point = Chunks(torch.tensor([3]), torch.empty(1, 0).long(), torch.empty(1, 0).long())
    columns = [[0, 0, 0, 0], [0, 48, 96, 100], [48, 48, 4, 1], [1, 2, 3, 4], [-5, 6, -7, 8]]
    extents = Extents(*map(torch.tensor, columns[: 5 if digests else 3]))
    return Inventory(
        entries,
        properties,
        {0: point, 2: halves},
        extents if written else Extents.none(digests=digests),
        (OURS,) if written else (),
        CRC32C,
        {"w": ("w",), "v": ("a", 0), "s": ("s",)},
    )


def read(made: Record) -> Record:
    return Record.parse(made.to_bytes(), URI)


def test_objects_come_back_whatever_their_numbers():
    assert read(WHOLE) == WHOLE
    assert read(Record("", (), CRC32C)) == Record("", (), CRC32C)


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("is_written", [False, True])
def test_names_chunks_and_extents_come_back(digests, is_written):
    made = inventory(digests=digests, written=is_written)
    found = read(Record.of(made, "0" * 16, whole=(2,)))
    assert (found.attempt, found.whole, found.objects) == ("0" * 16, [2], made.objects)
    again = found.inventory
    assert again.entries == made.entries
    assert list(again.entries) == ["w", "v", "s"]
    assert list(again.properties) == made.properties
    assert again.paths == made.paths
    assert again.chunks.keys() == {0, 2}
    for dims, chunks in again.chunks.items():
        for name in ("rows", "offsets", "sizes"):
            assert torch.equal(getattr(chunks, name), getattr(made.chunks[dims], name))
    columns = list(zip(again.extents.all_columns, made.extents.all_columns, strict=True))
    assert all(torch.equal(one, other) for one, other in columns)
    assert len(columns) == (5 if digests else 3)
    assert read(Record.of(made).without_inventory()).inventory is None


def test_the_first_bytes_tell_what_it_is():
    with_names, without = Record.of(inventory()).to_bytes(), WHOLE.to_bytes()
    header = len(b"ckptrec\1") + 4 + 4 + 3 * 8
    assert Record.is_one(without)
    assert not Record.is_one(b"")
    assert not Record.is_one(without[1:])
    for data, expected in ((with_names, True), (without, False)):
        assert Record.has_inventory(memoryview(data)) is expected
        assert Record.has_inventory(memoryview(data)[:header]) is expected
        assert Record.has_inventory(memoryview(data)[: header - 1])  # nobody knows


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"written": False, "chunks": [(1 << 24) - 1, 1, 1]}, "fewer columns than rows"),
        ({"chunks": [1 << 40, 1, 1]}, "fewer columns than rows"),
        ({"kinds": [["float32", "strided", "contiguous_format", 1, False]] * 2}, "element type"),
        ({"kinds": [["float32", "strided", "contiguous_format", False, 0]] * 2}, "a flag"),
        ({"kinds": [[7, "strided", "contiguous_format", False, False]] * 2}, "element type"),
        ({"properties": [0, 1, 1]}, "a value with properties"),
        ({"properties": [0, 0, True]}, "that is none"),
        ({"properties": [0, 0, "1"]}, "that is none"),
        ({"properties": [0, 0, 2]}, "not there"),
        ({"chunks": [2, 2, 1]}, "a value with properties"),
        ({"chunks": ["2", 1, 1]}, "that is none"),
        ({"chunks": [-1, 1, 1]}, "not there"),
        ({"names": ["w", "v", "v"]}, "there twice"),
        ({"whole": [3]}, "the number of no name"),
        ({"objects": 1 << 40}, "fewer objects than it says"),
    ],
    ids=str,
)
def test_names_and_chunks_that_make_no_sense_are_refused(change, why, monkeypatch):
    to_json = record._json
    monkeypatch.setattr(record, "_json", lambda said: to_json({**said, **change}))
    with pytest.raises(CheckpointCorruptError, match="make no sense") as caught:
        read(Record.of(inventory()))
    assert why in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": -1},
        {"ordinal": -1},
        {"index_crc": -1},
        {"index_size": -1},
        {"index_size": 101},
        {"size": -1, "index_size": -1},
    ],
    ids=str,
)
def test_an_object_that_can_not_be_is_refused(wrong):
    made = Record("0" * 16, (dataclasses.replace(OURS, **wrong),), CRC32C)
    with pytest.raises(CheckpointCorruptError, match="make no sense") as caught:
        read(made)
    assert "an object is smaller than its index" in str(caught.value.__cause__)


@pytest.mark.parametrize("number", [-1, 3])
def test_an_object_of_a_checkpoint_that_is_not_named_is_refused(number, monkeypatch):
    in_columns = record._columns_of

    def misnumbered(objects, folders):
        columns = in_columns(objects, folders)
        columns[-1].fill_(number)
        return columns

    monkeypatch.setattr(record, "_columns_of", misnumbered)
    with pytest.raises(CheckpointCorruptError) as caught:
        read(WHOLE)
    assert "a checkpoint that is not named" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": 7},
        {"attempt": None},
        {"objects": -1},
        {"objects": 4},
        {"objects": "2"},
        {"objects": True},
        {"checksum": "md5"},
        {"folders": [".."]},
        {"folders": []},
    ],
    ids=str,
)
def test_a_document_that_makes_no_sense_is_refused(change, monkeypatch):
    to_json = record._json
    monkeypatch.setattr(record, "_json", lambda said: to_json({**said, **change}))
    with pytest.raises(CheckpointCorruptError, match="make no sense"):
        read(WHOLE)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_a_record_of_another_version_is_refused(version):
    data = bytearray(WHOLE.to_bytes())
    data[7] = version
    with pytest.raises(CheckpointCorruptError) as caught:
        Record.parse(data, URI)
    assert "a version that this cloudckpt does not know" in str(caught.value.__cause__)


@pytest.mark.parametrize("length", range(0, 60, 7))
def test_a_record_cut_short_is_refused(length):
    with pytest.raises(CheckpointCorruptError):
        Record.parse(WHOLE.to_bytes()[:length], URI)
    with pytest.raises(CheckpointCorruptError):
        Record.parse(WHOLE.to_bytes() + bytes(length + 1), URI)


def test_the_memory_of_a_record_is_bounded_by_the_pickle_before_it():
    assert record.bound(0) == 1 << 20
    assert record.bound(1 << 20) == 16 << 20
    data = WHOLE.to_bytes()
    with pytest.raises(CheckpointCorruptError):
        Record.parse(data, URI, most=50)
    with pytest.raises(ValueError, match="larger than readers allow"):
        WHOLE.to_bytes(most=50)
