"""What passes between a trainer and its saving process.

The trainer sends ``Settings`` once and a ``Job`` for each save, behind which the descriptors of the
memory follow that its bytes lie in. ``SETTLED`` says that it knows what became of that save, and
that it closes the channel is the end. The process answers with pairs of a kind and its content:
``ready``, an ``outcome`` for each job, and between them ``alive``, ``stuck`` (whether it is),
``log`` and ``event``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from cloudckpt.background.script import ObjectScript
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.sending import Destination
from cloudckpt.events import Transferred

__all__ = [
    "SETTLED",
    "Job",
    "Outcome",
    "Settings",
    "as_socket",
    "receive_descriptor",
    "send_descriptor",
    "set_timeout",
]


SETTLED = "settled"


@dataclass(frozen=True)
class Settings:
    """What a saving process is told when it starts.

    Attributes:
        trainer: The number of the process that has started it.
        nice: By how much it yields the CPU.
        heartbeat_timeout: Seconds in which it must give a sign of life while it sends.
        outlive: Seconds in which it finishes a save whose trainer has ended.
        log_levels: From which on records of a logger are sent to the trainer.
    """

    trainer: int
    nice: int
    heartbeat_timeout: float
    outlive: float
    log_levels: dict[str, int]


@dataclass(frozen=True)
class Job:
    """What a rank sends in one save.

    Attributes:
        destination: Where to.
        objects: What is to be written to each object.
        sizes: Bytes of the arena and of the annex; a descriptor follows of each that has any.
        variables: Where the trainer's environment has credentials now.
        pending: What the store is to be told of it if the trainer ends; None if nothing.
    """

    destination: Destination
    objects: Sequence[ObjectScript]
    sizes: tuple[int, int]
    variables: dict[str, str] = field(repr=False)
    pending: Pending | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Outcome:
    """How that ended.

    Attributes:
        objects: What the store has, if all went well.
        error: Why it did not.
        transferred: What was sent.
    """

    objects: tuple[WrittenObject, ...]
    error: BaseException | None
    transferred: Transferred


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
