"""The threads that wait in place of an event loop."""

import asyncio
import os
import signal
import threading

import pytest

from cloudckpt.aio.threads import _Threads, in_thread
from forks import child

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


def test_a_call_does_not_wait_for_one_that_takes_long():
    threads, begun, go = _Threads(2), threading.Event(), threading.Event()

    def takes_long():
        begun.set()
        return go.wait(PATIENCE)

    long = threads.submit(takes_long)
    assert begun.wait(PATIENCE)
    assert threads.submit(lambda: "short").result(PATIENCE) == "short"
    assert not long.done()
    go.set()
    assert long.result(PATIENCE)


def test_there_are_never_more_threads_than_wanted():
    threads, lock, here, most = _Threads(3), threading.Lock(), [0], [0]
    meeting = threading.Barrier(3)

    def visit(number):
        with lock:
            here[0] += 1
            most[0] = max(most[0], here[0])
        if number < 3:
            meeting.wait(PATIENCE)
        with lock:
            here[0] -= 1

    calls = [threads.submit(lambda n=n: visit(n)) for n in range(200)]
    for call in calls:
        call.result(PATIENCE)
    assert most == [3]


def _calls_in_a_fork() -> int:
    begun = threading.Event()

    def takes_long():
        begun.set()
        threading.Event().wait(PATIENCE)

    threading.Thread(target=lambda: asyncio.run(in_thread(takes_long)), daemon=True).start()
    assert begun.wait(PATIENCE)
    if not (pid := os.fork()):
        signal.alarm(PATIENCE)
        os._exit(asyncio.run(in_thread(lambda: 7)))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_has_threads_of_its_own_for_long_calls():
    with child(_calls_in_a_fork) as one:
        assert one.wait() == (0, 7)
