"""Errors that reach the other ranks whatever they are."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import TypeVar

from cloudckpt.errors import CheckpointError

__all__ = ["portable", "portable_errors"]

E = TypeVar("E", bound="BaseException | None")


def portable(error: E, uri: str | None) -> E | CheckpointError:
    """The error, or one that tells of it if it can't be pickled.

    torch gathers the failures of all ranks by pickle. One that does not survive that would be
    raised on its own rank only, and leave the others waiting for it.
    """
    if error is None or _survives_pickling(error):
        return error
    made = CheckpointError(
        "a planner or another part outside of cloudckpt failed, with an error that can't be "
        "passed on as it is",
        uri=uri,
        cause=error,
    )
    made.__cause__ = error
    return made


@contextlib.contextmanager
def portable_errors(uri: str | None) -> Iterator[None]:
    """Replaces errors that can't be pickled, of planners for example, by ones that can."""
    try:
        yield
    except Exception as exc:
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
