"""Checkpoints of runs, read from an event loop.

The read-only functions of :mod:`cloudckpt` as coroutines, with the same arguments, results and
errors; and :func:`watch`, for services that evaluate or serve what a training job writes. Requests
use aiobotocore (``s3://``), azure-storage-blob (``az://``), and threads otherwise (``gs://``,
disks). None of them blocks the caller's event loop, and nothing has to be closed: connections are
closed when no call is waiting for an answer.
"""

from __future__ import annotations

from cloudckpt.aio.functions import exists, inspect, latest, list_checkpoints, load_file, verify
from cloudckpt.aio.watching import watch

__all__ = ["exists", "inspect", "latest", "list_checkpoints", "load_file", "verify", "watch"]
