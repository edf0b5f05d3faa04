"""Each of many objects is tried to be deleted, whatever becomes of the others."""

import logging
import threading

import pytest

from cloudckpt import RetryPolicy
from cloudckpt.errors import AccessDeniedError, ConnectionLostError, ServerError, ThrottledError
from cloudckpt.transfer.deleting import delete_each, delete_quietly
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

KEYS = [f"run/{number:02}" for number in range(20)]
AT_ONCE = RetryPolicy(attempts=3, base=0.0, cap=0.0)


@pytest.fixture
def store(request):
    store = FaultyStore(MemoryStore(request.node.nodeid))
    for key in KEYS:
        store.inner.put(key, [], checksum=0)
    yield store
    for key in held(store):
        store.inner.delete(key)


def held(store):
    return [info.key for info in store.inner.list("")]


def only(*keys):
    return lambda key: key in keys


@pytest.mark.parametrize("threads", [1, 4])
def test_what_is_refused_does_not_keep_the_others_and_is_told(store, threads):
    store.fail("delete", AccessDeniedError, where=only(KEYS[2]))
    store.fail("delete", ServerError, where=only(KEYS[7]))
    left = delete_each(store, [*KEYS, KEYS[0], "missing"], AT_ONCE, threads=threads)
    assert {key: type(error) for key, error in left.items()} == {
        KEYS[2]: AccessDeniedError,
        KEYS[7]: ServerError,
    }
    assert "gave up after try 3" in str(left[KEYS[7]])
    assert held(store) == [KEYS[2], KEYS[7]]


def test_only_what_may_succeed_later_is_tried_again(store):
    store.fail("delete", AccessDeniedError, where=only(KEYS[2]))
    store.fail("delete", ThrottledError, where=only(KEYS[7]), calls=[1, 2])
    left = delete_each(store, KEYS, AT_ONCE, threads=4)
    assert list(left) == [KEYS[2]]
    assert store.calls["delete"] == len(KEYS) + 2


def test_a_store_that_can_not_be_reached_is_not_waited_for_again_and_again(store):
    store.fail("delete", ConnectionLostError)
    left = delete_each(store, KEYS, AT_ONCE, threads=2)
    assert sorted(left) == KEYS
    assert store.calls["delete"] <= 2 * AT_ONCE.attempts


def test_those_that_had_no_turn_have_it_next(store):
    store.fail("delete", ConnectionLostError, where=only(KEYS[0]))
    assert list(delete_each(store, KEYS, AT_ONCE, threads=1)) == [KEYS[0]]
    assert held(store) == [KEYS[0]]


def test_as_many_are_deleted_at_a_time_as_there_are_threads(store):
    together = threading.Barrier(4)

    def wait(message):
        together.wait(60)
        return ServerError(message)

    store.fail("delete", wait, where=only(*KEYS[:4]), calls=[1, 2, 3, 4])
    assert delete_each(store, KEYS, AT_ONCE, threads=4) == {}
    assert held(store) == []


@pytest.mark.parametrize("error", [ServerError, AccessDeniedError, RuntimeError])
def test_what_is_left_of_a_clean_up_is_logged(store, caplog, error):
    store.fail("delete", error, where=only(KEYS[3]))
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        delete_quietly(store, KEYS, AT_ONCE, threads=1)
    assert "unneeded objects could not be deleted; " in caplog.text
    assert KEYS[3] in held(store)
