"""The commit object: columns and pickle say the same, to us and to stock torch, save after save."""

import contextlib
import dataclasses
import pickle
import struct
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.committed import CommitObject, Fetched
from cloudckpt.checkpoint.foreign import load_metadata
from cloudckpt.checkpoint.manifest import Manifest, Planned
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.record import Extents, Record
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checksum import CRC32C, CRC64NVME
from cloudckpt.errors import (
    CheckpointCorruptError,
    DifferentCheckpointsError,
    IncompleteSaveError,
    UnsupportedValueError,
)
from cloudckpt.stores.base import ObjectInfo

URI, KEY = "s3://bucket/run", "run/.metadata"
FIRST, SECOND = "0" * 16, "00112233445566ff"

NAMES = st.text(st.characters(), min_size=0, max_size=12)
SIZES = st.lists(st.integers(0, 1 << 20), max_size=3).map(tuple)
PROPERTIES = st.builds(
    TensorProperties,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
    requires_grad=st.booleans(),
)


@st.composite
def saves(draw):
    """Metadata of tensors that are cut by rows, and of values, on a few ranks."""
    ranks = draw(st.integers(1, 4))
    entries, plans = {}, [[] for _ in range(ranks)]
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        if draw(st.booleans()):
            entries[name] = BytesStorageMetadata()
            plans[draw(st.integers(0, ranks - 1))].append(MetadataIndex(name))
            continue
        shape, chunks = draw(SIZES), []
        for rank in range(ranks if shape else 1):
            rows = shape[0] // ranks if shape else 0
            offsets = torch.Size((rank * rows, *([0] * (len(shape) - 1)))) if shape else shape
            sizes = torch.Size((rows, *shape[1:])) if shape else torch.Size(())
            if rank and not rows:
                continue
            hint = draw(st.sampled_from([None, len(chunks), 99]))
            plans[rank].append(MetadataIndex(name, offsets, hint))
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), sizes))
        entries[name] = TensorStorageMetadata(draw(PROPERTIES), torch.Size(shape), chunks)
    paths = {name: ("a", 0, name) for name in entries} if draw(st.booleans()) else None
    return Metadata(entries, planner_data=paths), plans


def extents(rows):
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    return Extents(*table.t().contiguous())


def written(plans, attempt):
    """What the ranks have written: each in one object, one item behind the other."""
    found = []
    for rank, plan in enumerate(plans):
        objects = WrittenObject(rank, 0, attempt, 1 << 40, 7 * rank, 30, rank)
        rows = [(0, 128 * number, 99) for number in range(len(plan))]
        found.append(
            Record(location=URI, objects=(objects,) if plan else (), extents=extents(rows))
        )
    return found


def drawn_up(metadata, plans):
    return manifest(Planned.of(metadata, plans, CRC32C, URI), written(plans, FIRST))


def manifest(planned, records, attempt=FIRST):
    return Manifest(planned.written(records, attempt=attempt, uri=URI), URI)


def stored(made, notes=b""):
    return bytearray(b"".join(made.data(notes)))


def read(data):
    return CommitObject.parse(Fetched(ObjectInfo(KEY, len(data), "1"), data), URI)


def assert_says(data, metadata, places):
    """Pickle, columns and the reader of foreign pickles all say this."""
    of_stock, of_ours = pickle.loads(data), read(data).metadata
    inert = load_metadata(data, URI)
    for found in (of_stock, of_ours, inert):
        assert found.state_dict_metadata == metadata.state_dict_metadata
        assert list(found.state_dict_metadata) == list(metadata.state_dict_metadata)
        assert found.planner_data == metadata.planner_data
        assert {
            index: (place.relative_path, place.offset, place.length)
            for index, place in found.storage_data.items()
        } == places
        assert len(found.storage_data) == len(places)
    assert of_stock == of_ours == inert
    for index in places:
        hinted = dataclasses.replace(index)
        assert of_ours.storage_data[hinted] == of_stock.storage_data[hinted]


@st.composite
def spread(draw, plans, attempt):
    """What the ranks have written: each in some objects, the items anywhere in them."""
    found = []
    for rank, plan in enumerate(plans):
        count = draw(st.integers(1, 3)) if plan else 0
        objects = tuple(WrittenObject(rank, n, attempt, 1 << 40, n, 30, n) for n in range(count))
        rows = st.tuples(
            st.integers(0, max(count - 1, 0)),
            st.integers(0, 1 << 33),
            st.sampled_from([9, 1 << 32]),
        )
        found.append(
            Record(
                location=URI,
                objects=objects,
                extents=extents(draw(st.lists(rows, min_size=len(plan), max_size=len(plan)))),
            )
        )
    return found


@settings(max_examples=60)
@given(saves(), st.data())
def test_columns_and_pickle_say_the_same(save, data):
    metadata, plans = save
    records = data.draw(spread(plans, FIRST))
    places = {
        index: (one.objects[number].name, offset, length)
        for one, plan in zip(records, plans, strict=True)
        for index, number, offset, length in zip(
            plan, *(column.tolist() for column in one.extents.columns), strict=True
        )
    }
    made = manifest(Planned.of(metadata, plans, CRC32C, URI), records)
    assert_says(stored(made), metadata, places)


def example(ranks=2):
    chunks = [
        ChunkStorageMetadata(torch.Size([rank * 4, 0]), torch.Size([4, 8])) for rank in range(ranks)
    ]
    entry = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size([4 * ranks, 8]), chunks
    )
    metadata = Metadata(
        {"step": BytesStorageMetadata(), "w": entry}, {"w": ("w",), "step": ("step",)}
    )
    plans = [[MetadataIndex("w", chunk.offsets, n)] for n, chunk in enumerate(chunks)]
    plans[0].append(MetadataIndex("step"))
    return metadata, plans


