"""Checkpoints of runs, read from an event loop.

The read-only functions of :mod:`cloudckpt` as coroutines, with the same arguments, results and
errors; and :func:`watch`, for services that evaluate or serve what a training job writes. Threads
do the work: the caller's event loop only waits. Nothing has to be closed.
"""

from __future__ import annotations

from cloudckpt.aio.functions import (
    exists,
    inspect,
    latest,
    list_checkpoints,
    load_file,
    verify,
    watch,
)

__all__ = ["exists", "inspect", "latest", "list_checkpoints", "load_file", "verify", "watch"]
