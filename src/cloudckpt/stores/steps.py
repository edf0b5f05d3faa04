"""How much of a body one call to the socket takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from cloudckpt.stores.base import Body, Progress

__all__ = ["STEP", "StoppedError", "cut", "steps"]

# Each call gives the GIL away and waits for it: a request of 16 MiB should be one. Elsewhere than
# on Linux the watch can't see what moves in the middle of a call, which has to end in time.
STEP = (16 if sys.platform == "linux" else 4) * 1024 * 1024
"""Bytes that one blocking call moves."""

_SMALL = 64 * 1024
_GATHER = 256 * 1024


def cut(view: memoryview) -> Iterator[memoryview]:
    """A view in steps."""
    for start in range(0, view.nbytes, STEP):
        yield view[start : start + STEP]


class StoppedError(Exception):
    """Carries what ``progress`` raised past urllib3, which would take an OSError for its own."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def steps(body: Body, progress: Progress | None) -> Iterator[memoryview | bytes]:
    """Cuts large views into steps and gathers small ones, which would cost a call each."""

    def moved(count: int) -> None:
        if progress is not None:
            try:
                progress(count)
            except BaseException as error:
                raise StoppedError(error) from error

    gathered: list[memoryview] = []
    waiting = 0
    for view in body:
        if view.nbytes < _SMALL:
            gathered.append(view)
            waiting += view.nbytes
            if waiting < _GATHER:
                continue
        if waiting:
            yield b"".join(gathered)
            moved(waiting)
            gathered, waiting = [], 0
        if view.nbytes >= _SMALL:
            for piece in cut(view):
                yield piece
                moved(piece.nbytes)
    if waiting:
        yield b"".join(gathered)
        moved(waiting)