def test_lazy_metadata_pickle_as_torchs():
    metadata, plans = example()
    found = read(stored(drawn_up(metadata, plans))).metadata
    back = pickle.loads(pickle.dumps(found))
    assert type(back.state_dict_metadata) is type(back.storage_data) is dict
    assert back == found


@pytest.mark.parametrize("notes", [b"", b'{"step":7}'])
def test_notes_structure_and_algorithm_come_back(notes):
    metadata, plans = example()
    told = written(plans, FIRST)
    structure = Structure({("a", 0, "1"): 1}, (("b",),))
    told[1] = dataclasses.replace(told[1], structure=structure)
    found = read(stored(manifest(Planned.of(metadata, plans, CRC64NVME, URI), told), notes))
    assert (found.notes, found.structure, found.checksum) == (notes, structure, CRC64NVME)
    assert 0 <= time.time() * 1000 - found.record.committing < 60_000


def test_a_chunk_takes_few_bytes():
    metadata, plans = example(512)
    columns = drawn_up(metadata, plans).data(b"")[1]
    assert columns.nbytes < 512 * 12 + 1500  # the records of the objects, and hardly anything else


@dataclasses.dataclass
class OfTheUser:
    value: int


def with_class(metadata):
    metadata.planner_data = OfTheUser(7)


def with_field(metadata):
    metadata.mcore_data = {"a": 1}


def with_chunk_outside(metadata):
    metadata.state_dict_metadata["w"].chunks[1] = ChunkStorageMetadata(
        torch.Size([4, 0]), torch.Size([4, 9])
    )


@pytest.mark.parametrize("change", [with_class, with_field, with_chunk_outside])
def test_what_columns_can_not_express_is_refused(change):
    metadata, plans = example()
    change(metadata)
    with pytest.raises(UnsupportedValueError, match="can't be") as caught:
        drawn_up(metadata, plans)
    assert caught.value.uri == URI


# what ranks say is not taken on trust


def test_an_item_that_nobody_has_written_is_named():
    metadata, plans = example(3)
    with pytest.raises(IncompleteSaveError, match=r"w \(offsets \[4, 0\]\)") as caught:
        drawn_up(metadata, [plans[0], [], plans[2]])
    assert (caught.value.item, caught.value.uri) == ("w", URI)


@pytest.mark.parametrize(
    ("rank", "change", "error", "message"),
    [
        (0, {"extents": [(0, 0, 9)]}, IncompleteSaveError, "planned 2 items, but wrote 1"),
        (1, {"location": "s3://b/c"}, DifferentCheckpointsError, "rank 1 to s3://b/c"),
        (1, {"objects": ()}, IncompleteSaveError, "are inconsistent"),
        (1, {"size": 100}, IncompleteSaveError, "are inconsistent"),
        (1, {"extents": [(-1, 0, 9)]}, IncompleteSaveError, "are inconsistent"),
        (1, {"extents": [(1, 0, 9)]}, IncompleteSaveError, "are inconsistent"),
    ],
)
def test_a_rank_that_says_something_else_than_was_planned_is_told(rank, change, error, message):
    metadata, plans = example()
    now = written(plans, SECOND)
    if "size" in change:
        change = {"objects": (dataclasses.replace(now[rank].objects[0], **change),)}
    if "extents" in change:
        change = {"extents": extents(change["extents"])}
    now[rank] = dataclasses.replace(now[rank], **change)
    with pytest.raises(error, match=message):
        manifest(Planned.of(metadata, plans, CRC32C, URI), now, SECOND)


# damage


def test_no_flipped_bit_and_no_cut_goes_unnoticed():
    metadata, plans = example()
    data = stored(drawn_up(metadata, plans), b'{"step":7}')
    said = read(data).metadata
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        try:
            found = read(damaged)
        except CheckpointCorruptError:
            continue
        assert at >= len(data) - 20  # it no longer looks like one of ours
        assert found.record is None
        assert found.metadata.state_dict_metadata == said.state_dict_metadata
    for stop in (*range(0, 60, 7), *range(0, len(data), 97), -1):
        with contextlib.suppress(CheckpointCorruptError):
            assert read(data[:stop]).record is None  # as one of another writer


def remade(data, change):
    """The commit object with another body, whose checksum is right."""
    *numbers, magic = struct.unpack("<QIQIQI20s", data[-56:])
    size, length = numbers[0], numbers[2]
    made = change(bytearray(data[size : size + length]))
    numbers[2:4] = len(made), CRC32C.of(bytes(made))
    return bytearray(data[:size] + made + struct.pack("<QIQIQI20s", *numbers, magic))


@settings(max_examples=400)
@given(st.data())
def test_a_body_that_somebody_made_up_is_refused_or_consistent(data):
    """Its checksum is right: whoever can write to the bucket can write that, too."""
    good = stored(GOOD)

    def change(body):
        for _ in range(data.draw(st.integers(1, 3))):
            if data.draw(st.booleans()):
                body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
            else:  # a number of the header
                at = data.draw(st.integers(0, 80))
                number = data.draw(st.sampled_from([0, 1, 255, 1 << 31, 1 << 40, (1 << 64) - 1]))
                body[at : at + 8] = number.to_bytes(8, "little")
        return body[: data.draw(st.integers(len(body) - 3, len(body)))]

    try:
        found = read(remade(good, change))
    except CheckpointCorruptError:
        return
    sizes = {one.name: one.size - one.index_size for one in found.objects}
    for place in found.metadata.storage_data.values():
        assert 0 <= place.offset <= place.offset + place.length <= sizes[place.relative_path]


GOOD = drawn_up(*example())
