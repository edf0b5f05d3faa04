"""A step that takes too long is ended, and said to be late however its end shows."""

import socket

import pytest

from cloudckpt.stores.watch import Watch


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


def test_an_error_of_a_step_in_time_is_its_own(watch, sock):
    with pytest.raises(ConnectionResetError), watch.step(sock, "too slow", 30.0):
        raise ConnectionResetError


def test_an_interrupt_is_never_replaced(watch, sock):
    with pytest.raises(KeyboardInterrupt):
        wait_for_the_end(watch, sock, KeyboardInterrupt())


def test_the_step_after_a_late_one_is_not_late(watch, sock):
    with pytest.raises(TimeoutError):
        wait_for_the_end(watch, sock)
    with watch.step(sock, "too slow", 30.0):
        assert sock.recv(1) == b""
