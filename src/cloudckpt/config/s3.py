"""The options of S3 and the stores that speak its protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cloudckpt.config.options import (
    Pairs,
    Switch,
    as_pairs,
    check_endpoint,
    check_switch,
    check_tags,
    check_types,
    option,
    parse_flag,
    parse_pairs,
    require,
)

__all__ = ["S3Options"]


@dataclass(frozen=True, kw_only=True)
class S3Options:
    """What is special to S3 and the stores that speak its protocol.

    Credentials come from boto3's own chain unless ``anonymous`` or ``profile`` is given; the region
    is that of ``region``, else of ``AWS_REGION``, ``AWS_DEFAULT_REGION``, or the profile.
    """

    endpoint_url: str | None = option(
        None,
        "CLOUDCKPT_S3_ENDPOINT_URL",
        str,
        "endpoint of an S3-compatible store; AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL work too",
    )
    region: str | None = option(
        None,
        "CLOUDCKPT_S3_REGION",
        str,
        "region of the bucket; else that of AWS_REGION, AWS_DEFAULT_REGION, the profile, in this "
        "order",
    )
    profile: str | None = option(
        None, "CLOUDCKPT_S3_PROFILE", str, "profile of the AWS configuration files"
    )
    anonymous: bool = option(
        False,
        "CLOUDCKPT_S3_ANONYMOUS",
        parse_flag,
        "send no credentials: for buckets that everybody may read",
    )
    addressing_style: Literal["auto", "path", "virtual"] | None = option(
        None,
        "CLOUDCKPT_S3_ADDRESSING_STYLE",
        str,
        "'auto', 'path' or 'virtual'; else the profile's addressing_style, else 'auto'",
    )
    payload_signing: Switch = option(
        "auto",
        "CLOUDCKPT_S3_PAYLOAD_SIGNING",
        str,
        "sign the SHA-256 of every body, for policies that deny UNSIGNED-PAYLOAD (about 0.7 CPU "
        "s/GiB); 'auto' does as the profile's payload_signing_enabled says, else signs all but "
        "PUTs of more than 1 MiB; 'off' signs none",
    )
    checksum: Switch = option(
        "auto",
        "CLOUDCKPT_S3_CHECKSUM",
        str,
        "send CRC32C for the store to verify; 'auto' is on for AWS and off for custom endpoints",
    )
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = option(
        None, "CLOUDCKPT_S3_SSE", str, "server-side encryption: 'AES256', 'aws:kms', 'aws:kms:dsse'"
    )
    kms_key_id: str | None = option(
        None, "CLOUDCKPT_S3_KMS_KEY_ID", str, "key of 'aws:kms' encryption"
    )
    bucket_key: bool = option(
        False, "CLOUDCKPT_S3_BUCKET_KEY", parse_flag, "use an S3 bucket key with 'aws:kms'"
    )
    storage_class: str | None = option(
        None, "CLOUDCKPT_S3_STORAGE_CLASS", str, "storage class of the objects, e.g. STANDARD_IA"
    )
    acl: str | None = option(
        None, "CLOUDCKPT_S3_ACL", str, "canned ACL, e.g. bucket-owner-full-control"
    )
    tags: Pairs = option((), "CLOUDCKPT_S3_TAGS", parse_pairs, "object tags, e.g. team=nlp,run=7")
    requester_pays: bool = option(
        False,
        "CLOUDCKPT_S3_REQUESTER_PAYS",
        parse_flag,
        "accept the charges of a requester-pays bucket",
    )

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "tags", as_pairs("tags", self.tags))
        check_tags(self.tags)
        require(
            not any(name.lower().startswith("aws:") for name, _ in self.tags),
            "tags: names that begin with 'aws:' are kept for AWS itself",
        )
        require(
            self.addressing_style in (None, "auto", "path", "virtual"),
            f"addressing_style={self.addressing_style!r}: write 'auto', 'path' or 'virtual'",
        )
        check_switch("checksum", self.checksum)
        check_switch("payload_signing", self.payload_signing)
        require(
            not (self.anonymous and (self.profile or self.requester_pays)),
            "anonymous=True goes without a profile, and nobody pays for it: leave out profile and "
            "requester_pays",
        )
        require(
            self.sse in (None, "AES256", "aws:kms", "aws:kms:dsse"),
            f"sse={self.sse!r}: write 'AES256', 'aws:kms' or 'aws:kms:dsse'",
        )
        require(
            not (self.kms_key_id or self.bucket_key) or self.sse in ("aws:kms", "aws:kms:dsse"),
            "kms_key_id and bucket_key need sse='aws:kms'",
        )
        check_endpoint(self.endpoint_url)
