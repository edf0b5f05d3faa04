"""A step that takes too long is ended, and said to be late however its end shows."""

import logging
import socket
import threading

import pytest

from cloudckpt.stores.http import connections as module
from cloudckpt.stores.http.connections import Counter, Watch


@pytest.fixture
def watch():
    watch = Watch(0.05)
    yield watch
    watch.close()


@pytest.fixture
def sock():
    """A connection on which nothing arrives."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        yield ours


def wait_for_the_end(watch, sock, then=None):
    with watch.step(sock, "too slow"):
        assert sock.recv(1) == b""
        if then is not None:
            raise then


# what the peer makes of the end may arrive in its place
@pytest.mark.parametrize("then", [None, ConnectionResetError()], ids=["ended", "reset"])
def test_a_late_step_is_said_to_be_late(then, watch, sock):
    with pytest.raises(TimeoutError, match="too slow"):
        wait_for_the_end(watch, sock, then)


def test_a_step_may_have_a_limit_of_its_own(watch, sock):
    sock.settimeout(0.5)
    with watch.step(sock, "too slow", 30.0), pytest.raises(TimeoutError, match="timed out"):
        sock.recv(1)


def test_an_interrupt_is_never_replaced(watch, sock):
    with pytest.raises(KeyboardInterrupt):
        wait_for_the_end(watch, sock, KeyboardInterrupt())


class Unbreakable(socket.socket):
    """A connection that the watch knows nothing to do with."""

    def getsockopt(self, *arguments):
        raise TypeError("not a socket")


def test_a_connection_that_can_not_be_watched_ends_and_the_others_stay_watched(watch, sock, caplog):
    ours, theirs = socket.socketpair()
    odd = Unbreakable(fileno=ours.detach())
    with odd, theirs, caplog.at_level(logging.ERROR, logger="cloudckpt"):
        with pytest.raises(TimeoutError), watch.step(odd, counter=Counter.RECEIVED):
            assert odd.recv(1) == b""
        with pytest.raises(TimeoutError, match="too slow"):
            wait_for_the_end(watch, sock)
    assert "not a socket" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_whose_thread_is_gone_gets_another_one(watch, sock, monkeypatch):
    def end(*_):
        raise SystemExit

    monkeypatch.setattr(watch, "_check", end)
    before = {*threading.enumerate()}
    with watch.step(sock, limit=30.0):
        for thread in {*threading.enumerate()} - before:
            thread.join(30)
    monkeypatch.undo()
    with pytest.raises(TimeoutError, match="too slow"):
        wait_for_the_end(watch, sock)


def test_the_thread_of_a_watch_that_nobody_uses_ends(watch, sock, monkeypatch):
    """Of a store that is never closed, too."""
    monkeypatch.setattr(module, "_IDLE", 0.01)
    before = {*threading.enumerate()}
    with watch.step(sock, limit=30.0):
        [thread] = {*threading.enumerate()} - before
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(TimeoutError, match="too slow"):
        wait_for_the_end(watch, sock)


@pytest.fixture
def link():
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


class Heard:
    """Who waits for a step, and hears of its silence; the step ends when that was long enough."""

    def __init__(self, end, least=0.0):
        self.end, self.least, self.silences = end, least, []

    def is_silent(self, seconds):
        self.silences.append(seconds)
        if seconds >= self.least:
            self.end()


@pytest.fixture
def heard(monkeypatch, link):
    _, theirs = link
    heard = Heard(lambda: theirs.sendall(b"x"))
    monkeypatch.setattr(module, "current", lambda: heard)
    return heard


@pytest.mark.parametrize("counter", [None, Counter.ACKNOWLEDGED])
def test_how_long_a_step_has_been_silent_is_reported_meanwhile(link, heard, counter):
    heard.least = 0.2
    watch = Watch(3600.0)
    with watch.step(link[0], counter=counter):
        link[0].settimeout(60)
        assert link[0].recv(1) == b"x"
    watch.close()
    assert heard.silences[-1] >= 0.2
    assert heard.silences == sorted(heard.silences)


def test_a_step_that_moves_a_byte_now_and_then_is_not_silent(link):
    """However slowly: what a slow link takes is no failure."""
    step = module._Step(link[0], 3600.0, Counter.RECEIVED, 3600.0, 0.0, None)
    for now in (50.0, 100.0):
        link[1].sendall(b"x")
        assert len(link[0].recv(1)) == 1
        step.check(now)
        step.check(now + 9.0)
        assert step.moved == now
