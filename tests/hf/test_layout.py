"""Which rank sends what of a model: checked by doing it, with tiny parts and without a store."""

import itertools
import math

import numpy as np
import pytest
import torch

from cloudckpt import Config
from cloudckpt.config import MIB
from cloudckpt.errors import ConfigError
from cloudckpt.hf.layout import (
    Chunk,
    Run,
    TensorPlan,
    boxes_between,
    divide,
    plan_files,
    plan_work,
)
from cloudckpt.hf.writer import bytes_of_size
from cloudckpt.transfer.memory import narrow
from memory_store import MemoryStore


def _whole(shape, dtype=torch.float32):
    numel = math.prod(shape)
    return (torch.arange(numel) % 251).to(dtype).reshape(shape)


def _rows(shape, ranks):
    step = -(-shape[0] // ranks)
    cuts = [(at, min(step, shape[0] - at)) for at in range(0, shape[0], step)]
    return [(cut, *((0, size) for size in shape[1:])) for cut in cuts]


def _columns(shape, ranks):
    step = -(-shape[1] // ranks)
    cuts = [(at, min(step, shape[1] - at)) for at in range(0, shape[1], step)]
    return [((0, shape[0]), cut, *((0, size) for size in shape[2:])) for cut in cuts]


SPLITS = {
    "rows": _rows,
    "columns": _columns,
    "whole": lambda shape, ranks: [tuple((0, size) for size in shape)],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_parts_of_all_ranks_make_up_the_files(split: str, ranks: int) -> None:
    wholes = {
        "a": _whole((37, 30)),
        "b": _whole((9, 5, 4), torch.float64),
        "c": _whole((64, 3), torch.uint8),
        "d": _whole((11, 7), torch.bfloat16),
    }
    held: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    plans = []
    for name, whole in wholes.items():
        chunks = []
        for rank, box in enumerate(SPLITS[split](tuple(whole.shape), ranks)):
            chunks.append(Chunk(rank, len(held[rank]), box))
            held[rank].append(narrow(whole, box))
        plans.append(TensorPlan(name, whole.dtype, tuple(whole.shape), chunks))
    files = plan_files(plans, 3000, None)
    size, limit = 256, 64
    work = divide(files, [size] * len(files), ranks, limit)
    assert len({len(own.rounds) for own in work}) == 1
    made: dict[tuple[int, int], bytes] = {}
    for number, mine in enumerate(work):
        for part in mine.own:
            made[part.file, part.number] = _assembled(part, number, held, {})
    for turn in range(len(work[0].rounds)):
        inbox: dict[tuple[int, int], list[torch.Tensor]] = {}
        for rank, mine in enumerate(work):
            for gift in mine.rounds[turn].gifts:
                inbox.setdefault((rank, gift.to), []).append(
                    narrow(held[rank][gift.item], gift.source)
                )
            given = sum(
                math.prod(length for _, length in gift.source) * gift.dtype.itemsize
                for gift in mine.rounds[turn].gifts
            )
            assert given <= size, "memory must not depend on the model"
        for rank, mine in enumerate(work):
            part = mine.rounds[turn].part
            if part is not None:
                made[part.file, part.number] = _assembled(part, rank, held, inbox)
        assert not any(inbox.values())
    for index, file in enumerate(files):
        parts = [made.pop((index, n)) for n in range(1, -(-file.size // size) + 1)]
        data = b"".join(parts)
        assert len(data) == file.size
        for tensor, start in zip(file.tensors, file.starts, strict=True):
            expected = wholes[tensor.name].contiguous().reshape(-1).view(torch.uint8)
            assert data[start : start + tensor.nbytes] == bytes(expected.tolist()), tensor.name
    assert not made


def _assembled(part, rank, held, inbox) -> bytes:
    data = b""
    for run in part.runs:
        if not isinstance(run, Run):
            data += run
            continue
        room = torch.empty(run.shape, dtype=run.dtype)
        for piece in run.pieces:
            if piece.rank == rank:
                source = narrow(held[rank][piece.item], piece.source)
            else:
                source = inbox[piece.rank, rank].pop(0)
            narrow(room, piece.place).copy_(source)
        data += bytes(room.reshape(-1).view(torch.uint8).tolist())
    return data


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1)])
def test_boxes_between_two_elements_hold_these_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations(range(math.prod(shape) + 1), 2):
        found = [
            n for box in boxes_between(shape, start, stop) for n in narrow(numbers, box).flatten()
        ]
        assert found == list(range(start, stop))


_LIMITS = MemoryStore("limits").capabilities
_MOST = Config().memory_budget // 6 + MIB


@pytest.mark.parametrize("split", ["rows", "columns", "whole"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_parts_are_large_only_where_little_is_copied(split: str, is_plain: bool) -> None:
    shape = (64 * 1024, 4096)  # 1 GiB
    boxes = SPLITS[split](shape, 4)[: 1 if split == "whole" else 4]
    tensor = TensorPlan(
        "w", torch.float32, shape, [Chunk(n, 0, box) for n, box in enumerate(boxes)]
    )
    files = plan_files([tensor], 5 * 10**9, None)
    (size,), work = plan_work(files, Config(), _LIMITS, [is_plain] * 4)
    assert (size > _MOST) == (is_plain and split != "columns")
    assert sum(len(one.own) + len([r for r in one.rounds if r.part]) for one in work) == -(
        -files[0].size // size
    )


def test_many_small_tensors_are_packed_into_small_parts() -> None:
    tensors = [
        TensorPlan(f"{n}", torch.float32, (8000,), [Chunk(0, n, ((0, 8000),))]) for n in range(9000)
    ]
    (size,), _ = plan_work(plan_files(tensors, 5 * 10**9, None), Config(), _LIMITS, [True])
    assert size <= _MOST, "a part of copies alone must fit into the memory for them"


def _plan(name: str, numel: int) -> TensorPlan:
    return TensorPlan(name, torch.uint8, (numel,), [Chunk(0, 0, ((0, numel),))])


def test_files_are_filled_up_to_their_size_and_named_as_transformers_does() -> None:
    tensors = [_plan("a", 60), _plan("b", 40), _plan("c", 1), _plan("d", 500), _plan("e", 2)]
    files = plan_files(tensors, 100, None)
    assert [file.name for file in files] == [
        f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)
    ]
    assert [[t.name for t in file.tensors] for file in files] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [file.name for file in plan_files(tensors, 1000, None)] == ["model.safetensors"]


def test_a_mapping_names_the_files_or_numbers_them() -> None:
    tensors = [_plan("a", 1), _plan("b", 1), _plan("c", 1)]
    by_number = plan_files(tensors, 1, {"a": 2, "b": 1, "c": 2, "of no tensor": 3})
    assert [(f.name, [t.name for t in f.tensors]) for f in by_number] == [
        ("model-00001-of-00003.safetensors", ["b"]),
        ("model-00002-of-00003.safetensors", ["a", "c"]),
    ]
    for kind in (np.int64, torch.tensor):
        of_kind = {"a": kind(2), "b": kind(1), "c": kind(2), "of no tensor": kind(3)}
        assert plan_files(tensors, 1, of_kind) == by_number
    named = {"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors"}
    assert [f.name for f in plan_files(tensors, 1, named)] == ["x.safetensors", "y.safetensors"]


@pytest.mark.parametrize(
    "mapping",
    [
        {"a": "x.safetensors"},
        {"a": 1, "b": "y.safetensors"},
        {"a": "../x.safetensors", "b": "y.safetensors"},
        {"a": "x.bin", "b": "y.safetensors"},
        {"a": 0, "b": 1},
        {"a": "model.safetensors", "b": "y.safetensors"},
    ],
    ids=["incomplete", "mixed", "elsewhere", "other format", "zero", "single file and others"],
)
def test_a_mapping_that_makes_no_files_is_refused(mapping) -> None:
    with pytest.raises(ConfigError, match="fqn_to_file"):
        plan_files([_plan("a", 1), _plan("b", 1)], 1, mapping)


@pytest.mark.parametrize("size", [5_000_000_000, np.int64(5_000_000_000), torch.tensor(5 * 10**9)])
def test_a_size_may_be_a_number_of_numpy_or_torch(size) -> None:
    assert bytes_of_size(size) == bytes_of_size("5GB")
