"""A record comes back from its bytes, or what makes no sense in them is refused."""

import dataclasses
import json
import pickle
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    forms = [Form((4, 6), torch.float32, requires_grad=True), VALUE, Form((), torch.int8)]
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


DATA = whole().to_bytes()


def told(made: Record) -> dict:
    """All that a record says, as values that can be compared."""
    said = {one.name: getattr(made, one.name) for one in dataclasses.fields(made)}
    said["extents"] = [column.tolist() for column in made.extents.columns]
    for name in ("times", "whole"):
        said[name] = getattr(made, name).tolist()
    said["objects"] = list(made.objects)
    if (table := said.pop("table")) is not None:
        said |= {"names": list(table.names), "forms": list(table.forms), "paths": table.paths}
        said |= {"form_of": table.form_of.tolist(), "counts": table.counts.tolist()}
        for dims, chunks in table.chunks.items():
            said[dims] = [column.tolist() for column in vars(chunks).values()]
    return said


def assembled(*parts: bytes, unpacked: list[int] | None = None, magic: bytes = b"") -> bytes:
    """A record of a packed document and packed columns; ``unpacked``: the sizes in its header."""
    sizes = unpacked or [len(zlib.decompress(part)) for part in parts]
    numbers = [number for pair in zip(map(len, parts), sizes, strict=True) for number in pair]
    return HEADER.pack(magic or b"ckptrec\3", *numbers) + b"".join(parts)


def parts_of(data: bytes) -> tuple[list[bytes], list[int]]:
    """The packed document and columns of a record, and the sizes that its header says."""
    _, document, size, columns, columns_size = HEADER.unpack_from(data)
    return [data[HEADER.size :][:document], data[-columns:]], [size, columns_size]


def tampered(data: bytes, **changes) -> bytes:
    """A record whose document says something else; what its table has is given by its names."""
    (packed, columns), _ = parts_of(data)
    document = json.loads(zlib.decompress(packed))
    for name, value in changes.items():
        (document if name in document else document["table"])[name] = value
    return assembled(zlib.compress(json.dumps(document).encode()), columns)


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_a_record_comes_back(digests, written):
    made = whole(digests=digests, written=written)
    assert told(Record.parse(made.to_bytes(), URI)) == told(made)
    assert told(Record.parse(made.to_bytes(), URI, most=1 << 20)) == told(made)
    assert told(pickle.loads(pickle.dumps(made))) == told(made)
    for less in (dataclasses.replace(made, table=None, whole=NOTHING), Record()):
        assert told(pickle.loads(pickle.dumps(less))) == told(less)


def of_matrix(*form) -> dict:
    """A document in which the matrix has another form."""
    return {"forms": [list(form), None, [[], *FLOATS]]}


