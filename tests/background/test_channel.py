"""What crosses between trainer and saving process, whatever the program does with sockets."""

import multiprocessing
import os
import socket
from collections.abc import Iterator

import pytest

from cloudckpt.background.channel import (
    as_socket,
    receive_descriptors,
    send_descriptor,
    set_timeout,
)


@pytest.fixture
def _impatient_sockets() -> Iterator[None]:
    socket.setdefaulttimeout(30)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("_impatient_sockets")
def test_a_descriptor_crosses_and_the_channel_still_waits_whatever_the_default_timeout_is():
    ours, theirs = multiprocessing.Pipe()
    reading, writing = os.pipe()
    with ours, theirs, as_socket(theirs) as end:
        send_descriptor(ours, reading)
        os.close(reading)
        [received] = receive_descriptors(end, 1)
        assert os.get_blocking(ours.fileno())
        assert os.get_blocking(theirs.fileno())
        os.write(writing, b"x")
        assert os.read(received, 1) == b"x"
    os.close(received)
    os.close(writing)


def test_who_waits_for_a_descriptor_is_told_that_the_other_side_is_gone():
    ours, theirs = multiprocessing.Pipe()
    with theirs, as_socket(theirs) as end:
        ours.close()
        with pytest.raises(EOFError):
            receive_descriptors(end, 1)


def test_a_read_that_takes_too_long_fails():
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        set_timeout(ours, 0.05)
        with pytest.raises(BlockingIOError):
            ours.recv()
