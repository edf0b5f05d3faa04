"""The index at the end of a data object: what was written comes back; nothing else is believed."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.checkpoint.envelope import has_stored_form
from cloudckpt.checkpoint.index import index_bytes, index_size
from cloudckpt.checkpoint.object_index import ObjectIndex, code_of
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checksum import CRC32C, CRC64NVME, block_size_for
from cloudckpt.errors import CheckpointCorruptError

URI = "s3://bucket/run/__0_0.0123456789abcdef.distcp"
ALGORITHMS = st.sampled_from([CRC32C, CRC64NVME])
MIB = 1 << 20


@dataclasses.dataclass
class Item:
    head: int
    tail: int
    code: int
    raw: int
    sums: list[int]

    @property
    def length(self):
        return self.head + self.raw + self.tail


@st.composite
def items(draw, algorithm):
    code = draw(st.sampled_from([0, code_of(torch.float32), code_of(torch.bool)]))
    edge = st.integers(0, 1000) if code else st.just(0)
    raw = draw(st.integers(0, 5000) | st.integers(0, 300 * MIB))
    blocks = -(-raw // block_size_for(raw))
    sums = [draw(st.integers(0, 256**algorithm.nbytes - 1))] * blocks
    return Item(draw(edge), draw(edge), code, raw, sums)


def written(found, algorithm):
    """The index of items, and what the commit object says of their object."""
    numbers = ([getattr(item, name) for item in found] for name in ("head", "tail", "code", "raw"))
    data = index_bytes(*numbers, [one for item in found for one in item.sums], algorithm)
    assert len(data) == index_size([item.raw for item in found], algorithm)
    ends = sum(-(-item.length // 64) * 64 for item in found)
    return bytearray(data), record_of(data, ends + len(data))


def record_of(data, size):
    return WrittenObject(0, 0, "0123456789abcdef", size, 0, len(data), CRC32C.of(bytes(data)))


@settings(max_examples=50)
@given(st.data())
def test_each_item_is_found_by_its_place(data):
    algorithm = data.draw(ALGORITHMS)
    found = data.draw(st.lists(items(algorithm), max_size=8))
    index = ObjectIndex(*written(found, algorithm), algorithm, URI)
    offset = 0
    for item in found:
        (back,) = index.find([offset], [item.length], ["w"])
        assert (back.head, back.tail, back.raw_length) == (item.head, item.tail, item.raw)
        assert code_of(back.dtype) == item.code if item.code else back.dtype is None
        assert list(back.blocks.checksums) == item.sums
        assert (back.blocks.algorithm, back.blocks.size) == (algorithm, block_size_for(item.raw))
        offset += -(-item.length // 64) * 64


TWO = [Item(640, 100, code_of(torch.float32), 4000, [7]), Item(0, 0, 0, 99, [8])]


@pytest.mark.parametrize(
    ("offset", "length"), [(64, 4740), (0, 4739), (0, 99), (9999, 99), (-64, 99)]
)
def test_a_place_where_no_item_is_contradicts_the_metadata(offset, length):
    index = ObjectIndex(*written(TWO, CRC32C), CRC32C, URI)
    with pytest.raises(CheckpointCorruptError, match="contradict") as caught:
        index.find([offset], [length], ["w"])
    assert (caught.value.uri, caught.value.item) == (URI, "w")


def test_no_flipped_bit_and_no_missing_or_surplus_byte_goes_unnoticed():
    data, record = written(TWO, CRC32C)
    others = [data[:-1], data + b"\0", bytearray()]
    for at in range(len(data)):
        others.append(bytearray(data))
        others[-1][at] ^= 1 << (at % 8)
    for damaged in others:
        with pytest.raises(CheckpointCorruptError):
            ObjectIndex(damaged, record, CRC32C, URI)


@settings(max_examples=300)
@given(st.data())
def test_an_index_that_somebody_made_up_is_refused_or_of_bounded_size(data):
    """Its checksum is right: whoever writes to the bucket can also write the commit object."""
    made, _ = written(TWO, CRC32C)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(made) - 1))
        made[at] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([4864 + len(made), len(made), 1 << 62]))
    try:
        index = ObjectIndex(made, record_of(made, size), CRC32C, URI)
        index.find([0, 4800], [4740, 99], ["w", "v"])
    except CheckpointCorruptError:
        return


def test_an_index_of_checksums_of_another_kind_is_refused():
    with pytest.raises(CheckpointCorruptError, match="is invalid"):
        ObjectIndex(*written(TWO, CRC32C), CRC64NVME, URI)


def test_all_types_that_torch_can_save_have_a_number_of_their_own():
    types = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    stored = [
        dtype for dtype in types if has_stored_form(dtype) and not str(dtype).startswith("torch.q")
    ]
    codes = [code_of(dtype) for dtype in stored]
    assert None not in codes
    assert len(set(codes)) == len(codes)
    assert code_of(torch.float64) == 1  # numbers are for ever
    assert code_of(torch.bool) == 10
