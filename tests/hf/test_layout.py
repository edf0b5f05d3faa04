"""The files of a model and their parts, as plain values."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt import Config
from cloudckpt.errors import ConfigError
from cloudckpt.hf.layout import Chunk, Extent, TensorPlan, cut, plan_files
from cloudckpt.hf.sending import plan_work
from cloudckpt.hf.writer import bytes_of_size
from support.memory_store import MemoryStore


def _rows(shape, ranks):
    step = -(-shape[0] // ranks)
    cuts = [(at, min(step, shape[0] - at)) for at in range(0, shape[0], step)]
    return [(cut, *((0, size) for size in shape[1:])) for cut in cuts]


_LIMITS = MemoryStore("limits").capabilities


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=9),
    st.integers(28, 90),
)
def test_parts_are_large_enough_and_make_up_the_file(header, sizes, most) -> None:
    extents = [Extent(n, size, 4, scattered) for n, (size, scattered) in enumerate(sizes)]
    parts = list(cut(b"h" * header, extents, least=10, most=most))
    flat = [one for part in parts for one in (part if isinstance(part, list) else [part])]
    assert flat[0] == b"h" * header
    at = [0] * len(sizes)
    for one in flat[1:]:
        assert one.start == at[one.extent.source]
        at[one.extent.source] = one.stop
    assert at == [size for size, _ in sizes]
    assert [one.extent.source for one in flat[1:]] == sorted(one.extent.source for one in flat[1:])
    for part in parts[:-1]:
        whole = part if isinstance(part, list) else [part]
        assert sum(len(one) if isinstance(one, bytes) else one.nbytes for one in whole) >= 10
    for part in parts:
        if not isinstance(part, list):
            assert part.start % 4 == 0
            assert not part.extent.is_scattered


def test_shards_of_rows_are_sent_by_their_ranks() -> None:
    shape = (64 * 1024, 4096)  # 1 GiB
    chunks = [Chunk(rank, 0, box) for rank, box in enumerate(_rows(shape, 4))]
    files = plan_files([TensorPlan("w", torch.float32, shape, chunks)], 5 * 10**9, None)
    _, work = plan_work(files, 4, Config(), _LIMITS, by_position=False)
    own = [sum(nbytes for one in mine.own for _, nbytes in one.parts) for mine in work]
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
