"""Headers and indices are checked before they are believed; files, their sizes and parts."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    CloudCheckpointError,
    ConfigError,
    UnsupportedTensorError,
)
from cloudckpt.hf.safetensors import (
    Chunk,
    FilePlan,
    TensorPlan,
    bytes_of_size,
    header_bytes,
    header_length,
    index_bytes,
    parse_header,
    parse_index,
    plan_files,
)
from cloudckpt.hf.sending import plan_work
from cloudckpt.stores.base import ObjectInfo
from support.memory_store import MemoryStore

_TYPES = [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64]


def _plan(name: str, shape: tuple[int, ...] = (1,), dtype=torch.uint8, ranks: int = 1):
    """A tensor of which each rank has some rows."""
    step = -(-shape[0] // ranks) if shape else 0
    boxes = [((at, min(step, shape[0] - at)), *((0, n) for n in shape[1:]))
             for at in range(0, shape[0], step)] if step else []  # fmt: skip
    chunks = [Chunk(rank, 0, box, dtype) for rank, box in enumerate(boxes)]
    return TensorPlan(name, dtype, tuple(shape), chunks)


def _entry(**changes):
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes


def _file(size: int) -> ObjectInfo:
    return ObjectInfo("model.safetensors", size, "1")


def _parsed(document, data: int = 24):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_header(text, _file(8 + len(text) + data), "file:///model")


@given(
    st.lists(
        st.tuples(
            st.text().filter(lambda name: name != "__metadata__"),  # which is no tensor's
            st.lists(st.integers(0, 9), max_size=4),
            st.sampled_from(_TYPES),
        ),
        unique_by=lambda tensor: tensor[0],
    )
)
def test_what_is_written_is_read_again(tensors) -> None:
    plans = [_plan(name, tuple(shape), dtype) for name, shape, dtype in tensors]
    header = header_bytes(plans)
    assert len(header) % 64 == 0
    size = len(header) + sum(plan.nbytes for plan in plans)
    assert header_length(header, size, "") == len(header) - 8
    found = parse_header(header[8:], _file(size), "")
    assert {(each.elements.item, each.shape, each.dtype) for each in found.values()} == {
        (plan.name, plan.shape, plan.dtype) for plan in plans
    }


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_an_error_with_a_name(data: bytes) -> None:
    with pytest.raises(CloudCheckpointError):
        parse_header(data, _file(8 + len(data) + 1), "")  # one byte that belongs to no tensor


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), _JSON))
def test_no_entry_raises_anything_but_an_error_with_a_name(changes) -> None:
    with pytest.raises(CloudCheckpointError):
        _parsed({"w": _entry() | changes}, 25)


WRONG = {
    "outside": ({"w": _entry(shape=[2, 4], data_offsets=[0, 32])}, 24, "outside"),
    "negative": ({"w": _entry(data_offsets=[-1, 23])}, 24, "described by"),
    "backwards": ({"w": _entry(data_offsets=[24, 0])}, 24, "outside"),
    "other size": ({"w": _entry(shape=[2, 2])}, 24, "do not fit its shape"),
    "truth for a number": ({"w": _entry(shape=[True, 6])}, 24, "described by"),
    "no number": (b'{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}', 0, "described by"),
    "overflow": ({"w": _entry(shape=[1 << 62, 4, 0], data_offsets=[0, 0])}, 0, "do not fit"),
    "overflow by type": ({"w": _entry(shape=[1 << 61, 0], data_offsets=[0, 0])}, 0, "do not fit"),
    "gap": ({"w": _entry(data_offsets=[4, 28])}, 28, "does not begin"),
    "overlap": ({"v": _entry(), "w": _entry()}, 24, "does not begin"),
    "rest": ({"w": _entry()}, 25, "end at byte"),
    "more fields": ({"w": _entry(more=1)}, 24, "described by"),
    "no entry": ({"w": 3}, 24, "described by"),
    "metadata": ({"__metadata__": {"a": 1}, "w": _entry()}, 24, "to strings"),
    "no object": ([], 24, "not a JSON object"),
    "twice": (b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
              b'"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, "twice"),
    "no text": (b"\xff\xfe{}", 0, "utf-8"),
    "no JSON": (b"{", 0, "Expecting"),
    "deep": (b"[" * 100_000, 0, "deep"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_header_that_lies_is_refused(case: str) -> None:
    document, data, message = WRONG[case]
    with pytest.raises(CheckpointCorruptError, match=message):
        _parsed(document, data)


def test_a_type_that_nobody_knows_is_named() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"F33.* at file:///model"):
        _parsed({"w": _entry(dtype="F33")})


def test_a_header_may_say_that_it_has_no_metadata() -> None:
    assert [*_parsed({"__metadata__": None, "w": _entry()})] == ["w"]


@pytest.mark.parametrize(
    ("length", "size"),
    [(0, 100), (1 << 63, 100), (93, 100), (100_000_001, 1 << 40)],
    ids=["none", "huge", "behind the end", "above the limit"],
)
def test_a_length_that_no_header_has_is_refused(length: int, size: int) -> None:
    with pytest.raises(CheckpointCorruptError, match="not a safetensors file"):
        header_length(struct.pack("<Q", length), size, "")
    with pytest.raises(CheckpointCorruptError, match="not a safetensors file"):
        header_length(b"1234567", 7, "")


def test_an_index_stays_in_its_folder() -> None:
    def index(name: str) -> bytes:
        return index_bytes([FilePlan(name, b"", [_plan("w")], 1)], "id")

    assert parse_index(index("a.safetensors"), "") == {"w": "a.safetensors"}
    for name in ("../a.safetensors", "/etc/passwd", "", "a/../b"):
        with pytest.raises(CheckpointCorruptError):
            parse_index(index(name), "")
    for data in (b"{}", b'{"weight_map": []}', b'{"weight_map": {"w": 1}}', b"\xff"):
        with pytest.raises(CheckpointCorruptError, match="index"):
            parse_index(data, "")


def test_names_that_cannot_be_written_are_refused() -> None:
    for names in (["a", "a"], ["__metadata__"], ["\ud800"]):
        with pytest.raises(UnsupportedTensorError):
            header_bytes([_plan(name) for name in names])


def test_shards_of_rows_are_sent_by_their_ranks() -> None:
    tensor = _plan("w", (64 * 1024, 4096), torch.float32, ranks=4)  # 1 GiB
    files = plan_files([tensor], 5 * 10**9, None)
    limits = MemoryStore("limits").capabilities
    _, work = plan_work(files, 4, Config(), limits, by_position=False)
    own = [
        sum(t.nbytes for one in mine.extents for t in one.content if isinstance(t, TensorPlan))
        for mine in work
    ]
    assert own == [tensor.nbytes // 4] * 4
    assert not any(mine.rounds for mine in work), "no byte passes another rank"


def test_tensors_of_uneven_columns_are_sent_by_all_ranks() -> None:
    columns = [(0, 668), (668, 666), (1334, 666)]
    chunks = [Chunk(rank, 0, ((0, 1000), cut), torch.uint8) for rank, cut in enumerate(columns)]
    tensors = [TensorPlan(f"{n}", torch.uint8, (1000, 2000), chunks) for n in range(6)]
    limits = MemoryStore("limits").capabilities
    _, work = plan_work(plan_files(tensors, 10**9, None), 3, Config(), limits, by_position=False)
    assert [sum(one.extent is not None for one in mine.rounds) for mine in work] == [2, 2, 2]


def test_files_are_filled_up_to_their_size_and_named_as_transformers_does() -> None:
    sizes = {"a": 60, "b": 40, "c": 1, "d": 500, "e": 2}
    tensors = [_plan(name, (size,)) for name, size in sizes.items()]
    files = plan_files(tensors, 100, None)
    assert [file.name for file in files] == [
        f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)
    ]
    assert [{t.name for t in file.tensors} for file in files] == [{"a", "b"}, {"c"}, {"d"}, {"e"}]
    assert [file.name for file in plan_files(tensors, 1000, None)] == ["model.safetensors"]


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_a_mapping_numbers_the_files(kind) -> None:
    mapping = {"a": kind(2), "b": kind(1), "c": kind(2), "of no tensor": kind(3)}
    found = plan_files([_plan("a"), _plan("b"), _plan("c")], 1, mapping)
    assert [(f.name, [t.name for t in f.tensors]) for f in found] == [
        ("model-00001-of-00003.safetensors", ["b"]),
        ("model-00002-of-00003.safetensors", ["a", "c"]),
    ]


@pytest.mark.parametrize("mapping", [{"a": 1}, {"a": 0, "b": 1}, {"a": 1, "b": "y.safetensors"}])
def test_a_mapping_that_makes_no_files_is_refused(mapping) -> None:
    with pytest.raises(ConfigError, match="fqn_to_file"):
        plan_files([_plan("a"), _plan("b")], 1, mapping)


@pytest.mark.parametrize(
    "size", ["9" * 400, "0.4", "5 parsecs", 0, -1, True, "0GB", np.int64(0), 5e9]
)
def test_a_size_that_is_none_is_refused(size) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        bytes_of_size(size)
