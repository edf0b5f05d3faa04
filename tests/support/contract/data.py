"""What a subclass of the contract provides, and what its tests send."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from cloudckpt.stores.base import ObjectInfo, ObjectStore, Part, Upload

__all__ = [
    "SEVERAL_STEPS",
    "Hooks",
    "checksum",
    "cut",
    "in_order",
    "part_size",
    "parts_of",
    "put",
    "put_part",
    "some_bytes",
]

SEVERAL_STEPS = 9 * 1024 * 1024 + 17
"""Bytes that no store moves in one go."""

_SMALLEST_PART = 64 * 1024


class Hooks:
    """The store under test, and a way around it.

    Attributes:
        object_count: How many objects the test of listing makes. Choose more than the store lists
            in one request (1,000, unless it is told otherwise).
        atomic_conditions: Whether of several ``put`` with ``if_absent`` at the same moment only one
            may succeed. Only for an emulator that can't do what the real store does.
        honours_conditional_deletes: Whether ``delete`` with ``if_version`` takes no other version.
        honours_conditional_copies: Whether `copy` heeds the version of its source, and
            ``if_absent``.
        keeps_attempts: Whether objects keep the name of the write that made them.
        memory_is_ours: Whether no server is a thread of this process, whose memory would count.
    """

    object_count = 1100
    atomic_conditions = True
    honours_conditional_deletes = True
    honours_conditional_copies = True
    keeps_attempts = True
    memory_is_ours = True

    @pytest.fixture
    def store(self) -> Iterator[ObjectStore]:
        """The store under test."""
        raise NotImplementedError("a subclass of StoreContract provides the fixture 'store'")

    @pytest.fixture
    def prefix(self) -> str:
        """What all keys of a test begin with; an absolute path for a file system."""
        return "contract/"

    def put_directly(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Creates an object without the store under test."""
        raise NotImplementedError("a subclass of StoreContract provides 'put_directly'")

    def get_directly(self, store: ObjectStore, key: str) -> bytes:
        """The bytes of an object that exists, without the store under test."""
        raise NotImplementedError("a subclass of StoreContract provides 'get_directly'")


def some_bytes(size: int, seed: int = 0) -> bytes:
    """Bytes without a pattern, the same in each run."""
    return random.Random(seed).randbytes(size)


def cut(data: bytes | bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Views of ``data`` of these sizes, and one of the rest."""
    views, rest = [], memoryview(data)
    for size in sizes:
        views.append(rest[:size])
        rest = rest[size:]
    return [*views, rest]


def checksum(store: ObjectStore, data: bytes) -> int:
    """The checksum that goes along with ``data``."""
    return store.capabilities.checksum.of(data)


def put(
    store: ObjectStore,
    key: str,
    data: bytes,
    *,
    attempt: str = "",
    if_absent: bool = False,
    if_version: str | None = None,
) -> ObjectInfo:
    """``store.put`` of plain bytes."""
    return store.put(
        key,
        [memoryview(data)],
        checksum=checksum(store, data),
        attempt=attempt,
        if_absent=if_absent,
        if_version=if_version,
    )


def put_part(store: ObjectStore, upload: Upload, number: int, data: bytes) -> Part:
    """``store.put_part`` of plain bytes."""
    return store.put_part(upload, number, [memoryview(data)], checksum=checksum(store, data))


def part_size(store: ObjectStore) -> int:
    """Bytes of a part that the store accepts in the middle of an upload."""
    return max(store.capabilities.min_part_size, _SMALLEST_PART)


def parts_of(store: ObjectStore, data: bytes) -> list[bytes]:
    """``data`` in parts."""
    size = part_size(store)
    return [data[start : start + size] for start in range(0, len(data), size)]


def in_order(parts: Sequence[Part]) -> list[Part]:
    """Parts by their numbers."""
    return sorted(parts, key=lambda part: part.number)
