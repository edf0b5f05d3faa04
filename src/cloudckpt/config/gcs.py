"""The options of Google Cloud Storage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from cloudckpt.config.options import (
    Pairs,
    Switch,
    as_pairs,
    check_endpoint,
    check_switch,
    check_types,
    check_unique,
    option,
    parse_flag,
    parse_pairs,
    require,
)

__all__ = ["GCSOptions"]

# https://cloud.google.com/storage/quotas#objects: bytes of an object's custom metadata
_MOST_METADATA = 8 * 1024
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token of RFC 9110
_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")


@dataclass(frozen=True, kw_only=True)
class GCSOptions:
    """What is special to Google Cloud Storage.

    Credentials come from Google's application default chain unless ``anonymous`` or
    ``credentials_file`` is given.
    """

    endpoint_url: str | None = option(
        None,
        "CLOUDCKPT_GCS_ENDPOINT_URL",
        str,
        "endpoint of the service or of an emulator; STORAGE_EMULATOR_HOST works too",
    )
    credentials_file: str | None = option(
        None,
        "CLOUDCKPT_GCS_CREDENTIALS_FILE",
        str,
        "file of a service account or of workload identity; GOOGLE_APPLICATION_CREDENTIALS works "
        "too",
    )
    impersonate: str | None = option(
        None,
        "CLOUDCKPT_GCS_IMPERSONATE",
        str,
        "e-mail of a service account to act as, with the credentials found",
    )
    anonymous: bool = option(
        False,
        "CLOUDCKPT_GCS_ANONYMOUS",
        parse_flag,
        "send no credentials: for buckets that everybody may read",
    )
    user_project: str | None = option(
        None, "CLOUDCKPT_GCS_USER_PROJECT", str, "project that pays for a requester-pays bucket"
    )
    upload_strategy: Literal["multipart", "compose"] = option(
        "multipart",
        "CLOUDCKPT_GCS_UPLOAD_STRATEGY",
        str,
        "how large objects are sent: 'multipart', or 'compose' out of temporary objects, for "
        "emulators and where storage.multipartUploads.create is not granted",
    )
    checksum: Switch = option(
        "auto",
        "CLOUDCKPT_GCS_CHECKSUM",
        str,
        "send CRC32C for the store to verify; 'auto' is on for Google and off for custom endpoints",
    )
    kms_key_name: str | None = option(
        None,
        "CLOUDCKPT_GCS_KMS_KEY_NAME",
        str,
        "customer-managed key, projects/…/locations/…/keyRings/…/cryptoKeys/…",
    )
    storage_class: str | None = option(
        None, "CLOUDCKPT_GCS_STORAGE_CLASS", str, "storage class of the objects, e.g. NEARLINE"
    )
    custom_time: str | None = option(
        None,
        "CLOUDCKPT_GCS_CUSTOM_TIME",
        str,
        "Custom-Time of the objects, for lifecycle rules: RFC 3339, e.g. 2027-01-31T00:00:00Z",
    )
    metadata: Pairs = option(
        (), "CLOUDCKPT_GCS_METADATA", parse_pairs, "custom metadata of objects, e.g. team=nlp,run=7"
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_switch("checksum", self.checksum)
        require(
            not (self.anonymous and (self.credentials_file or self.impersonate)),
            "anonymous=True goes without credentials: leave out credentials_file and impersonate",
        )
        object.__setattr__(self, "metadata", as_pairs("metadata", self.metadata))
        _check_metadata(self.metadata)
        require(
            self.upload_strategy in ("multipart", "compose"),
            f"upload_strategy={self.upload_strategy!r}: write 'multipart' or 'compose'",
        )
        check_endpoint(self.endpoint_url)


def _check_metadata(metadata: Pairs) -> None:
    """Whether metadata comes out as it goes in: it travels in headers, which ignore case in names
    and white space around values.
    """
    for name, value in metadata:
        require(
            bool(_NAME.fullmatch(name)) and bool(_VALUE.fullmatch(value)),
            f"metadata: {name!r}={value!r} can't be sent in a header; write plain ASCII, without "
            "white space in names and around values",
        )
    check_unique("metadata", metadata, ignore_case=True)
    size = sum(len(name) + len(value) for name, value in metadata)
    require(size <= _MOST_METADATA, f"metadata: {size} bytes are given, 8 KiB is the most")
