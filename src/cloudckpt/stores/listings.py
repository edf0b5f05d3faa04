"""Clears the listings of object stores that fsspec has cached in this process."""

from __future__ import annotations

import logging
import sys
from typing import Any

__all__ = ["forget_listings"]

logger = logging.getLogger("cloudckpt")

_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "wasb", "wasbs"})


def forget_listings() -> None:
    """Clears the listings that fsspec's file systems for S3, Google and Azure have cached.

    Call it after a commit and after deletions, in every process that may list. s3fs and similar
    libraries cache a folder's listing indefinitely and notice only their own writes: a trainer that
    looks for old checkpoints through them would never see cloudckpt's, and would keep them all.

    fsspec is not imported for this. File systems created with ``skip_instance_cache`` keep their
    listings, as they are not registered anywhere. Failures are only logged.
    """
    base = getattr(sys.modules.get("fsspec.spec"), "AbstractFileSystem", None)
    waiting: list[Any] = [] if base is None else [base]
    while waiting:
        item = waiting.pop()
        try:
            if not isinstance(item, type):
                item.invalidate_cache()
                continue
            waiting += item.__subclasses__()
            protocol = getattr(item, "protocol", None) or ()
            names = {protocol} if isinstance(protocol, str) else set(protocol)
            waiting += vars(item).get("_cache", {}).values() if names & _PROTOCOLS else ()
        except Exception as error:  # noqa: BLE001 - another library must not make a save fail
            logger.warning(
                "fsspec's cached listings of %s may be out of date, as clearing them failed (%r): "
                "call its invalidate_cache() before you list",
                getattr(item, "__name__", type(item).__name__),
                error,
            )
