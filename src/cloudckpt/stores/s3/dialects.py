"""The differences between stores with S3's API, as a table of the vendors' documented properties.

Where the documentation is silent, a dialect holds the safe value: a condition is tested before a
commit relies on it, a checksum is not expected to be verified. The user's options take precedence.
What a dialect says of conditions holds at its vendor's hosts only; elsewhere, whatever dialect the
user names, the server is unknown and conditions are tested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["AWS", "DIALECTS", "EXPRESS", "HUGGING_FACE", "S3Dialect", "dialect_of"]


@dataclass(frozen=True, kw_only=True)
class S3Dialect:
    """The properties of one kind of S3-compatible store.

    Attributes:
        title: The store's name in messages.
        hosts: The hosts of its endpoints, or their parent domains. Empty for stores on the user's
            own hosts, whose dialect the user must name, and for Amazon's hosts, which botocore
            knows.
        verifies_checksums: Whether the store verifies a CRC32C sent with an object or a part.
        whole_checksums: Whether it also verifies a CRC32C of the whole object at the completion of
            an upload. Otherwise the completion has the checksums of the parts.
        conditional_writes: Whether PutObject honours both If-None-Match and If-Match. If that is
            unknown (None), and at hosts other than the vendor's, it is tested before the first
            commit.
        create_only: Whether completions and copies honour If-None-Match too. Set only for stores
            that keep versions, where a repeated request would otherwise create another version.
        conditional_deletes: Whether DeleteObject honours If-Match. Otherwise the object's version
            is checked before it is deleted; where it is unknown (None), the condition is sent, too.
        copies_parts: Whether the store has UploadPartCopy; if not, an object above 5 GiB is copied
            by a download and an upload.
        equal_parts: Whether all parts of an upload but the last must have the same size.
        redirects: Whether it redirects GetObject to a signed URL of another host, and ignores the
            conditions of a read.
        sessions: Whether requests are signed with the keys of a session (CreateSession).
        any_prefix: Whether listings accept any prefix and are ordered by key. Otherwise prefixes
            must end in a slash.
        addressing_style: The addressing style that the vendor demands, unless the user sets
            another.
        unsupported_options: The options that the store rejects, or accepts and ignores.
    """

    title: str
    hosts: tuple[str, ...] = ()
    verifies_checksums: bool = False
    whole_checksums: bool = False
    conditional_writes: bool | None = None
    create_only: bool = False
    conditional_deletes: bool | None = None
    copies_parts: bool = True
    equal_parts: bool = False
    redirects: bool = False
    sessions: bool = False
    any_prefix: bool = True
    addressing_style: Literal["path", "virtual"] | None = None
    unsupported_options: frozenset[str] = frozenset()

    def is_at_vendor(self, host: str, *, is_amazon: bool) -> bool:
        """Returns whether a host belongs to the vendor, so that its documentation applies.

        `is_amazon` tells whether the host is one of Amazon's S3.
        """
        if self in (AWS, EXPRESS):
            return is_amazon
        return any(host == name or host.endswith(f".{name}") for name in self.hosts)


_ENCRYPTION = frozenset({"sse", "kms_key_id"})

AWS = S3Dialect(
    title="AWS S3",
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html
    verifies_checksums=True,
    whole_checksums=True,
    conditional_writes=True,
    create_only=True,
    conditional_deletes=True,
)

EXPRESS = S3Dialect(
    title="S3 Express One Zone",
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html
    verifies_checksums=True,
    conditional_writes=True,
    conditional_deletes=True,
    sessions=True,
    any_prefix=False,
    # encryption is set on the bucket and the session
    unsupported_options=_ENCRYPTION | {"tags", "storage_class", "requester_pays", "anonymous"},
)

HUGGING_FACE = S3Dialect(
    title="Hugging Face Storage Buckets",
    # https://huggingface.co/docs/hub/storage-buckets-s3
    hosts=("s3.hf.co",),
    conditional_writes=True,
    conditional_deletes=False,
    copies_parts=False,
    redirects=True,
    addressing_style="path",
    unsupported_options=_ENCRYPTION | {"tags", "storage_class", "requester_pays"},
)

DIALECTS: Mapping[str, S3Dialect] = {
    "aws": AWS,
    "express": EXPRESS,
    "r2": S3Dialect(
        title="Cloudflare R2",
        # https://developers.cloudflare.com/r2/api/s3/api/
        hosts=("r2.cloudflarestorage.com",),
        # documented is a composite CRC32C; whether it is verified is not
        conditional_writes=True,
        conditional_deletes=False,  # not in its list of conditional operations
        equal_parts=True,  # https://developers.cloudflare.com/r2/objects/multipart-objects/
    ),
    "coreweave": S3Dialect(
        title="CoreWeave AI Object Storage, LOTA",
        # https://docs.coreweave.com/products/storage/object-storage/buckets/conditional-requests
        hosts=("cwobject.com", "cwlota.com"),
        conditional_writes=True,
        create_only=True,
        addressing_style="virtual",
    ),
    "minio": S3Dialect(
        title="MinIO",
        # https://blog.min.io/leading-the-way-minios-conditional-write-feature-for-modern-data-workloads
        verifies_checksums=True,
        # PutObject's conditions were added by some version: they are tested
        conditional_deletes=False,
    ),
    "huggingface": HUGGING_FACE,
    "other": S3Dialect(title="any other"),
}
"""All dialects, by their name in ``S3Options(dialect=...)``."""

_DIRECTORY_BUCKET = re.compile(r".+--[a-z0-9-]+--x-s3")


def dialect_of(bucket: str, host: str, *, is_amazon: bool) -> S3Dialect:
    """Returns the dialect of a bucket, by the bucket's name and the endpoint's host.

    Directory buckets are recognized by their names, a pattern that AWS reserves for them.
    `is_amazon` tells whether the host is one of Amazon's S3.
    """
    if _DIRECTORY_BUCKET.fullmatch(bucket):
        return EXPRESS
    if is_amazon:
        return AWS
    known = (row for row in DIALECTS.values() if row.is_at_vendor(host, is_amazon=False))
    return next(known, DIALECTS["other"])
