"""Errors that go to other ranks or processes, or are kept."""

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
    """The error, or a description of it as an error if it can't be pickled.

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

    For a block, or as a decorator of a step whose errors other ranks receive.
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
    """Whether a collective raised it; gloo raises plain RuntimeErrors.

    A group that was destroyed meanwhile makes torch raise a ValueError.
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
    """Leaves of an error's chain only the first cause, if it is not ours, and that as text.

    Otherwise keeping the error would keep the staged copy, and printing it would say the same
    several times. ``traceback.clear_frames`` is not enough: it leaves what closures hold, and the
    calling frames. The whole chain is logged at level DEBUG.

    Args:
        error: The error; those that it was raised from, or that torch gathered, are looked at, too.
        apart_from: One of those, at which to stop: it, and what it was raised from, is others'.
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
    if first and not isinstance(error, StoreError):  # which says all of its cause
        error.__cause__ = _TracebackError(first)
