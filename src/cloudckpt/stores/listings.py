"""Clears the listings that other libraries in this process have cached."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["forget_listings"]

logger = logging.getLogger("cloudckpt")

_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "wasb", "wasbs"})


def forget_listings() -> None:
    """Clears the cached listings of live fsspec file systems of the three clouds.

    Call it after a commit and after deletions, in every process that may list. s3fs and similar
    libraries cache a folder's listing indefinitely and notice only their own writes: a trainer that
    looks for old checkpoints through them would never see cloudckpt's, and would keep them all.

    fsspec is not imported for this. File systems created with ``skip_instance_cache`` are not
    registered anywhere, so their caches stay. Failures are only logged.
    """
    module = sys.modules.get("fsspec.spec")
    base = getattr(module, "AbstractFileSystem", None)
    if base is None:
        return
    try:
        live = list(_live(base))
    except Exception as error:  # noqa: BLE001 - another library's cache must not make a save fail
        logger.debug("fsspec's file systems can't be inspected for cached listings: %r", error)
        return
    for files in live:
        try:
            files.invalidate_cache()
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning(
                "fsspec's cached listings of %s could not be cleared, and may be out of date: call "
                "its invalidate_cache() before you list: %r",
                type(files).__name__,
                error,
            )


def _live(base: Any) -> Iterator[Any]:
    """Yields the cached instances of the clouds' file system classes and their subclasses."""
    for kind in base.__subclasses__():
        protocol: Any = getattr(kind, "protocol", ())
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        if names & _PROTOCOLS:
            yield from list(vars(kind).get("_cache", {}).values())
        yield from _live(kind)
