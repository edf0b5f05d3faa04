"""Ranges of many objects reach their tensors, verified, whatever the store does to requests."""

import dataclasses
import itertools
import logging
import resource
import threading
import uuid
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.checksum import CRC32C, Blocks
from cloudckpt.config import MIB, Config, RetryPolicy
from cloudckpt.errors import CheckpointCorruptError, ConnectionLostError, ThrottledError
from cloudckpt.transfer import download as downloads
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import BytesSink, StoredBytes, TensorSink, Wanted
from cloudckpt.transfer.stats import TransferStats
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore
from transfer.props import put, some_bytes

BLOCK = 1000
PATIENT = RetryPolicy(attempts=200, base=0.0, cap=0.0)


def options(**changes):
    """Options with limits that are too small for real use, so that few bytes take many requests."""
    config = Config(connections=4, retry=PATIENT)
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    return config


@pytest.fixture
def store():
    return FaultyStore(MemoryStore(uuid.uuid4().hex))


def stored(store, data, key="object"):
    """The bytes of an object that is there now."""
    put(store.inner, key, data)
    return data


def source_of(data, *, key="object", offset=0, nbytes=None, block=BLOCK, item="item"):
    """An item that lies in an object at ``offset``, with checksums of its blocks."""
    nbytes = len(data) - offset if nbytes is None else nbytes
    raw = data[offset : offset + nbytes]
    if not block:
        return StoredBytes(key, offset, nbytes, None, None, item)
    right = [CRC32C.of(raw[at : at + block]) for at in range(0, nbytes, block)]
    return StoredBytes(key, offset, nbytes, Blocks(CRC32C, block, right), len(data), item)


def bytes_wanted(source, start=0, stop=None, *, divisible=True):
    stop = source.nbytes if stop is None else stop
    return Wanted(source, start, stop, BytesSink(stop - start), divisible)


def fetch(store, wanted, *, request_size=None, merge_gap=MIB, **changes):
    stats = TransferStats()
    with mock.patch.object(downloads, "MERGE_GAP", merge_gap):
        download(store, wanted, options(**changes), stats, request_size=request_size)
    return stats.snapshot()


# delivery


