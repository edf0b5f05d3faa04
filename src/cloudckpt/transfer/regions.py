"""Whether bytes leave their region, which is slow and billed by the gigabyte."""

from __future__ import annotations

import logging

from cloudckpt.config import MIB, Config
from cloudckpt.errors import ConfigError
from cloudckpt.stores.base import RangeReader

__all__ = ["check_regions"]

logger = logging.getLogger("cloudckpt")

_MUCH = 1024 * MIB
"""Bytes from which on it is worth a warning: clouds bill some cents for a GiB."""

_warned: set[str] = set()  # buckets


def check_regions(store: RangeReader, config: Config, nbytes: int) -> None:
    """Warns of a transfer between regions, once for each bucket, or refuses it.

    Args:
        store: Where to, or from.
        config: Options, of which ``cross_region`` says what is to be done.
        nbytes: How much this rank moves.

    Raises:
        ConfigError: If it is to be refused.
    """
    if config.cross_region == "allow" or not nbytes:
        return
    regions = store.regions()
    if regions is None or regions.machine == regions.bucket:
        return
    there, here = regions.bucket, regions.machine
    where = f"the bucket is in {there}, and this machine, by AWS_REGION, in {here}"
    if config.cross_region == "refuse":
        raise ConfigError(
            f"{where}: use a bucket in {here}, set AWS_REGION if it is wrong, or "
            "cross_region='allow'",
            uri=store.uri(""),
        )
    if nbytes > _MUCH and (uri := store.uri("")) not in _warned:
        _warned.add(uri)
        logger.warning(
            "%s: %s: what passes between regions is slow and billed; use a bucket in %s, set "
            "AWS_REGION if it is wrong, or cross_region='allow' to be told no more",
            uri,
            where,
            here,
        )
