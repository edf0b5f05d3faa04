"""What a subclass of the contract provides, and what its tests send."""

import random

import pytest

SEVERAL_STEPS = 9 * 1024 * 1024 + 17
"""Bytes that no store moves in one go."""

_SMALLEST_PART = 64 * 1024


class Hooks:
    """The store under test, and a way around it.

    Attributes:
        object_count: How many objects the test of listing makes. Choose more than the store lists
            in one request (1,000, unless it is told otherwise).
        honours_conditional_deletes: Whether ``delete`` with ``if_version`` takes no other version.
        honours_conditional_copies: Whether `copy` heeds the version of its source, and
            ``if_version``.
        keeps_attempts: Whether objects keep the name of the write that made them.
        memory_is_ours: Whether no server is a thread of this process, whose memory would count.
    """

    object_count = 1100
    honours_conditional_deletes = True
    honours_conditional_copies = True
    keeps_attempts = True
    memory_is_ours = True

    @pytest.fixture
    def store(self):
        """The store under test."""
        raise NotImplementedError("a subclass of StoreContract provides the fixture 'store'")

    @pytest.fixture
    def prefix(self):
        """What all keys of a test begin with; an absolute path for a file system."""
        return "contract/"

    def put_directly(self, store, key, data):
        """Creates an object without the store under test."""
        raise NotImplementedError("a subclass of StoreContract provides 'put_directly'")

    def get_directly(self, store, key):
        """The bytes of an object that exists, without the store under test."""
        raise NotImplementedError("a subclass of StoreContract provides 'get_directly'")


def some_bytes(size, seed=0):
    """Bytes without a pattern, the same in each run."""
    return random.Random(seed).randbytes(size)


def cut(data, sizes):
    """Views of ``data`` of these sizes, and one of the rest."""
    views, rest = [], memoryview(data)
    for size in sizes:
        views.append(rest[:size])
        rest = rest[size:]
    return [*views, rest]


def checksum(store, data):
    """The checksum that goes along with ``data``."""
    return store.capabilities.checksum.of(data)


def put(store, key, data, **conditions):
    """``store.put`` of plain bytes."""
    return store.put(key, [memoryview(data)], checksum=checksum(store, data), **conditions)


def put_part(store, upload, number, data):
    """``store.put_part`` of plain bytes."""
    return store.put_part(upload, number, [memoryview(data)], checksum=checksum(store, data))


def part_size(store):
    """Bytes of a part that the store accepts in the middle of an upload."""
    return max(store.capabilities.min_part_size, _SMALLEST_PART)


def parts_of(store, data):
    """``data`` in parts."""
    size = part_size(store)
    return [data[start : start + size] for start in range(0, len(data), size)]
