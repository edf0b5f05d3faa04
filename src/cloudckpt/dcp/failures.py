"""Prepares the errors of a rank for other ranks: pickled, combined, or without their frames."""

from __future__ import annotations

import contextlib
import logging
import pickle
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt.errors import (
    CheckpointError,
    CloudCheckpointError,
    RanksFailedError,
    StoreError,
    text_of,
)

__all__ = [
    "break_off",
    "one_error",
    "portable",
    "portable_errors",
    "release_frames",
    "unpickled",
]

logger = logging.getLogger("cloudckpt")

_NO_TAG = 1 << 20  # a tag that no message uses
_LATE = timedelta(milliseconds=1)

E = TypeVar("E", bound="BaseException | None")


def portable(error: E, uri: str | None) -> E | CheckpointError:
    """Returns ``error`` if it is None or can be pickled, else a CheckpointError caused by it.

    torch sends the failures of ranks to other ranks by pickle. A failure that can't be pickled
    would be raised on its own rank only, and leave the other ranks waiting.
    """
    if error is None or _survives_pickling(error):
        return error
    made = CheckpointError(
        "a planner or other code outside of cloudckpt failed, with an error that can't be sent "
        "to the other ranks; see the cause",
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


def unpickled(data: bytes, uri: str | None) -> Any:
    """Returns a plan, or the results of a writer, that another rank has pickled.

    Raises:
        CheckpointError: If it can't be unpickled.
    """
    try:
        return pickle.loads(data)  # noqa: S301 - of a rank of this job
    except Exception as exc:
        raise CheckpointError(
            "a plan of a custom planner, or a result of a custom writer, can't be unpickled on "
            "another rank: use classes that pickle can restore there, from a module that every "
            "rank can import",
            uri=uri,
            cause=exc,
        ) from exc


def _survives_pickling(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made in the line itself
    except Exception:  # noqa: BLE001 - anything may be raised by somebody's __reduce__
        return False
    return True


class _TracebackError(Exception):
    """An error whose message is the traceback of another error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def release_frames(error: BaseException, *, apart_from: BaseException | None = None) -> None:
    """Removes the tracebacks and causes of an error, but keeps its root cause as text.

    An error with tracebacks would keep the staged copy in memory. The root cause, the earliest
    error from outside cloudckpt, stays as the text of ``__cause__``, except for a ``StoreError``,
    whose message has this text already. The whole chain is first logged at level DEBUG.

    Args:
        error: The error; its causes, and errors of ranks that torch has gathered in it, are also
            changed.
        apart_from: An error in the chain that is left unchanged, with its causes, as other code
            uses it.
    """
    logger.debug("%s", "".join(traceback.format_exception(error)))
    pending: list[tuple[BaseException | None, traceback.StackSummary | None]] = [(error, None)]
    seen = {id(None), id(apart_from)}
    first = ""
    while pending:
        current, stack = pending.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if not isinstance(current, (CloudCheckpointError, CheckpointException)):
            lines = traceback.format_exception(current, chain=False)
            first = "".join([*(stack.format() if stack is not None else ()), *lines])
        pending += [(current.__cause__, None), (current.__context__, None)]
        if isinstance(current, CheckpointException):
            pending += [(failure, stack) for failure, stack in current.failures.values()]
        current.__traceback__ = current.__context__ = current.__cause__ = None
    if first and not isinstance(error, StoreError):  # a StoreError's message has its whole cause
        error.__cause__ = _TracebackError(first)


def break_off(group: dist.ProcessGroup | None) -> None:
    """Closes the connections of a gloo group in which this rank has lost another rank.

    When a rank dies, only the ranks that exchange data with it notice, and raise an error. All
    others would wait for these ranks until the group's timeout, although no collective can succeed
    any more; closed connections let them fail at once. A receive that times out closes all
    connections of a gloo group. Groups of other backends are left alone.
    """
    if group is None:
        return
    with contextlib.suppress(ValueError, KeyError, TypeError):  # the group was destroyed
        if dist.get_backend_config(group).find("gloo") < 0:
            return
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):  # timed out or already closed
            # torch's functions refuse a destroyed group, whose connections may still be open
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([nothing], peer, _NO_TAG).wait(_LATE)


def one_error(
    failures: Mapping[int, BaseException], rank: int, step: str, uri: str | None
) -> BaseException:
    """Combines the errors of several ranks into one that the user can act on.

    Args:
        failures: The errors, by rank.
        rank: This rank.
        step: When the ranks failed, for the message, such as ``in step 'write'``.
        uri: The checkpoint; None if unknown.

    Returns:
        - This rank's own error, if this rank was interrupted.
        - Else, if all errors have the same class, one of cloudckpt's, that of the lowest rank.
        - Else a RanksFailedError, whose message lists the errors.
    """
    own = failures.get(rank)
    if own is not None and not isinstance(own, Exception):
        return own  # an interrupt of this process stays an interrupt
    first = failures[min(failures)]
    if isinstance(first, CloudCheckpointError) and len({type(e) for e in failures.values()}) == 1:
        return first
    texts = {rank: text_of(error) for rank, error in sorted(failures.items())}
    count = "one rank" if len(texts) == 1 else f"{len(texts)} ranks"
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in list(texts.items())[:8])
    more = f"; and {len(texts) - 8} more" if len(texts) > 8 else ""
    return RanksFailedError(f"{count} failed {step}: {listed}{more}", failures=texts, uri=uri)
