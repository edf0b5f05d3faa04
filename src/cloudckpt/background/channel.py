"""The channel between trainer and saving process as a socket: time limits, and file descriptors."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection

__all__ = ["as_socket", "receive_descriptor", "send_descriptor", "set_timeout"]


@contextlib.contextmanager
def as_socket(channel: Connection) -> Iterator[socket.socket]:
    """The same channel, for what a ``Connection`` can't do.

    If the program has called ``socket.setdefaulttimeout()``, a new socket object lets the channel
    itself not wait, for a moment: nobody else may use it then.
    """
    with socket.socket(fileno=os.dup(channel.fileno())) as end:
        end.setblocking(True)
        yield end


def set_timeout(channel: Connection, seconds: float) -> None:
    """Lets reads and writes fail that take longer: the other side may stop amid a message."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with as_socket(channel) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send_descriptor(channel: Connection, fd: int) -> None:
    """Sends a file descriptor behind what was sent before."""
    with as_socket(channel) as end:
        socket.send_fds(end, [b"\0"], [fd])


def receive_descriptor(end: socket.socket) -> int:
    """A file descriptor, which is the caller's then.

    Raises:
        EOFError: If the other side is gone.
    """
    _, found, _, _ = socket.recv_fds(end, 1, 1)
    if not found:
        raise EOFError
    return found[0]
