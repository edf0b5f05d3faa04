"""The messages between a trainer and its saving process.

The trainer sends ``Settings`` once and a ``Job`` for each save, followed by the descriptors of the
memory that holds its bytes. ``SETTLED`` says that the trainer knows the outcome of that save;
closing the channel ends the process. The process answers with pairs of a message type and its
content: ``ready``, an ``outcome`` for each job, and between them ``alive``, ``stuck`` (a bool),
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

from cloudckpt.checkpoint.object_plan import Destination, ObjectPlan
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.errors import SaveProcessError
from cloudckpt.events import Transferred

__all__ = [
    "SETTLED",
    "Job",
    "Outcome",
    "Settings",
    "as_socket",
    "receive_descriptors",
    "send_descriptor",
    "set_timeout",
]


SETTLED = "settled"


@dataclass(frozen=True)
class Settings:
    """The settings that a saving process receives when it starts.

    Attributes:
        trainer: The process ID of the trainer that started it.
        nice: The niceness to add.
        heartbeat_timeout: Seconds within which it must send a heartbeat while it has a job.
        outlive: Seconds it has to finish a save whose trainer has ended.
        log_levels: The level from which records are sent to the trainer, by logger name.
    """

    trainer: int
    nice: int
    heartbeat_timeout: float
    outlive: float
    log_levels: dict[str, int]


@dataclass(frozen=True)
class Job:
    """The objects that a rank sends in one save.

    Attributes:
        destination: The checkpoint, the rank, and options.
        plans: The plans to carry out, in this order.
        sizes: Bytes of the arena and of the annex; a descriptor follows for each nonempty one.
        variables: The credential variables of the trainer's environment now.
        pending: The pending object to write if the trainer ends; None for none.
    """

    destination: Destination
    plans: Sequence[ObjectPlan]
    sizes: tuple[int, int]
    variables: dict[str, str] = field(repr=False)
    pending: Pending | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        objects: The objects written; empty if the job failed.
        error: The error if the job failed; else None.
        transferred: The bytes and requests of the job.
    """

    objects: tuple[WrittenObject, ...]
    error: BaseException | None
    transferred: Transferred


@contextlib.contextmanager
def as_socket(channel: Connection) -> Iterator[socket.socket]:
    """Yields the channel as a socket, for operations that a ``Connection`` does not have.

    If the program has called ``socket.setdefaulttimeout()``, a new socket object briefly makes the
    channel itself nonblocking: no other thread may use it meanwhile.
    """
    with socket.socket(fileno=os.dup(channel.fileno())) as end:
        end.setblocking(True)
        yield end


def set_timeout(channel: Connection, seconds: float) -> None:
    """Sets the timeout of each read and write: the other side may stop within a message."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with as_socket(channel) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send_descriptor(channel: Connection, fd: int) -> None:
    """Sends a file descriptor, after everything that was already sent."""
    with as_socket(channel) as end:
        socket.send_fds(end, [b"\0"], [fd])


def receive_descriptors(end: socket.socket, count: int) -> list[int]:
    """Receives file descriptors, which the caller then owns.

    Raises:
        EOFError: If the other side has closed the channel.
        SaveProcessError: If this process may not open as many files; they are received, and lost.
    """
    found: list[int] = []
    try:
        for _ in range(count):
            said, received, _, _ = socket.recv_fds(end, 1, 1)
            if not said:
                raise EOFError
            found += received
        if len(found) < count:
            raise SaveProcessError(
                "the saving process can't open the shared memory of the staged copy: the "
                "process or the machine has as many files open as it may; raise the limit "
                "(ulimit -n)"
            )
    except BaseException:
        for fd in found:
            os.close(fd)
        raise
    return found
