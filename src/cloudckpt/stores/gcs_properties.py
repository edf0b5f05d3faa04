"""What the options say about new objects, as Google's two APIs take it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cloudckpt.config import GCSOptions
from cloudckpt.errors import ConfigError

__all__ = ["Properties"]

_CACHE_CONTROL = "no-store"
"""Google caches what everybody may read for an hour, unless the object forbids it; replacing or
deleting it does not change what is cached: https://cloud.google.com/storage/docs/caching"""

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token of RFC 9110
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True, kw_only=True)
class Properties:
    """What every new object gets, besides being kept from caches.

    Attributes:
        storage_class: If not the bucket's default.
        custom_time: RFC 3339.
        metadata: Names and values.
        kms_key: The customer-managed key, if not the bucket's default.
    """

    storage_class: str | None = None
    custom_time: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    kms_key: str | None = None

    @classmethod
    def of(cls, options: GCSOptions) -> Properties:
        """Those that the options ask for.

        Raises:
            ConfigError: If one can't travel in a header of the XML API.
        """
        found = cls(
            storage_class=options.storage_class,
            custom_time=options.custom_time,
            metadata=options.metadata,
            kms_key=options.kms_key_name,
        )
        for name, value in found.headers().items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ConfigError(f"{name}={value!r} can't be sent in a header; write plain ASCII")
        return found

    def of_parts(self) -> Properties:
        """Those of the parts that an object is composed of: their class must be that of the object.

        https://cloud.google.com/storage/docs/composite-objects
        """
        return Properties(storage_class=self.storage_class, kms_key=self.kms_key)

    def resource(self) -> dict[str, Any]:
        """As the JSON API takes them; the key is a parameter of the request."""
        wanted = {
            "cacheControl": _CACHE_CONTROL,
            "storageClass": self.storage_class,
            "customTime": self.custom_time,
            "metadata": dict(self.metadata) or None,
        }
        return {name: value for name, value in wanted.items() if value is not None}

    def headers(self) -> dict[str, str]:
        """As the XML API takes them."""
        wanted = {
            "Cache-Control": _CACHE_CONTROL,
            "x-goog-storage-class": self.storage_class,
            "x-goog-custom-time": self.custom_time,
            "x-goog-encryption-kms-key-name": self.kms_key,
            **{f"x-goog-meta-{name}": value for name, value in self.metadata},
        }
        return {name: value for name, value in wanted.items() if value is not None}
