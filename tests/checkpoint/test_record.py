"""A record comes back from its bytes, or what makes no sense in them is refused."""

import dataclasses
import json
import pickle
import struct
import zlib

import pytest
import torch

from cloudckpt.checkpoint import record
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.record import Extents, Record
from cloudckpt.checkpoint.table import VALUE, Chunks, Form, Table
from cloudckpt.checksum import CRC64NVME
from cloudckpt.errors import CheckpointCorruptError

URI = "s3://bucket/run"
OURS = WrittenObject(0, 0, "0" * 16, 200, (1 << 64) - 1, 88, (1 << 32) - 1)
OTHERS = WrittenObject(3, 7, "f" * 16, 1 << 40, 0, 0, 0, folder="step-1")
HEADER = struct.Struct("<8s4Q")
FLOATS = ["float32", False]
PATHS = {"w": ("w",), "v": ("a", 0)}
NOTHING = torch.tensor([], dtype=torch.int64)


def whole(*, digests=False, written=True) -> Record:
    """A matrix in two parts, a value, and a tensor of no dimensions, one behind the other."""
    forms = [
        Form((4, 6), torch.float32, requires_grad=True),
        VALUE,
        Form((), torch.int8),
    ]
    halves = Chunks(torch.tensor([[0, 0], [2, 0]]), torch.tensor([[2, 6]] * 2))
    point = Chunks(torch.empty(1, 0).long(), torch.empty(1, 0).long())
    numbers = torch.tensor([[0, 1, 2], [2, 1, 1]])
    table = Table({"w": 0, "v": 1, "s": 2}, forms, *numbers, {0: point, 2: halves}, PATHS)
    columns = [[0, 0, 0, 0], [0, 48, 96, 100], [48, 48, 4, 1], [1, 2, 3, 4], [-5, 6, -7, 8]]
    extents = Extents(*map(torch.tensor, columns[: 5 if digests else 3]))
    return Record(
        table=table,
        extents=extents if written else Extents.none(digests=digests),
        objects=(OURS, OTHERS) if written else (),
        checksum=CRC64NVME,
        attempt="0123456789abcdef",
        location=URI,
        whole=torch.tensor([2]),
        times=torch.tensor([[0, 1, 2, 3, 4], [1, 1 << 40, 2, 3, 1 << 50]]),
        committing=1 << 40,
    )


def told(made: Record) -> dict:
    """All that a record says, as values that can be compared."""
    said = {one.name: getattr(made, one.name) for one in dataclasses.fields(made)}
    said["extents"] = [column.tolist() for column in made.extents.all_columns]
    for name in ("times", "whole"):
        said[name] = getattr(made, name).tolist()
    said["objects"] = list(made.objects)
    if (table := said.pop("table")) is not None:
        said |= {"names": list(table.names), "forms": list(table.forms), "paths": table.paths}
        said |= {"form_of": table.form_of.tolist(), "counts": table.counts.tolist()}
        for dims, chunks in table.chunks.items():
            said[dims] = [column.tolist() for column in vars(chunks).values()]
    return said


def tampered(data: bytes, **changes) -> bytes:
    """A record whose document says something else; what its table has is given by its names."""
    magic, packed, _, *rest = HEADER.unpack_from(data)
    start = HEADER.size + packed
    document = json.loads(zlib.decompress(data[HEADER.size : start]))
    for name, value in changes.items():
        (document if name in document else document["table"])[name] = value
    text = json.dumps(document).encode()
    header = HEADER.pack(magic, len(zlib.compress(text)), len(text), *rest)
    return header + zlib.compress(text) + data[start:]


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_a_record_comes_back(digests, written):
    made = whole(digests=digests, written=written)
    assert told(Record.parse(made.to_bytes(), URI)) == told(made)
    assert told(Record.parse(made.to_bytes(), URI, most=1 << 20)) == told(made)
    assert told(pickle.loads(pickle.dumps(made))) == told(made)
    for less in (dataclasses.replace(made, table=None, whole=NOTHING), Record()):
        assert told(pickle.loads(pickle.dumps(less))) == told(less)


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["w", "v"]},
        {"names": ["w", "v", "v"]},
        {"names": ["w", 7, "s"]},
        {"names": "wvs"},
        {"forms": [[[4, 6, 1], *FLOATS], None, [[], *FLOATS]]},
        {"forms": [[[3, 6], *FLOATS], None, [[], *FLOATS]]},
        {"forms": [[[-1, 6], *FLOATS], None, [[], *FLOATS]]},
        {"forms": [[[1 << 62, 8], *FLOATS], None, [[], *FLOATS]]},
        {"forms": [[[4.0, 6], *FLOATS], None, [[], *FLOATS]]},
        {"forms": [["46", *FLOATS], None, [[], *FLOATS]]},
        {"forms": [None, None, [[], *FLOATS]]},
        {"forms": [[[4, 6], *FLOATS], None]},
        {"forms": [[[4, 6], "load", *FLOATS[1:]], None, [[], *FLOATS]]},
        {"forms": [[[4, 6], "nn", *FLOATS[1:]], None, [[], *FLOATS]]},
        {"forms": [[[4, 6], *FLOATS], None, [[1] * 65, *FLOATS]]},
        {"forms": [[[4, 6], "float33", *FLOATS[1:]], None, [[], *FLOATS]]},
        {"forms": [[[4, 6], 7, *FLOATS[1:]], None, [[], *FLOATS]]},
        {"forms": [[[4, 6], "int8", 0], None, [[], *FLOATS]]},
        {"forms": [[[4, 6], *FLOATS, False], None, [[], *FLOATS]]},
        {"forms": [[[4, 6]], None, [[], *FLOATS]]},
        {"forms": []},
        {"rows": 0},
        {"rows": 3},
        {"rows": 1 << 40},
        {"rows": -1},
        {"rows": "4"},
        {"ranks": 1 << 60},
        {"ranks": 3},
        {"paths": [["w"]]},
        {"paths": [["w"], "a"]},
        {"paths": [["w"], [-1]]},
        {"paths": [["w"], [True]]},
        {"paths": 7},
        {"of": ["w", 7]},
        {"structure": 7},
        {"whole": -1},
        {"whole": 2},
        {"whole": True},
        {"attempt": 7},
        {"attempt": "../../secret"},
        {"location": None},
        {"committing": 0.5},
        {"checksum": "md5"},
        {"table": 7},
        {"objects": 1},
        {"objects": [OURS.to_json()[:5]]},
        {"objects": [[-1, *OURS.to_json()[1:]]]},
        {"objects": [[True, *OURS.to_json()[1:]]]},
        {"objects": [dataclasses.replace(OURS, index_size=201).to_json()]},
        {"objects": [dataclasses.replace(OURS, size=1 << 63).to_json()]},
        {"objects": [dataclasses.replace(OURS, attempt="../../secret").to_json()]},
        {"objects": [dataclasses.replace(OURS, folder="..").to_json()]},
        {"objects": [dataclasses.replace(OURS, folder=None).to_json()]},
        {"objects": []},
        {"objects": [dataclasses.replace(OURS, size=180).to_json()]},
    ],
    ids=str,
)
def test_a_document_that_makes_no_sense_is_refused(change):
    data = whole().to_bytes()
    assert told(Record.parse(tampered(data), URI, most=1 << 20)) == told(whole())
    with pytest.raises(CheckpointCorruptError, match="is invalid"):
        Record.parse(tampered(data, **change), URI, most=1 << 20)


