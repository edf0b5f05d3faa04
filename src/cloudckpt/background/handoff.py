"""What passes between a trainer and its saving process: messages, and the copy without its bytes.

The trainer sends a ``Job`` for each save, with its tensors as places in an arena, whose descriptor
follows once; ``COMING`` before it, or ``NOT_COMING`` instead of it if the ranks do not begin; and
``END``. The process answers with pairs of a kind and its content: ``ready`` or ``failed to start``,
``outcome`` for each job, and between them ``alive``, ``log`` and ``event``.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from cloudckpt.background.arena import Arena
from cloudckpt.config import BackgroundOptions
from cloudckpt.errors import CloudCheckpointError, StagingError
from cloudckpt.transfer.memory import extent

__all__ = [
    "COMING",
    "END",
    "NOT_COMING",
    "Job",
    "Outcome",
    "Settings",
    "as_socket",
    "pack",
    "receive_descriptor",
    "send_descriptor",
    "set_timeout",
    "unpack",
]

COMING, NOT_COMING, END = "a save is coming", "it is not", "end"


@dataclass(frozen=True)
class Settings:
    """What a saving process is told when it starts.

    Attributes:
        rank: Of the trainer in its group.
        world: Ranks of the group.
        store: Host and port at which the processes of all ranks meet; None if there is no group.
        place: In that store, what these processes have for themselves.
        options: Its priorities, and what it may wait for.
        log_levels: From which on records of a logger are sent to the trainer.
    """

    rank: int
    world: int
    store: tuple[str, int] | None
    place: str
    options: BackgroundOptions
    log_levels: dict[str, int]


@dataclass(frozen=True)
class Job:
    """One save.

    Attributes:
        payload: See :func:`pack`; empty if ``failure`` is given.
        arena: The number of the arena of its tensors.
        size: Bytes of that arena, whose descriptor follows if it is a new one.
        is_new: Whether that is so.
        kept: The arenas that the trainer still has.
        failure: Why this rank can't take part; the other ranks are told.
        variables: Where the trainer's environment has credentials now.
    """

    payload: bytes = b""
    arena: int | None = None
    size: int = 0
    is_new: bool = False
    kept: frozenset[int] = frozenset()
    failure: CloudCheckpointError | None = None
    variables: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Outcome:
    """How a save ended.

    Attributes:
        result: The metadata, or where they are, and what was transferred, if it succeeded.
        error: Why it failed.
        is_last: Whether the process takes no other save, unless that is on its way already.
    """

    result: bytes | None = None
    error: BaseException | None = None
    is_last: bool = False


def pack(state_dict: dict[str, Any], others: object, arena: Arena | None) -> bytes:
    """A pickle in which tensors of the arena are places, not bytes.

    Args:
        state_dict: The staged state dict.
        others: What else is to travel.
        arena: Where the tensors are; others are sent by value.

    Raises:
        StagingError: If a value can't be pickled, or lies on an accelerator.
    """
    try:
        return _dumps((state_dict, others), arena)
    except StagingError:
        raise
    except Exception as exc:
        raise StagingError(
            f"{_culprit(state_dict, arena)} can't be sent to the saving process; leave it out of "
            "the state dict, or save in a thread",
            cause=exc,
        ) from exc


def _dumps(value: object, arena: Arena | None) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer, arena).dump(value)
    return buffer.getvalue()


def _culprit(state_dict: dict[str, Any], arena: Arena | None) -> str:
    """The entry that can't be pickled, for a message."""
    for key, value in state_dict.items():
        try:
            _dumps(value, arena)
        except Exception:  # noqa: BLE001 - the same again
            return f"{key!r} (a {type(value).__name__})"
    return "the planner or the writer"


def unpack(data: bytes, arena: Arena | None) -> tuple[dict[str, Any], Any]:
    """The state dict and what else was packed with it."""
    content: tuple[dict[str, Any], Any] = _Unpacker(io.BytesIO(data), arena).load()
    return content


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, arena: Arena | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._begin = 0 if arena is None else arena.address
        self._end = 0 if arena is None else self._begin + arena.size

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return None
        if value.device.type not in ("cpu", "meta"):
            raise StagingError(
                f"a tensor is on {value.device}, where the saving process can't read it; use a "
                "stager that copies to the host"
            )
        if value.layout != torch.strided or value.device.type == "meta" or value.is_quantized:
            return None
        if value.numel() == 0:  # torch's own pickle of one can't be read if its type is a newer one
            return 0, 0, value.dtype, tuple(value.shape), value.stride()
        start = value.untyped_storage().data_ptr()
        if not self._begin <= start < self._end:
            return None
        first, end = extent(value)
        place = start - self._begin + first
        return place, end - first, value.dtype, tuple(value.shape), value.stride()


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arena: Arena | None) -> None:
        super().__init__(file)
        self._memory = None if arena is None else arena.memory()

    def persistent_load(self, place: Any) -> torch.Tensor:
        first, size, dtype, shape, stride = place
        if not size:
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        if self._memory is None:
            raise StagingError("the staged copy did not arrive")
        made = torch.empty(0, dtype=dtype, device="cpu")
        return made.set_(self._memory.storage(first, size), 0, shape, stride)


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
