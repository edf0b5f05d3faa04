"""Which rank sends what of a model: checked by doing it, with tiny parts and without a store."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt import Config
from cloudckpt.errors import ConfigError
from cloudckpt.hf import parts
from cloudckpt.hf.layout import Chunk, TensorPlan, plan_files
from cloudckpt.hf.parts import Extent, cut_into_parts, elements_needed, plan_work
from cloudckpt.hf.writer import bytes_of_size
from cloudckpt.transfer.memory import narrow
from support.memory_store import MemoryStore


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


_LIMITS = MemoryStore("limits").capabilities
_TINY = dataclasses.replace(_LIMITS, min_part_size=64, max_part_size=256)


@pytest.fixture(autouse=True)
def _tiny_parts(monkeypatch):
    monkeypatch.setattr(parts, "MIB", 64)


@pytest.mark.parametrize("equal_parts", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_parts_of_all_ranks_make_up_the_files(
    split: str, ranks: int, equal_parts: bool
) -> None:
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
            held[rank].append(narrow(whole, box).reshape(-1))
        plans.append(TensorPlan(name, whole.dtype, tuple(whole.shape), chunks))
    files = plan_files(plans, 3000, None)
    limits = dataclasses.replace(_TINY, equal_parts=equal_parts)
    _, work = plan_work(files, ranks, Config(), limits, by_position=False)
    assert len({len(own.rounds) for own in work}) == 1
    made: dict[tuple[int, int], bytes] = {}
    for rank, mine in enumerate(work):
        for part in mine.own:
            needed = [held[rank][e.chunk.item][e.start : e.stop] for e in _needs(part, rank)]
            made[part.file, part.number] = iter(needed), part
    for turn in range(len(work[0].rounds)):
        inbox: dict[tuple[int, int], list[torch.Tensor]] = {}
        for rank, mine in enumerate(work):
            for gift in mine.rounds[turn].gifts:
                one = gift.elements
                assert one.chunk.rank == rank != gift.to
                given = held[rank][one.chunk.item][one.start : one.stop]
                inbox.setdefault((rank, gift.to), []).append(given)
        for rank, mine in enumerate(work):
            for part in mine.rounds[turn].parts:
                needed = [
                    held[rank][one.chunk.item][one.start : one.stop]
                    if one.chunk.rank == rank
                    else inbox[one.chunk.rank, rank].pop(0)
                    for one in elements_needed(part.content)
                ]
                made[part.file, part.number] = iter(needed), part
        assert not any(inbox.values())
    for index, file in enumerate(files):
        numbers = sorted(number for of, number in made if of == index)
        assert numbers == list(range(1, len(numbers) + 1))
        found = [made.pop((index, number)) for number in numbers]
        sizes = [part.nbytes for _, part in found]
        assert len({*sizes[:-1]}) <= 1 if equal_parts else all(size >= 64 for size in sizes[:-1])
        data = _assembled(found)
        assert len(data) == file.size
        at = len(file.header)
        for tensor in file.tensors:
            expected = wholes[tensor.name].contiguous().reshape(-1).view(torch.uint8)
            assert data[at : at + tensor.nbytes] == bytes(expected.tolist()), tensor.name
            at += tensor.nbytes
    assert not made


def _needs(part, rank):
    needs = list(elements_needed(part.content))
    assert {one.chunk.rank for one in needs} <= {rank}
    return needs


def _assembled(found) -> bytes:
    data, wholes = b"", {}
    for needed, part in found:
        for one in part.content if isinstance(part.content, list) else [part.content]:
            if isinstance(one, bytes):
                data += one
                continue
            held = one.extent.source
            if not one.extent.is_scattered:
                data += bytes(next(needed).contiguous().view(torch.uint8).tolist())
                continue
            if one.start == 0:
                whole = torch.empty(held.shape, dtype=held.dtype)
                for chunk in held.chunks:
                    room = narrow(whole, chunk.box)
                    room.copy_(next(needed).view(room.shape))
                wholes[held.name] = bytes(whole.reshape(-1).view(torch.uint8).tolist())
            data += wholes[held.name][one.start : one.stop]
    return data


_GRAIN = 4


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=9),
    st.integers(28, 90),
)
def test_parts_are_large_enough_and_make_up_the_file(header, sizes, most) -> None:
    extents = [Extent(n, size, _GRAIN, scattered) for n, (size, scattered) in enumerate(sizes)]
    cut = list(cut_into_parts(b"h" * header, extents, least=10, most=most))
    flat = [one for part in cut for one in (part if isinstance(part, list) else [part])]
    assert flat[0] == b"h" * header
    at = [0] * len(sizes)
    for one in flat[1:]:
        assert one.start == at[one.extent.source]
        at[one.extent.source] = one.stop
    assert at == [size for size, _ in sizes]
    assert [one.extent.source for one in flat[1:]] == sorted(one.extent.source for one in flat[1:])
    for part in cut[:-1]:
        whole = part if isinstance(part, list) else [part]
        assert sum(len(one) if isinstance(one, bytes) else one.nbytes for one in whole) >= 10
    for part in cut:
        if not isinstance(part, list):
            assert part.start % _GRAIN == 0
            assert not part.extent.is_scattered


def test_shards_of_rows_are_sent_by_their_ranks() -> None:
    shape = (64 * 1024, 4096)  # 1 GiB
    chunks = [Chunk(rank, 0, box) for rank, box in enumerate(_rows(shape, 4))]
    files = plan_files([TensorPlan("w", torch.float32, shape, chunks)], 5 * 10**9, None)
    _, work = plan_work(files, 4, Config(), _LIMITS, by_position=False)
    own = [sum(part.nbytes for part in mine.own) for mine in work]
    assert sum(own) >= files[0].size * 0.99
    assert min(own) >= files[0].size * 0.24


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
