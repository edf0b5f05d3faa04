"""Objects that a store copies by itself arrive whole, in one request or in parts."""

import dataclasses
import uuid

import pytest

from cloudckpt.checksum import CRC32C
from cloudckpt.errors import (
    AccessDeniedError,
    ConnectionLostError,
    PreconditionFailedError,
    ThrottledError,
)
from cloudckpt.stores.base import CopySource
from cloudckpt.stores.local import LocalStore
from cloudckpt.transfer.copying import ObjectCopy, copies_within
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore
from transfer.props import PART, held, put, some_bytes, transfer

DATA = some_bytes(3 * PART + 17)


@pytest.fixture
def source():
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def target():
    return FaultyStore(MemoryStore(uuid.uuid4().hex))


def copy(source, found, target, *, part_size=PART, create_only=False):
    moved = []
    made, _ = transfer(
        ObjectCopy,
        target,
        "copy",
        part_size,
        produce=lambda made: made.start(CopySource(source, found), moved.append),
        create_only=create_only,
    )
    assert sum(moved) == found.size
    return made


@pytest.mark.parametrize("size", [0, PART, PART + 1, len(DATA)])
def test_a_copy_is_made_in_parts_where_it_takes_several(source, target, size):
    found = put(source, "object", DATA[:size])
    made = copy(source, found, target)
    assert bytes(target.get("copy")[0]) == DATA[:size]
    assert (made.info.size, made.checksum) == (size, CRC32C.of(DATA[:size]))
    assert target.calls["copy_part"] == (0 if size <= PART else -(-size // PART))
    assert held(target.inner) == ["copy"]


@pytest.mark.parametrize("verb", ["copy", "copy_part", "create_upload", "complete_upload"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_fails_for_a_moment_is_tried_again(source, target, verb, when):
    target.fail(verb, ThrottledError, calls=[1])
    target.fail(verb, ConnectionLostError, calls=[2], when=when)
    found = put(source, "object", DATA)
    known = dataclasses.replace(found, checksum=CRC32C.of(DATA))
    part_size = len(DATA) if verb == "copy" else PART
    copy(source, known, target, part_size=part_size, create_only=True)
    assert target.failed[verb] == 2
    assert bytes(target.get("copy")[0]) == DATA
    assert held(target.inner) == ["copy"]


def test_a_copy_that_fails_leaves_nothing(source, target):
    target.fail("copy_part", AccessDeniedError, calls=[3])
    with pytest.raises(AccessDeniedError):
        copy(source, put(source, "object", DATA), target)
    assert held(target.inner) == []


def test_a_source_that_is_replaced_amid_the_copy_fails_it(source, target):
    found = put(source, "object", DATA)

    def replace(message):
        put(source, "object", DATA[::-1])
        return ThrottledError(message)

    target.fail("copy_part", replace, calls=[2])
    with pytest.raises(PreconditionFailedError):
        copy(source, found, target)
    assert held(target.inner) == []


def test_only_stores_of_a_kind_copy_within_and_only_what_their_limits_allow(source, target):
    assert copies_within(source, target, 1 << 50)  # in parts
    assert not copies_within(LocalStore(), target, 1)
    limits = dataclasses.replace(target.capabilities, copies_parts=False, max_copy_size=10)
    target.capabilities = limits
    assert copies_within(source, target, 10)
    assert not copies_within(source, target, 11)
