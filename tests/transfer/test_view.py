"""The questions of the functions about runs: retried, several at a time, and ended on demand."""

import threading
import uuid

import pytest

from cloudckpt.config import Config, RetryPolicy
from cloudckpt.errors import (
    AccessDeniedError,
    ConnectionLostError,
    ObjectNotFoundError,
    TransferCancelledError,
)
from cloudckpt.stores import registry
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore


@pytest.fixture
def store(monkeypatch):
    made = FaultyStore(MemoryStore(uuid.uuid4().hex))
    for key, data in (("run/a/x", b"12"), ("run/b", b""), ("run/c/y", b"3")):
        made.inner.put(key, [memoryview(data)], checksum=0)
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: made})
    monkeypatch.setattr(registry, "_places", {})
    return made


def looking(**policy):
    config = Config(connections=3, retry=RetryPolicy(base=0.001, cap=0.001, **policy))
    return View(CheckpointURI.parse("memory://seen/run"), config)


@pytest.fixture
def view(store):
    return looking(attempts=3)


def test_many_are_asked_in_order_and_the_first_failure_is_raised(view):
    keys = ["run/a/x", "run/b", "run/c/y"] * 5
    assert [info.key for info in view.each(view.look, keys)] == keys
    with pytest.raises(ObjectNotFoundError):
        view.each(view.look, [*keys, "run/nothing", *keys])


def test_after_a_failure_others_are_not_tried_until_their_deadline(store):
    """As with Ctrl-C, which would otherwise wait minutes for what the store fails to answer."""
    view = looking(deadline=3600.0)
    store.fail("get_range", ConnectionLostError, probability=1.0)
    retry = threading.Event()

    def look(key):
        if key == "refused":
            assert retry.wait(60)
            raise AccessDeniedError("no")
        retry.set()
        return view.look(key)

    with pytest.raises(AccessDeniedError):
        view.each(look, ["run/a/x", "refused"])


def test_who_is_cancelled_asks_no_more(store):
    view = looking(deadline=3600.0)
    asked, outcome = threading.Event(), []
    store.fail("list", ConnectionLostError, probability=1.0)

    def ask():
        asked.set()
        try:
            view.objects("run/")
        except TransferCancelledError as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(60)
    view.cancel()
    thread.join(60)
    assert len(outcome) == 1
    with pytest.raises(TransferCancelledError):
        view.look("run/a/x")


def test_a_thread_asks_for_nobody_else_while_it_is_broken_off(view, store, monkeypatch):
    """The break would end the other question, too."""
    asked, let_go, is_still_there = threading.Event(), threading.Event(), []

    def list_level(prefix, retry):
        asked.set()
        assert let_go.wait(60)
        return iter(())

    def interrupt(threads):
        assert threads == [thread.ident]
        let_go.set()
        thread.join(0.2)
        is_still_there.append(thread.is_alive())

    monkeypatch.setattr(store, "list_level", list_level)
    monkeypatch.setattr(store, "interrupt", interrupt)
    thread = threading.Thread(target=view.folders, args=("run/",))
    thread.start()
    assert asked.wait(60)
    view.cancel()
    thread.join(60)
    assert is_still_there == [True]
