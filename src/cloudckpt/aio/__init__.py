"""Looking at checkpoints from an event loop.

The functions are those of :mod:`cloudckpt` that only read, with the same arguments, results and
errors, as coroutines; and :func:`watch`, for services that evaluate or serve what a training
writes. Requests travel by aiobotocore (``s3://``), by azure-storage-blob (``az://``), and in
threads else (``gs://``, disks). None of them keeps the caller's event loop from going on, and
nothing has to be closed: connections are, when nobody waits for an answer.
"""

from __future__ import annotations

from cloudckpt.aio.functions import exists, inspect, latest, list_checkpoints, load_file, verify
from cloudckpt.aio.watching import watch

__all__ = ["exists", "inspect", "latest", "list_checkpoints", "load_file", "verify", "watch"]
