"""The files of a model and their parts, as plain values."""

import numpy as np
import pytest
import torch

from cloudckpt import Config
from cloudckpt.errors import ConfigError
from cloudckpt.hf.layout import Chunk, TensorPlan, bytes_of_size, plan_files
from cloudckpt.hf.sending import plan_work
from support.memory_store import MemoryStore


def _rows(shape, ranks):
    step = -(-shape[0] // ranks)
    cuts = [(at, min(step, shape[0] - at)) for at in range(0, shape[0], step)]
    return [(cut, *((0, size) for size in shape[1:])) for cut in cuts]


_LIMITS = MemoryStore("limits").capabilities


def test_shards_of_rows_are_sent_by_their_ranks() -> None:
    shape = (64 * 1024, 4096)  # 1 GiB
    chunks = [Chunk(rank, 0, box) for rank, box in enumerate(_rows(shape, 4))]
    files = plan_files([TensorPlan("w", torch.float32, shape, chunks)], 5 * 10**9, None)
    _, work = plan_work(files, 4, Config(), _LIMITS, by_position=False)
    own = [
        sum(one.nbytes for stretch in mine.stretches for run in stretch.runs for one in run
            if isinstance(one, TensorPlan))
        for mine in work
    ]  # fmt: skip
    assert own == [files[0].tensors[0].nbytes // 4] * 4
    assert not any(mine.rounds for mine in work), "no byte passes another rank"


def _plan(name: str, numel: int) -> TensorPlan:
    return TensorPlan(name, torch.uint8, (numel,), [Chunk(0, 0, ((0, numel),))])


def test_files_are_filled_up_to_their_size_and_named_as_transformers_does() -> None:
    tensors = [_plan("a", 60), _plan("b", 40), _plan("c", 1), _plan("d", 500), _plan("e", 2)]
    files = plan_files(tensors, 100, None)
    assert [file.name for file in files] == [
        f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)
    ]
    assert [{t.name for t in file.tensors} for file in files] == [{"a", "b"}, {"c"}, {"d"}, {"e"}]
    assert [file.name for file in plan_files(tensors, 1000, None)] == ["model.safetensors"]


def test_a_mapping_numbers_the_files() -> None:
    tensors = [_plan("a", 1), _plan("b", 1), _plan("c", 1)]
    by_number = plan_files(tensors, 1, {"a": 2, "b": 1, "c": 2, "of no tensor": 3})
    assert [(f.name, [t.name for t in f.tensors]) for f in by_number] == [
        ("model-00001-of-00003.safetensors", ["b"]),
        ("model-00002-of-00003.safetensors", ["a", "c"]),
    ]
    for kind in (np.int64, torch.tensor):
        of_kind = {"a": kind(2), "b": kind(1), "c": kind(2), "of no tensor": kind(3)}
        assert plan_files(tensors, 1, of_kind) == by_number


@pytest.mark.parametrize("mapping", [{"a": 1}, {"a": 0, "b": 1}, {"a": 1, "b": "y.safetensors"}])
def test_a_mapping_that_makes_no_files_is_refused(mapping) -> None:
    with pytest.raises(ConfigError, match="fqn_to_file"):
        plan_files([_plan("a", 1), _plan("b", 1)], 1, mapping)


@pytest.mark.parametrize("size", [5_000_000_000, np.int64(5_000_000_000), torch.tensor(5 * 10**9)])
def test_a_size_may_be_a_number_of_numpy_or_torch(size) -> None:
    assert bytes_of_size(size) == bytes_of_size("5GB")


@pytest.mark.parametrize("size", ["9" * 400, "0.4", "5 parsecs"])
def test_a_size_that_is_none_is_refused(size) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        bytes_of_size(size)