SHAPES = [[4, 6, 1], [3, 6], [-1, 6], [1 << 62, 8], [4.0, 6], "46"]
DTYPES = ["load", "nn", "float33", 7]
OBJECTS = [{"index_size": 201}, {"size": 1 << 63}, {"size": 180}]
OBJECTS += [{"attempt": "../../secret"}, {"folder": ".."}, {"folder": None}]
CHANGES = [
    *({"names": names} for names in (["w", "v"], ["w", "v", "v"], ["w", 7, "s"], "wvs")),
    *(of_matrix(shape, *FLOATS) for shape in SHAPES),
    *(of_matrix([4, 6], dtype, False) for dtype in DTYPES),
    *(of_matrix([4, 6], "int8", 0), of_matrix([4, 6], *FLOATS, False), of_matrix([4, 6])),
    {"forms": [None, None, [[], *FLOATS]]},
    {"forms": [[[4, 6], *FLOATS], None]},
    {"forms": [[[4, 6], *FLOATS], None, [[1] * 65, *FLOATS]]},
    {"forms": []},
    *({"rows": rows} for rows in (0, 3, 1 << 40, -1, "4")),
    *({"ranks": ranks} for ranks in (1 << 60, 3)),
    *({"paths": paths} for paths in ([["w"]], [["w"], "a"], [["w"], [-1]], [["w"], [True]], 7)),
    *({"whole": whole} for whole in (-1, 2, True)),
    *({"attempt": attempt} for attempt in (7, "../../secret")),
    *({"of": ["w", 7]}, {"structure": 7}, {"location": None}, {"committing": 0.5}),
    *({"checksum": "md5"}, {"table": 7}, {"objects": 1}, {"objects": []}),
    {"objects": [OURS.to_json()[:5]]},
    *({"objects": [[rank, *OURS.to_json()[1:]]]} for rank in (-1, True)),
    *({"objects": [dataclasses.replace(OURS, **change).to_json()]} for change in OBJECTS),
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_document_that_makes_no_sense_is_refused(change):
    data = whole().to_bytes()
    assert told(Record.parse(tampered(data), URI, most=1 << 20)) == told(whole())
    with pytest.raises(CheckpointCorruptError, match="is invalid"):
        Record.parse(tampered(data, **change), URI, most=1 << 20)


FORM_OF, COUNTS = "the forms of names", "the numbers of chunks"
COLUMNS = {
    FORM_OF: lambda made: made.table.form_of,
    COUNTS: lambda made: made.table.counts,
    "whole tensors": lambda made: made.whole,
    "offsets of chunks": lambda made: made.table.chunks[2].offsets.view(-1),
    "sizes of chunks": lambda made: made.table.chunks[2].sizes.view(-1),
}
EXTENTS = {
    "objects": lambda made: made.extents.objects,
    "offsets": lambda made: made.extents.offsets,
    "lengths": lambda made: made.extents.lengths,
}


def with_number(column, number, value, **options) -> bytes:
    made = whole(**options)
    {**COLUMNS, **EXTENTS}[column](made)[number] = value
    return made.to_bytes()


@pytest.mark.parametrize(
    ("column", "number", "value"),
    [
        *((FORM_OF, 0, form) for form in (-1, 1, 2, 3)),
        *((COUNTS, 0, count) for count in (-1, 0, 1, 3, 1 << 40, (1 << 63) - 1)),
        *((COUNTS, number, count) for number in (1, 2) for count in (-1, 2, 1 << 40)),
        *(("whole tensors", 0, name) for name in (-1, 3)),
        *((column, 2, 3) for column in ("offsets of chunks", "sizes of chunks")),
    ],
)
@pytest.mark.parametrize("written", [False, True])
def test_numbers_of_a_table_that_make_no_sense_are_refused(column, number, value, written):
    """Also in a plan, whose rows have no places: each takes memory only if a byte stands for it."""
    with pytest.raises(CheckpointCorruptError) as caught:
        Record.parse(with_number(column, number, value, written=written), URI, most=1 << 20)
    assert "of chunks" not in column or column == COUNTS or "of w lies" in str(caught.value.cause)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("objects", number) for number in (2, -1)),
        *(
            (column, value)
            for column in ("offsets", "lengths")
            for value in (65, -1, (1 << 63) - 1)
        ),
    ],
)
def test_a_row_outside_of_its_object_is_refused(column, value):
    Record.parse(with_number("lengths", 1, 64), URI, most=1 << 20)  # up to the end of its object
    with pytest.raises(CheckpointCorruptError) as caught:
        Record.parse(with_number(column, 1, value), URI, most=1 << 20)
    assert "w lies outside of its object" in str(caught.value.cause)


NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300)


@given(st.lists(st.tuples(*[NUMBERS] * 5), max_size=20))
def test_numbers_of_any_size_come_back(rows):
    columns = torch.tensor(rows, dtype=torch.int64).view(-1, 5).t()
    made = Record(extents=Extents(*columns), times=columns.t())
    assert told(Record.parse(made.to_bytes(), URI)) == told(made)


def test_numbers_that_grow_evenly_take_next_to_nothing():
    column = torch.arange(500_000) * 1_000_003
    assert len(Record(extents=Extents(column, column, column)).to_bytes()) < 30_000


PARTS, SIZES = parts_of(DATA)
DATA_COLUMNS = zlib.decompress(PARTS[1])
COMPRESSED = {
    "less": lambda packed: zlib.compress(zlib.decompress(packed)[:-1]),
    "more": lambda packed: zlib.compress(zlib.decompress(packed) + b" "),
    "a bomb": lambda packed: zlib.compress(b" " * (1 << 24)),
    "cut": lambda packed: packed[:-1],
    "surplus": lambda packed: packed + b"more",
    "nothing": lambda packed: b"",
    "garbage": lambda packed: b"no zlib",
}
COLUMNS_CUT = [b"", DATA_COLUMNS[:1], DATA_COLUMNS[:-1], b"\3" + DATA_COLUMNS[1:]]
DAMAGED = [
    *(DATA[:length] for length in range(0, len(DATA), 7)),
    DATA + b"\0",
    *(assembled(*PARTS, magic=b"ckptrec" + bytes([version])) for version in (0, 1, 255)),
    *(assembled(change(PARTS[0]), PARTS[1], unpacked=SIZES) for change in COMPRESSED.values()),
    *(assembled(PARTS[0], change(PARTS[1]), unpacked=SIZES) for change in COMPRESSED.values()),
    *(assembled(PARTS[0], zlib.compress(columns)) for columns in COLUMNS_CUT),
]


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_a_record_of_another_version_or_of_other_bytes_is_refused(data):
    assert assembled(*PARTS) == DATA
    with pytest.raises(CheckpointCorruptError):
        Record.parse(data, URI)


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
    with pytest.raises(ValueError, match="are not those of"):
        report.completed(Extents.none())
