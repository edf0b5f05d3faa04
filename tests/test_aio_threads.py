"""The threads that wait in place of an event loop."""

import threading

import pytest

from cloudckpt.aio.threads import _Threads

PATIENCE = 60  # seconds


class Limit:
    """Lets a number of threads start, and no more."""

    def __init__(self, monkeypatch):
        self.left = 0
        self._start = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self.start(thread))

    def start(self, thread):
        if not self.left:
            raise RuntimeError("can't start new thread")
        self.left -= 1
        self._start(thread)


@pytest.fixture
def limit(monkeypatch):
    return Limit(monkeypatch)


def test_a_thread_that_can_not_be_had_is_told_and_the_next_call_is_made(limit):
    threads = _Threads(2)
    with pytest.raises(RuntimeError, match="new thread"):
        threads.submit(lambda: 1)
    limit.left = 1
    assert threads.submit(lambda: 2).result(PATIENCE) == 2


def test_calls_are_made_by_the_threads_that_can_be_had(limit):
    threads, go = _Threads(8), threading.Event()
    limit.left = 1
    calls = [threads.submit(lambda n=n: go.wait(PATIENCE) and n) for n in range(4)]
    go.set()
    assert [call.result(PATIENCE) for call in calls] == [0, 1, 2, 3]
