"""How far the saving process stands back behind its trainer, for the CPU and for disks."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

from cloudckpt.errors import ConfigError, MissingDependencyError

__all__ = ["check_io_priority", "stand_back"]

logger = logging.getLogger("cloudckpt")

_CLASSES = {"idle": 3, "best-effort": 2}  # IOPRIO_CLASS_* of Linux


def check_io_priority(wanted: str | int | None) -> None:
    """Whether a saving process of this machine could be given an I/O priority.

    Args:
        wanted: See :class:`~cloudckpt.config.BackgroundOptions`; None is always possible.

    Raises:
        ConfigError: If this system has none.
        MissingDependencyError: If psutil is not installed.
    """
    if wanted is None:
        return
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"io_priority={wanted!r}: only Linux has I/O priorities; leave the option out"
        )
    try:
        _process().ionice()
    except ImportError as exc:
        raise MissingDependencyError(
            f"io_priority={wanted!r} needs psutil; install it with: "
            "pip install 'cloudckpt[priority]'",
            cause=exc,
        ) from exc
    except Exception as exc:  # psutil wraps some errors of the system
        raise ConfigError(
            f"io_priority={wanted!r}: this system has no I/O priorities; leave the option out",
            cause=exc,
        ) from exc


def stand_back(nice: int, io_priority: str | int | None) -> None:
    """Lowers the priorities of this thread, and of all threads that it starts from now on.

    A priority that can't be had is no reason not to save: the log says so.
    """
    with contextlib.suppress(OSError):
        os.nice(nice)
    if io_priority is None:
        return
    try:
        if io_priority == "idle":
            _process().ionice(_CLASSES["idle"])
        else:
            _process().ionice(_CLASSES["best-effort"], io_priority)
    except Exception as exc:  # noqa: BLE001 - psutil has errors of its own
        logger.warning("the I/O priority stays as it is: %s", exc)


def _process() -> Any:
    import psutil

    return psutil.Process()