@pytest.mark.parametrize(
    ("column", "number", "value"),
    [
        *(("form_of", 0, form) for form in (-1, 1, 2, 3)),
        *(("counts", 0, count) for count in (-1, 0, 1, 3, 1 << 40, (1 << 63) - 1)),
        *(("counts", number, count) for number in (1, 2) for count in (-1, 2, 1 << 40)),
        *(("whole", 0, name) for name in (-1, 3)),
    ],
)
@pytest.mark.parametrize("written", [False, True])
def test_numbers_of_names_that_make_no_sense_are_refused(column, number, value, written):
    """Also in a plan, whose rows have no places: each takes memory only if a byte stands for it."""
    made = whole(written=written)
    getattr(made if column == "whole" else made.table, column)[number] = value
    with pytest.raises(CheckpointCorruptError):
        Record.parse(made.to_bytes(), URI, most=1 << 20)


@pytest.mark.parametrize("column", ["offsets", "sizes"])
def test_a_chunk_outside_of_its_tensor_is_refused(column):
    made = whole()
    getattr(made.table.chunks[2], column)[1, 0] = 3
    with pytest.raises(CheckpointCorruptError) as caught:
        Record.parse(made.to_bytes(), URI, most=1 << 20)
    assert "a chunk of w lies outside" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("column", "number"),
    [(0, 2), (0, -1), (1, 65), (1, -1), (2, 65), (2, -1), (1, (1 << 63) - 1), (2, (1 << 63) - 1)],
)
def test_a_row_outside_of_its_object_is_refused(column, number):
    made = whole()
    made.extents.columns[column][1] = number
    with pytest.raises(CheckpointCorruptError) as caught:
        Record.parse(made.to_bytes(), URI, most=1 << 20)
    assert "w lies outside of its object" in str(caught.value.__cause__)


@pytest.mark.parametrize("version", [0, 1, 255])
def test_a_record_of_another_version_is_refused(version):
    data = bytearray(whole().to_bytes())
    data[7] = version
    with pytest.raises(CheckpointCorruptError) as caught:
        Record.parse(data, URI)
    assert "a version that this cloudckpt does not know" in str(caught.value.__cause__)


def test_a_record_cut_short_or_with_more_behind_it_is_refused():
    data = whole().to_bytes()
    for other in (*(data[:length] for length in range(0, len(data), 7)), data + b"\0"):
        with pytest.raises(CheckpointCorruptError):
            Record.parse(other, URI)


def test_the_memory_of_a_record_is_bounded_by_the_pickle_before_it():
    assert record.bound(0) == 1 << 20
    assert record.bound(1 << 20) == 16 << 20
    with pytest.raises(CheckpointCorruptError):
        Record.parse(whole().to_bytes(), URI, most=50)
    with pytest.raises(ValueError, match="larger than readers accept"):
        whole().to_bytes(most=50)


def test_what_a_rank_reports_of_a_save_like_the_one_before_is_small():
    made = dataclasses.replace(whole(), table=None, whole=NOTHING)
    report = made.without(made.extents)
    assert len(pickle.dumps(report)) < 450
    assert told(pickle.loads(pickle.dumps(report)).completed(made.extents)) == told(made)
    assert told(made.without(Extents.none())) == told(made)
    with pytest.raises(ValueError, match="are not where"):
        report.completed(Extents.none())
