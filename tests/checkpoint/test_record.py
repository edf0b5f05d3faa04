"""A record's document and objects: they come back, or what makes no sense in them is refused."""

import dataclasses

import pytest

from cloudckpt.checkpoint import record
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.record import Record
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import CheckpointCorruptError

URI = "s3://bucket/run"
OURS = WrittenObject(0, 0, "0" * 16, 100, (1 << 64) - 1, 100, (1 << 32) - 1)
OTHERS = WrittenObject(3, 7, "f" * 16, 1 << 40, 0, 0, 0, folder="step-1")
WHOLE = Record("0123456789abcdef", (OURS, OTHERS), CRC32C)


def read(made: Record) -> Record:
    return Record.parse(made.to_bytes(), URI)


def test_objects_come_back_whatever_their_numbers():
    assert read(WHOLE) == WHOLE
    assert read(Record("", (), CRC32C)) == Record("", (), CRC32C)


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


@pytest.mark.parametrize("number", [-1, 2])
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
        {"objects": 3},
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