@given(
    items=st.lists(
        st.tuples(st.integers(0, 5000), st.sampled_from([0, BLOCK]), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    parts=st.lists(
        st.tuples(st.integers(0, 5), st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=12
    ),
    request_size=st.integers(500, 9000),
    merge_gap=st.integers(0, 800),
    verify=st.booleans(),
    seed=st.integers(0, 1 << 30),
    share=st.sampled_from([0.0, 0.4]),
)
def test_every_wanted_byte_arrives(items, parts, request_size, merge_gap, verify, seed, share):
    """Items stand in two objects behind envelopes; any parts of them are wanted, also twice."""
    store = FaultyStore(MemoryStore(uuid.uuid4().hex), seed=seed)
    contents, raws = {"a": bytearray(), "b": bytearray()}, []
    for number, (size, block, where) in enumerate(items):
        content = contents["b" if where else "a"]
        content += some_bytes(number * 37, "envelope")
        raws.append(("b" if where else "a", len(content), some_bytes(size, number), block))
        content += raws[-1][2]
    for key, content in contents.items():
        stored(store, bytes(content), key)
    wanted, expected = [], []
    for number, one, other, divisible in parts:
        key, offset, raw, block = raws[number % len(raws)]
        start, stop = sorted([round(one * len(raw)), round(other * len(raw))])
        source = source_of(contents[key], key=key, offset=offset, nbytes=len(raw), block=block)
        wanted.append(bytes_wanted(source, start, stop, divisible=divisible))
        expected.append(raw[start:stop])
    store.fail("get_range", ThrottledError, probability=share)
    store.fail("get_range", ConnectionLostError, probability=share, when="during", moved=333)
    fetch(store, wanted, request_size=request_size, merge_gap=merge_gap, verify=verify)
    assert [bytes(want.sink.data) for want in wanted] == expected


def as_tensor(data, dtype=torch.float32):
    return torch.frombuffer(bytearray(data), dtype=dtype)


def test_a_plain_tensor_is_received_into_its_own_memory(store):
    """No byte takes a detour: the store is given the tensor's memory to fill."""
    data = stored(store, some_bytes(4 * MIB))
    target = torch.zeros(MIB, dtype=torch.int32)
    begin, filled = target.data_ptr(), []
    inner = store.inner.get_range

    def get_range(key, start, into, **others):
        filled.extend((np.frombuffer(v, np.uint8).ctypes.data - begin, v.nbytes) for v in into)
        return inner(key, start, into, **others)

    store.inner.get_range = get_range
    source = source_of(data, block=MIB)
    fetch(store, [Wanted(source, 0, source.nbytes, TensorSink(target, torch.int32), True)])
    assert torch.equal(target, as_tensor(data, torch.int32))
    assert filled == [(0, 4 * MIB)]


TARGETS = {
    "plain": lambda: torch.zeros(60, 50),
    "another type": lambda: torch.zeros(60, 50, dtype=torch.float64),
    "half": lambda: torch.zeros(60, 50, dtype=torch.bfloat16),
    "a view": lambda: torch.zeros(80, 50)[7:67],
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("request_size", [500, 4000, 10**6])
def test_a_contiguous_tensor_takes_its_bytes_in_any_cuts(store, name, request_size):
    data = stored(store, torch.randn(3000).numpy().tobytes())
    target = TARGETS[name]()
    source = source_of(data)
    wanted = [Wanted(source, 0, len(data), TensorSink(target, torch.float32), True)]
    fetch(store, wanted, request_size=request_size)
    assert torch.equal(target, as_tensor(data).view(60, 50).to(target.dtype))


def test_a_box_is_taken_out_of_the_rows_around_it(store):
    whole = torch.randn(40, 30)
    data = stored(store, whole.numpy().tobytes())
    target = torch.zeros(10, 8)
    start = (5 * 30 + 11) * 4
    sink = TensorSink(target, torch.float32, (40, 30))
    fetch(store, [Wanted(source_of(data), start, start + (9 * 30 + 8) * 4, sink, False)])
    assert torch.equal(target, whole[5:15, 11:19])


# economy


@pytest.mark.parametrize(("verify", "nbytes"), [(True, 3 * BLOCK), (False, 1700)])
def test_with_checksums_whole_blocks_are_read_and_no_more(store, verify, nbytes):
    data = stored(store, some_bytes(100_000))
    want = bytes_wanted(source_of(data), 5500, 7200)
    assert fetch(store, [want], verify=verify).nbytes == nbytes
    assert bytes(want.sink.data) == data[5500:7200]


def test_neighbours_share_a_request(store):
    data = stored(store, some_bytes(100_000))
    source = source_of(data)
    wanted = [bytes_wanted(source, at, at + 100) for at in range(0, 90_000, 3000)]
    assert fetch(store, wanted, merge_gap=4000).requests == 1
    assert fetch(store, wanted, merge_gap=100).requests == 30


def test_a_connection_that_broke_is_resumed_where_it_broke(store):
    data = stored(store, some_bytes(100_000))
    store.fail("get_range", ConnectionLostError, calls=[1, 2], when="during", moved=30_000)
    want = bytes_wanted(source_of(data))
    stats = fetch(store, [want])
    assert bytes(want.sink.data) == data
    assert (stats.nbytes, stats.retries) == (100_000, 2)


# damage


class Damaging(MemoryStore):
    """Flips a bit of what is read, in the first ``times`` answers that hold it."""

    def __init__(self, place, times):
        super().__init__(uuid.uuid4().hex)
        self.place, self.times = place, times

    def get_range(self, key, start, into, **others):
        info = super().get_range(key, start, into, **others)
        at = start
        for view in into:
            if at <= self.place < at + view.nbytes and self.times:
                view[self.place - at] ^= 4
                self.times -= 1
            at += view.nbytes
        return info


@pytest.mark.parametrize("place", [0, 4999, 77_777, 99_999])
@pytest.mark.parametrize("request_size", [8 * BLOCK, 10**6])
def test_damage_on_the_way_is_repaired_by_reading_again(place, request_size, caplog):
    store = FaultyStore(Damaging(place, times=1))
    data = stored(store, some_bytes(100_000))
    want = bytes_wanted(source_of(data))
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        fetch(store, [want], request_size=request_size)
    assert bytes(want.sink.data) == data
    assert "checksum of item did not match" in caplog.text


def test_damage_in_the_store_is_told_with_its_place():
    store = FaultyStore(Damaging(77_777, times=10**9))
    data = stored(store, some_bytes(100_000))
    with pytest.raises(CheckpointCorruptError, match="bytes 77000 to 78000") as caught:
        fetch(store, [bytes_wanted(source_of(data, item="layer.weight"))])
    assert caught.value.item == "layer.weight"
    assert caught.value.uri == store.uri("object")


def test_damaged_bytes_are_not_delivered_to_a_tensor_that_takes_a_detour():
    store = FaultyStore(Damaging(500, times=10**9))
    data = stored(store, torch.randn(300).numpy().tobytes())
    target = torch.zeros(300, dtype=torch.float64)
    with pytest.raises(CheckpointCorruptError):
        fetch(store, [Wanted(source_of(data), 0, 1200, TensorSink(target, torch.float32), True)])
    assert not target.any()


@pytest.mark.parametrize(
    ("change", "block"),
    [
        *itertools.product(["gone", "shorter", "longer"], [0, BLOCK]),
        ("replaced", BLOCK),  # of the same size and without checksums, nothing tells them apart
    ],
)
def test_an_object_that_changed_since_the_checkpoint_is_noticed(store, change, block):
    data = some_bytes(10_000)
    source = dataclasses.replace(source_of(data, block=block), object_size=len(data))
    if change == "shorter":
        stored(store, data[:9000])
    elif change == "longer":
        stored(store, data + b"more")
    elif change == "replaced":
        stored(store, some_bytes(10_000, "other"))
    with pytest.raises(CheckpointCorruptError) as caught:
        fetch(store, [bytes_wanted(source)])
    assert caught.value.item == "item"


def test_an_object_that_is_replaced_under_two_requests_at_once_is_noticed():
    """Both are the first of their object: neither knows which version the other one reads."""
    both, old_is_read = threading.Barrier(2), threading.Event()

    class Swapping(MemoryStore):
        def get_range(self, key, start, into, *, if_version, **others):
            assert if_version is None
            if both.wait(30) == 0:
                info = super().get_range(key, start, into, **others)
                old_is_read.set()
                return info
            assert old_is_read.wait(30)
            self.put(key, [memoryview(some_bytes(10_000, "other"))], checksum=0)
            return super().get_range(key, start, into, **others)

    store = FaultyStore(Swapping(uuid.uuid4().hex))
    data = stored(store, some_bytes(10_000))
    source = source_of(data, block=0)
    wanted = [bytes_wanted(source, 0, 1000), bytes_wanted(source, 9000, 10_000)]
    with pytest.raises(CheckpointCorruptError, match="replaced"):
        fetch(store, wanted, connections=2, merge_gap=0)


# failures


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells")
def test_no_memory_is_taken_for_bytes_that_do_not_come():
    """Metadata that are damaged may say of an item that it has any number of bytes."""
    MemoryStore("lies").put("object", [memoryview(b"short")], checksum=CRC32C.of(b"short"))
    before = resident()
    sink = BytesSink(1 << 31)
    source = StoredBytes("object", 10, 1 << 31, None, None, "item")
    wanted = [Wanted(source, 0, 1 << 31, sink, True)]
    with pytest.raises(CheckpointCorruptError, match="shorter"):
        download(MemoryStore("lies"), wanted, Config(), TransferStats())
    assert resident() - before < 1 << 29
    with pytest.raises(MemoryError):
        BytesSink(1 << 62)
