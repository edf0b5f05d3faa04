"""Says at save time what ``load`` will refuse, when there is still a choice."""

from __future__ import annotations

import io
import logging
import pickle

import torch

from cloudckpt.checkpoint.pickles import refused
from cloudckpt.checkpoint.plain_values import load_plain, plain_names

__all__ = ["forewarn"]

logger = logging.getLogger("cloudckpt")

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_SMALL = 4096  # bytes
_TRIED = 1 << 20  # the largest item of numpy's that is loaded to see whether it can be
_told: set[tuple[str, type]] = set()  # items and types that this process has looked at


def forewarn(data: bytes, item: str, kind: type, uri: str) -> None:
    """Warns once for each item and type, by the logger ``cloudckpt``, of what ``load`` refuses.

    Values of plain types cost next to nothing.

    Args:
        data: The item, as ``torch.save`` writes it.
        item: Its name.
        kind: The class of its value.
        uri: The checkpoint.
    """
    # a name in the pickle takes two ends of lines, and there is one behind it
    if kind in _PLAIN or (len(data) < _SMALL and data.count(b"\n") < 3):
        return
    if (item, kind) in _told:
        return
    _told.add((item, kind))
    needed = _refused(data)
    if needed:
        logger.warning(
            "%s: %s (%s) is saved, but load will refuse it: %s. Pass trust_pickle=True to load, "
            "allow its classes by torch.serialization.add_safe_globals([...]), or save its plain "
            "values instead", uri, item, kind.__name__, needed,
        )  # fmt: skip


def _refused(data: bytes) -> str:
    """What the default load does not allow; empty if it allows all."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
        others = sorted(set(names).difference(plain_names([]))) if names else []
        if names and not others and len(data) <= _TRIED:
            load_plain(io.BytesIO(data))
    except pickle.UnpicklingError as exc:
        return refused(exc)
    except Exception:  # noqa: BLE001 - a save does not fail because of a warning
        return ""
    return f"{', '.join(others)} is not allowed" if others else ""
