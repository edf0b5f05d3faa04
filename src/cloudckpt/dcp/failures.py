"""Prepares errors for pickling, or for being kept without their frames."""

from __future__ import annotations

import contextlib
import logging
import pickle
import traceback
from collections.abc import Iterator
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt.errors import CheckpointError, CloudCheckpointError, StoreError

__all__ = ["is_of_group", "portable", "portable_errors", "release_frames"]

logger = logging.getLogger("cloudckpt")

E = TypeVar("E", bound="BaseException | None")


def portable(error: E, uri: str | None) -> E | CheckpointError:
    """Returns the error itself if it can be pickled, else a CheckpointError that describes it.

    torch gathers the failures of all ranks by pickle. An unpicklable one would be raised on its own
    rank only and leave the other ranks waiting.
    """
    if error is None or _survives_pickling(error):
        return error
    made = CheckpointError(
        "a planner or other code outside of cloudckpt failed, with an error that can't be sent "
        "to the other ranks",
        uri=uri,
        cause=error,
    )
    made.__cause__ = error
    return made.with_traceback(error.__traceback__)


@contextlib.contextmanager
def portable_errors(uri: str | None) -> Iterator[None]:
    """Replaces errors that can't be pickled, for example a planner's, by errors that can.

    Use it for a block, or as a decorator of a step whose errors other ranks receive.
    """
    try:
        yield
    except BaseException as exc:
        raised = portable(exc, uri)
        if raised is exc:
            raise
        raise raised from exc


def _survives_pickling(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made in the line itself
    except Exception:  # noqa: BLE001 - anything may be raised by somebody's __reduce__
        return False
    return True


def is_of_group(exc: BaseException) -> bool:
    """Whether a collective of a process group raised this error.

    gloo raises plain RuntimeErrors, and torch a ValueError if the group was destroyed meanwhile.
    """
    if isinstance(exc, dist.DistError):
        return True
    if not isinstance(exc, (RuntimeError, ValueError)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    names = [frame.f_globals.get("__name__") for frame in frames[-1:]]
    return names == ["torch.distributed.distributed_c10d"]


class _TracebackError(Exception):
    """The traceback of an error, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def release_frames(error: BaseException, *, apart_from: BaseException | None = None) -> None:
    """Drops the tracebacks of an error's chain, and keeps its first foreign cause as text.

    A foreign cause is an error from outside cloudckpt. Otherwise keeping the error would keep the
    staged copy, and printing it would say the same several times. ``traceback.clear_frames`` is not
    enough: it leaves what closures hold, and the calling frames. The whole chain is logged at level
    DEBUG.

    Args:
        error: The error; its causes, and errors that torch has gathered in it, are included.
        apart_from: An error of the chain at which to stop: it and its causes belong to other code.
    """
    logger.debug("%s", "".join(traceback.format_exception(error)))
    pending: list[tuple[BaseException | None, traceback.StackSummary | None]] = [(error, None)]
    seen = {id(None), id(apart_from)}
    first = ""
    while pending:
        one, stack = pending.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, (CloudCheckpointError, CheckpointException)):
            lines = traceback.format_exception(type(one), one, one.__traceback__, chain=False)
            first = "".join([*(stack.format() if stack is not None else ()), *lines])
        pending += [(one.__cause__, None), (one.__context__, None)]
        if isinstance(one, CheckpointException):
            pending += [(failure, stack) for failure, stack in one.failures.values()]
        one.__traceback__ = one.__context__ = one.__cause__ = None
    if first and not isinstance(error, StoreError):  # a StoreError's message has its whole cause
        error.__cause__ = _TracebackError(first)
