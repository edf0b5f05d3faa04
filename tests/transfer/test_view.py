"""What looks at runs is written once: a thread runs it to its end without an event loop."""

import asyncio
import uuid

import pytest

from cloudckpt.config import RetryPolicy
from cloudckpt.errors import ConnectionLostError, ObjectNotFoundError
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.view import BlockingView, answered
from faulty_store import FaultyStore


@pytest.fixture
def store():
    made = FaultyStore(MemoryStore(uuid.uuid4().hex))
    for key, data in (("run/a/x", b"12"), ("run/b", b""), ("run/c/y", b"3")):
        made.inner.put(key, [memoryview(data)], checksum=0)
    return made


@pytest.fixture
def view(store):
    retrier = Retrier(RetryPolicy(attempts=3, base=0.0, cap=0.0))
    return BlockingView(store, retrier, connections=3)


def test_a_thread_is_answered_at_once(view):
    assert answered(view.folders("run/")) == ["a", "c"]
    assert [info.key for info in answered(view.objects("run/"))] == ["run/a/x", "run/b", "run/c/y"]
    level = answered(view.level("run/"))
    assert [one if isinstance(one, str) else one.key for one in level] == ["run/b", "a", "c"]
    assert answered(view.look("run/a/x")).size == 2
    assert answered(view.look("run/b")).size == 0
    with pytest.raises(ObjectNotFoundError):
        answered(view.look("run/nothing"))


def test_questions_are_tried_again(view, store):
    store.fail("list", ConnectionLostError, calls=[1, 2])
    assert len(answered(view.objects("run/"))) == 3


def test_many_are_asked_in_order_and_the_first_failure_is_raised(view):
    keys = ["run/a/x", "run/b", "run/c/y"] * 5
    found = answered(view.each(view.look, keys))
    assert [info.key for info in found] == keys
    with pytest.raises(ObjectNotFoundError):
        answered(view.each(view.look, [*keys, "run/nothing", *keys]))


def test_a_coroutine_that_waits_for_something_else_is_a_mistake():
    async def waits():
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError):
        answered(waits())
