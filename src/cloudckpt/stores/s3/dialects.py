"""What the stores with S3's API do differently: one row for each, from its vendor's documentation.

Whatever is not documented is marked as assumed, and then it is what can do no harm: a condition is
tried before a commit relies on it, a checksum is not expected to be verified, a copy streams. The
user's options win over a row. What a row says of conditions holds at its vendor's hosts; elsewhere
any server may be, whatever a user calls it, and conditions are tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["AWS", "DIALECTS", "EXPRESS", "HUGGING_FACE", "S3Dialect", "dialect_of"]

_MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class S3Dialect:
    """One row.

    Attributes:
        title: What users call the store.
        documentation: Where its vendor says so; empty for stores of which nothing is known.
        hosts: What the hosts of its endpoints are, or end in after a dot. Amazon's are known to
            botocore. None: it runs on hosts of the user's own, and must be named.
        verifies_checksums: Whether a CRC32C that is sent with an object or a part is compared.
        whole_checksums: Whether it also takes the CRC32C of an object that is made of parts. Else
            it gets those of the parts.
        conditional_writes: Whether PutObject honours both If-None-Match and If-Match; None, and at
            other hosts than the vendor's: it is tried before the first commit.
        create_only: Whether completions and copies honour If-None-Match, too. Only for stores that
            have versions, which a repeated request would else make one more of.
        conditional_deletes: Whether DeleteObject honours If-Match. Where that is not documented,
            the object is looked at before it is deleted; if it is None, the condition is sent, too.
        copies_parts: Whether it has UploadPartCopy; if not, objects above 5 GiB stream.
        equal_parts: Whether all parts of an upload but the last must have the same size.
        redirects: Whether it answers GetObject with a signed URL of another host, and ignores the
            conditions of a read.
        sessions: Whether requests are signed with the keys of a session (CreateSession).
        any_prefix: Whether listings take any prefix and are in the order of keys. Else prefixes end
            in a slash.
        good_part: Bytes that a part should have at least, as its vendor advises; 0: no matter.
        addressing_style: What the vendor demands, unless the user says otherwise.
        useless: Options that the store refuses, or accepts and ignores.
    """

    title: str
    documentation: str = ""
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
    good_part: int = 0
    addressing_style: Literal["path", "virtual"] | None = None
    useless: frozenset[str] = frozenset()

    def is_at_vendor(self, host: str, *, is_amazon: bool) -> bool:
        """Whether a host is one of the vendor's, which its documentation is about."""
        if self in (AWS, EXPRESS):
            return is_amazon
        return any(host == name or host.endswith(f".{name}") for name in self.hosts)


_AMAZON = "https://docs.aws.amazon.com/AmazonS3/latest/userguide/"
_ENCRYPTION = frozenset({"sse", "kms_key_id"})

AWS = S3Dialect(
    title="AWS S3",
    documentation=_AMAZON + "conditional-requests.html",
    verifies_checksums=True,
    whole_checksums=True,
    conditional_writes=True,
    create_only=True,
    conditional_deletes=True,
)

EXPRESS = S3Dialect(
    title="S3 Express One Zone",
    documentation=_AMAZON + "s3-express-differences.html",
    verifies_checksums=True,
    conditional_writes=True,
    conditional_deletes=True,
    sessions=True,
    any_prefix=False,
    # encryption is the bucket's and the session's
    useless=_ENCRYPTION | {"tags", "storage_class", "requester_pays", "anonymous"},
)

HUGGING_FACE = S3Dialect(
    title="Hugging Face Storage Buckets",
    documentation="https://huggingface.co/docs/hub/storage-buckets-s3",
    hosts=("s3.hf.co",),
    conditional_writes=True,
    conditional_deletes=False,
    copies_parts=False,
    redirects=True,
    # "as few multipart parts as possible": 2 GB is advised to clients that send one after the other
    good_part=128 * _MIB,
    addressing_style="path",
    useless=_ENCRYPTION | {"tags", "storage_class", "requester_pays"},
)

DIALECTS: Mapping[str, S3Dialect] = {
    "aws": AWS,
    "express": EXPRESS,
    "r2": S3Dialect(
        title="Cloudflare R2",
        documentation="https://developers.cloudflare.com/r2/api/s3/api/",
        hosts=("r2.cloudflarestorage.com",),
        # CRC32C is documented as that of parts; whether it is compared is not
        conditional_writes=True,
        conditional_deletes=False,  # its list of operations with conditions has none
        equal_parts=True,  # https://developers.cloudflare.com/r2/objects/multipart-objects/
    ),
    "coreweave": S3Dialect(
        title="CoreWeave AI Object Storage, LOTA",
        documentation="https://docs.coreweave.com/products/storage/object-storage/buckets/"
        "conditional-requests",
        hosts=("cwobject.com", "cwlota.com"),
        conditional_writes=True,
        create_only=True,
        addressing_style="virtual",
    ),
    "minio": S3Dialect(
        title="MinIO",
        documentation="https://blog.min.io/"
        "leading-the-way-minios-conditional-write-feature-for-modern-data-workloads",
        verifies_checksums=True,
        # conditions of PutObject came with a version: they are tried
        conditional_deletes=False,  # ignored: AIStor alone has them
    ),
    "ceph": S3Dialect(
        title="Ceph RGW",
        documentation="https://docs.ceph.com/en/latest/radosgw/s3/",
        # conditions of PutObject came, and went, with its versions; those of completions and
        # deletions are ignored: assumed
        conditional_deletes=False,
    ),
    "huggingface": HUGGING_FACE,
    "other": S3Dialect(title="any other"),
}
"""All rows, by what ``S3Options(dialect=...)`` calls them."""

_DIRECTORY_BUCKET = re.compile(r".+--[a-z0-9-]+--x-s3")


def dialect_of(bucket: str, host: str, *, is_amazon: bool) -> S3Dialect:
    """The row for a bucket, by its name and by the host of its endpoint.

    Directory buckets are known by their names, which AWS keeps for them.
    """
    if _DIRECTORY_BUCKET.fullmatch(bucket):
        return EXPRESS
    if is_amazon:
        return AWS
    known = (row for row in DIALECTS.values() if row.is_at_vendor(host, is_amazon=False))
    return next(known, DIALECTS["other"])
