"""Plans of many ranks become what torch's planner makes of them: parts, metadata, and refusals."""

import copy
import itertools
import logging
import pickle

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from cloudckpt.checkpoint.from_torch import NotInColumnsError
from cloudckpt.checkpoint.lazy import lazy_metadata
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checksum import CRC32C
from cloudckpt.dcp.global_plan import plan_together, record_of
from cloudckpt.errors import IncompleteSaveError, KeyCollisionError

WHOLE = "two parts of a whole"
UNNAMED = (WHOLE, "Failed to validate global plan")  # older torches only log the names
URI = "s3://bucket/run"
ANY_RANKS = st.sets(st.integers(0, 11), min_size=1)


def chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def tensor_item(name, of_chunk, shape, dtype=torch.float32, kind=WriteItemType.SHARD):
    data = TensorWriteData(of_chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, of_chunk.offsets), kind, tensor_data=data)


def value_item(name):
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def cut(length, parts):
    """As DTensor cuts: equal parts from the front, and empty ones at the end."""
    each = -(-length // parts) if length else 0
    starts = [min(length, part * each) for part in range(parts + 1)]
    return [(start, stop - start) for start, stop in itertools.pairwise(starts)]


@st.composite
def grids(draw, name, ranks):
    """A tensor that is cut along any of its dimensions, and replicated along others, or not."""
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    cuts = [draw(st.sampled_from([1, 1, 2, 3, ranks])) for _ in shape]
    places = list(itertools.product(*(cut(*of_dim) for of_dim in zip(shape, cuts, strict=True))))
    chunks = [chunk([o for o, _ in place], [s for _, s in place]) for place in places]
    first = draw(st.integers(0, ranks - 1))
    copies = draw(st.integers(1, 3))
    found = []
    for number in range(len(chunks) * copies):
        found.append(((first + number) % ranks, chunks[number % len(chunks)]))
    if draw(st.integers(0, 9)) == 0 and found:
        del found[draw(st.integers(0, len(found) - 1))]  # a chunk that may be missing
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool]))
    return [(rank, tensor_item(name, part, shape, dtype)) for rank, part in found]


@st.composite
def jobs(draw):
    """The plans of some ranks."""
    ranks = draw(st.integers(1, 12))
    plans = [[] for _ in range(ranks)]
    for name in draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)):
        kind = draw(st.sampled_from(["value", "tensor", "grid", "grid", "grid"]))
        members = sorted(rank % ranks for rank in draw(ANY_RANKS))
        if kind == "value":
            found = [(rank, value_item(name)) for rank in dict.fromkeys(members)]
        elif kind == "tensor":
            shape = draw(st.lists(st.integers(0, 5), max_size=2))
            item = tensor_item(
                name, chunk([0] * len(shape), shape), shape, kind=WriteItemType.TENSOR
            )
            found = [(rank, item) for rank in dict.fromkeys(members)]
        else:
            found = draw(grids(name, ranks))
        for rank, item in found:
            plans[rank].append(item)
    if draw(st.booleans()):  # ranks may have things in another order
        plans = [
            [
                item
                for name in draw(st.permutations(list("abcdefgh")))
                for item in plan
                if item.index.fqn == name
            ]
            for plan in plans
        ]
    return [
        SavePlan(plan, planner_data={item.index.fqn: ("at", item.index.fqn, 7) for item in plan})
        for plan in plans
    ]


def by_torch(plans, lowest):
    """The plans and the metadata that torch makes, or why it does not."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    try:
        return *planner.create_global_plan(copy.deepcopy(plans)), ""
    except ValueError as exc:
        return None, None, str(exc)
    except AssertionError:  # it expects no such plans
        return None, None, WHOLE


def records_of(plans):
    return [Record.parse(record_of(plan, Structure(), CRC32C), URI) for plan in plans]


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL)  # torch logs each overlap that it finds


@settings(max_examples=150)
@given(jobs(), st.booleans())
def test_columns_plan_as_torch_does(plans, lowest):
    try:
        records = records_of(plans)
    except NotInColumnsError:
        event("no columns")
        return
    wanted, metadata, refusal = by_torch(plans, lowest)
    try:
        planned, parts, _ = plan_together(records, to_lowest_rank=lowest, uri=URI)
    except KeyCollisionError:
        event("refused by name")
        return
    except IncompleteSaveError as exc:
        error = exc
    else:
        error = None
    if error is not None:
        event("refused")
        # of what is no plan of a state dict, not every torch refuses it
        is_no_plan = "twice" in str(error) or "differ" in str(error)
        assert is_no_plan or f"key:{error.item} " in f"{refusal} " or refusal in UNNAMED
        return
    assert not refusal
    event("by columns")
    parts = pickle.loads(pickle.dumps(parts))
    written = [[plan.items[n] for n in part] for part, plan in zip(parts, plans, strict=True)]
    assert written == [plan.items for plan in wanted]
    found = lazy_metadata(Record(table=planned.table))
    assert list(found.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert dict(found.state_dict_metadata) == metadata.state_dict_metadata
    assert list(found.planner_data.items()) == list(metadata.planner_data.items())
    rows = [planned.table.rows([i.index for i in plan.items]).tolist() for plan in wanted]
    assert [of_rank.tolist() for of_rank in planned.rows] == rows


def test_different_things_of_ranks_under_one_name_are_refused():
    other = tensor_item("a", chunk([2], [2]), [4], torch.bool)
    for second in (other, value_item("a"), tensor_item("a", chunk([2], [2]), [5])):
        items = [tensor_item("a", chunk([0], [2]), [4]), second]
        plans = [SavePlan([item], planner_data={"a": ("a",)}) for item in items]
        with pytest.raises(KeyCollisionError) as caught:
            plan_together(records_of(plans), to_lowest_rank=False, uri=URI)
        assert (caught.value.item, caught.value.uri) == ("a", URI)


def test_different_places_of_ranks_under_one_name_are_refused():
    plans = [
        SavePlan([value_item("a.b")], planner_data={"a.b": path}) for path in (("a.b",), ("a", "b"))
    ]
    with pytest.raises(KeyCollisionError, match=r"state_dict\['a.b'\] on rank 0") as caught:
        plan_together(records_of(plans), to_lowest_rank=False, uri=URI)
    assert caught.value.item == "a.b"


def test_names_that_many_ranks_share_are_read_once():
    """Also if ranks with other names stand between them, as the stages of a pipeline do."""
    stages = [SavePlan([value_item(name)], planner_data={name: (name,)}) for name in "abcd"]
    told = [record_of(plan, Structure(), CRC32C) for plan in stages]
    known = {}
    records = [Record.parse(one, URI, known=known) for one in told * 8]
    assert len({id(record.table.names) for record in records}) == len(stages)
    assert [list(record.table.names) for record in records] == [[n] for n in "abcd"] * 8
