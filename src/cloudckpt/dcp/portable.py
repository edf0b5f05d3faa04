"""Errors that reach the other ranks whatever they are."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator

from cloudckpt.errors import CheckpointError

__all__ = ["portable_errors"]


@contextlib.contextmanager
def portable_errors(uri: str | None) -> Iterator[None]:
    """Replaces errors that can't be pickled, of planners for example, by ones that can.

    torch gathers the failures of all ranks by pickle. One that does not survive that would be
    raised on its own rank only, and leave the others waiting for it.
    """
    try:
        yield
    except Exception as exc:
        if _survives_pickling(exc):
            raise
        raise CheckpointError(
            "a planner or another part outside of cloudckpt failed, with an error that can't be "
            "passed on as it is",
            uri=uri,
            cause=exc,
        ) from exc


def _survives_pickling(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made in the line itself
    except Exception:  # noqa: BLE001 - anything may be raised by somebody's __reduce__
        return False
    return True
