"""What a failure keeps alive: its traceback holds frames, and those hold the staged copy."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, FunctionType, TracebackType

from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["release_frames"]


def release_frames(error: BaseException, *, apart_from: BaseException | None = None) -> None:
    """Replaces the traceback of an error by one of the same lines, in which there is nothing else.

    Whoever keeps the error would keep the staged copy else. ``traceback.clear_frames`` is not
    enough: it leaves what closures hold, and the frames that have called.

    Args:
        error: The error; those that it was raised from, or that torch gathered, are looked at, too.
        apart_from: One of those, at which to stop: it, and what it was raised from, is others'.
    """
    pending: list[BaseException | None] = [error]
    seen = {id(None), id(apart_from)}
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_frames(one.__traceback__)
        pending += [one.__cause__, one.__context__]
        if isinstance(one, CheckpointException):
            pending += [failure for failure, _ in one.failures.values()]


def _without_frames(traceback: TracebackType | None) -> TracebackType | None:
    entries = []
    while traceback is not None:
        entries.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    made: TracebackType | None = None
    for frame, line in reversed(entries):
        made = TracebackType(made, _empty(frame), -1, line)
    return made


def _nothing() -> Iterator[None]:
    yield


def _empty(frame: FrameType) -> FrameType:
    """A frame that is called as another, but has no variables, and that nobody has called."""
    code = _nothing.__code__.replace(
        co_filename=frame.f_code.co_filename,
        co_name=frame.f_code.co_name,
        co_firstlineno=frame.f_code.co_firstlineno,
    )
    made: FrameType = FunctionType(code, {"__name__": frame.f_globals.get("__name__")})().gi_frame
    return made
