"""Headers and indices of others are checked before they are believed."""

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.checkpoint.safetensors import (
    header_bytes,
    header_length,
    index_bytes,
    parse_header,
    parse_index,
)
from cloudckpt.errors import CheckpointCorruptError, CloudCheckpointError, UnsupportedTensorError

_TYPES = [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64]


def _entry(**changes):
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes


def _parsed(document, data: int = 24):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_header(text, 8 + len(text) + data, "file:///model")


@given(
    st.lists(
        st.tuples(
            st.text().filter(lambda name: name != "__metadata__"),  # which is no tensor's
            st.sampled_from(_TYPES),
            st.lists(st.integers(0, 9), max_size=4),
        ),
        unique_by=lambda tensor: tensor[0],
    )
)
def test_what_is_written_is_read_again(tensors) -> None:
    tensors = [(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
    header = header_bytes(tensors)
    assert len(header) % 64 == 0
    size = len(header) + sum(
        torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in tensors
    )
    assert header_length(header, size, "") == len(header) - 8
    found = parse_header(header[8:], size, "").tensors
    assert {(each.name, each.dtype, each.shape) for each in found} == set(tensors)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_an_error_with_a_name(data: bytes) -> None:
    with pytest.raises(CloudCheckpointError):
        parse_header(data, 8 + len(data) + 1, "")  # one byte that belongs to no tensor


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
    found = _parsed({"__metadata__": None, "w": _entry()})
    assert (found.metadata, [one.name for one in found.tensors]) == ({}, ["w"])


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
    assert parse_index(index_bytes({"w": "a.safetensors"}, 4, "id"), "") == {"w": "a.safetensors"}
    for name in ("../a.safetensors", "/etc/passwd", "", "a/../b"):
        with pytest.raises(CheckpointCorruptError, match="outside"):
            parse_index(index_bytes({"w": name}, 4, "id"), "")
    for data in (b"{}", b'{"weight_map": []}', b'{"weight_map": {"w": 1}}', b"\xff"):
        with pytest.raises(CheckpointCorruptError, match="index"):
            parse_index(data, "")


def test_names_that_cannot_be_written_are_refused() -> None:
    for names in (["a", "a"], ["__metadata__"], ["\ud800"]):
        with pytest.raises(UnsupportedTensorError):
            header_bytes([(name, torch.float32, (1,)) for name in names])
