"""What a rank reads is found in columns as torch finds it among its objects."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.from_torch import table_of_metadata
from cloudckpt.dcp.load_plan import plan_reads

Box = list[tuple[int, int]]


class Sharded:
    """What a rank has of a tensor; torch's planner asks it for its chunks."""

    def __init__(self, shape: tuple[int, ...], boxes: list[Box]) -> None:
        self._shape, self._boxes = torch.Size(shape), boxes

    def size(self) -> torch.Size:
        return self._shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(box) for box in self._boxes]


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        torch.Size(start for start, _ in box), torch.Size(stop - start for start, stop in box)
    )


def split(draw, box: Box, times: int) -> list[Box]:
    """A box cut into several, each cut once through one of them."""
    boxes = [box]
    for _ in range(times):
        at = draw(st.integers(0, len(boxes) - 1))
        dims = [d for d, (start, stop) in enumerate(boxes[at]) if stop - start > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        start, stop = boxes[at][dim]
        cut = draw(st.integers(start + 1, stop - 1))
        one, other = list(boxes[at]), list(boxes[at])
        one[dim], other[dim] = (start, cut), (cut, stop)
        boxes[at : at + 1] = [one, other]
    return boxes


@st.composite
def layouts(draw):
    """Shapes, and the boxes in which they are stored and wanted."""
    shape = tuple(draw(st.lists(st.integers(1, 40), max_size=3)))
    whole = [(0, size) for size in shape]
    stored = split(draw, whole, draw(st.integers(0, 30)))
    return shape, draw(st.permutations(stored)), split(draw, whole, draw(st.integers(0, 5)))


def described(shape, boxes) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=torch.float32)
    return TensorStorageMetadata(properties, torch.Size(shape), [chunk_of(box) for box in boxes])


@given(of_tensors=st.lists(layouts(), min_size=1, max_size=3))
@settings(max_examples=150)
def test_the_plan_is_that_of_torch(of_tensors):
    entries = {f"t{n}": described(shape, stored) for n, (shape, stored, _) in enumerate(of_tensors)}
    metadata = Metadata({**entries, "value": BytesStorageMetadata()})
    state = {f"t{n}": Sharded(shape, wanted) for n, (shape, _, wanted) in enumerate(of_tensors)}
    state["value"] = None
    theirs = create_default_local_load_plan(state, metadata).items
    ours = plan_reads(state, table_of_metadata(metadata), "")[0].items
    assert set(ours) == set(theirs)
    assert len(ours) == len(theirs)
    hints = {(i.dest_index, i.storage_index): i.storage_index.index for i in theirs}
    assert hints == {(i.dest_index, i.storage_index): i.storage_index.index for i in ours}


def test_names_that_are_missing_are_left_out():
    table = table_of_metadata(Metadata({"there": described((3,), [[(0, 3)]])}))
    state = {"there": torch.zeros(3), "missing": torch.zeros(3)}
    plan, _ = plan_reads(state, table, "")
    assert [item.dest_index.fqn for item in plan.items] == ["there"]
