"""The options of each cloud."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from cloudckpt.config.options import Options, Pairs, Switch, check_endpoint, option, require

__all__ = ["AzureOptions", "GCSOptions", "S3Options"]

_MOST_TAGS = 10  # per object on S3 and Azure; then the most characters of a tag's name and value
_LONGEST_TAG = (128, 256)
# https://learn.microsoft.com/rest/api/storageservices/set-blob-tags
_AZURE_TAGS = r"[A-Za-z0-9 +\-./:=_]"
_S3_TAGS = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]"

# https://cloud.google.com/storage/quotas#objects: bytes of an object's custom metadata
_MOST_METADATA = 8 * 1024
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token of RFC 9110
_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")


@dataclass(frozen=True, kw_only=True)
class S3Options(Options):
    """Options specific to S3 and the stores that speak its protocol.

    Credentials come from boto3's own chain unless ``anonymous`` or ``profile`` is given; the region
    is ``region``, else ``AWS_REGION``, ``AWS_DEFAULT_REGION``, or that of the profile.
    """

    variables: ClassVar[str] = "CLOUDCKPT_S3_"

    endpoint_url: str | None = option(
        None,
        "endpoint of an S3-compatible store; AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL work too",
    )
    region: str | None = option(
        None,
        "region of the bucket; else that of AWS_REGION, AWS_DEFAULT_REGION, the profile, in this "
        "order",
    )
    profile: str | None = option(None, "profile of the AWS configuration files")
    anonymous: bool = option(False, "send no credentials: for buckets that everybody may read")
    addressing_style: Literal["auto", "path", "virtual"] | None = option(
        None, "'auto', 'path' or 'virtual'; else the profile's addressing_style, else 'auto'"
    )
    payload_signing: Literal["auto", "on"] = option(
        "auto",
        "sign the SHA-256 of every body, for policies that deny UNSIGNED-PAYLOAD (about 0.7 CPU "
        "s/GiB); 'auto' does as the profile's payload_signing_enabled says, else signs all but "
        "PUTs of more than 1 MiB",
    )
    checksum: Switch = option(
        "auto",
        "send CRC32C for the store to verify; 'auto' is on for AWS and off for custom endpoints",
    )
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = option(
        None, "server-side encryption: 'AES256', 'aws:kms', 'aws:kms:dsse'"
    )
    kms_key_id: str | None = option(None, "key of 'aws:kms' encryption")
    storage_class: str | None = option(None, "storage class of the objects, e.g. STANDARD_IA")
    acl: str | None = option(None, "canned ACL, e.g. bucket-owner-full-control")
    tags: Pairs = option((), "object tags, e.g. team=nlp,run=7")
    requester_pays: bool = option(False, "accept the charges of a requester-pays bucket")

    def _check(self) -> None:
        check_endpoint(self.endpoint_url)
        _check_tags(self.tags, _S3_TAGS)
        require(
            not any(name.lower().startswith("aws:") for name, _ in self.tags),
            "tags: names that begin with 'aws:' are kept for AWS itself",
        )
        require(
            not (self.anonymous and (self.profile or self.requester_pays)),
            "anonymous=True goes without a profile, and nobody pays for it: leave out profile and "
            "requester_pays",
        )
        require(
            not self.kms_key_id or self.sse in ("aws:kms", "aws:kms:dsse"),
            "kms_key_id needs sse='aws:kms'",
        )


@dataclass(frozen=True, kw_only=True)
class GCSOptions(Options):
    """Options specific to Google Cloud Storage.

    Credentials come from Google's application default chain (a file is named by
    ``GOOGLE_APPLICATION_CREDENTIALS``) unless ``anonymous`` is given.
    """

    variables: ClassVar[str] = "CLOUDCKPT_GCS_"

    endpoint_url: str | None = option(
        None, "endpoint of the service or of an emulator; STORAGE_EMULATOR_HOST works too"
    )
    impersonate: str | None = option(
        None, "e-mail of a service account to act as, with the credentials found"
    )
    anonymous: bool = option(False, "send no credentials: for buckets that everybody may read")
    user_project: str | None = option(None, "project that pays for a requester-pays bucket")
    checksum: Switch = option(
        "auto",
        "send CRC32C for the store to verify; 'auto' is on for Google and off for custom endpoints",
    )
    kms_key_name: str | None = option(
        None, "customer-managed key, projects/…/locations/…/keyRings/…/cryptoKeys/…"
    )
    storage_class: str | None = option(None, "storage class of the objects, e.g. NEARLINE")
    metadata: Pairs = option((), "custom metadata of objects, e.g. team=nlp,run=7")

    def _check(self) -> None:
        check_endpoint(self.endpoint_url)
        require(
            not (self.anonymous and self.impersonate),
            "anonymous=True goes without credentials: leave out impersonate",
        )
        # metadata must be read back as written, but travels in headers, which ignore case in names
        # and white space around values
        for name, value in self.metadata:
            require(
                bool(_NAME.fullmatch(name)) and bool(_VALUE.fullmatch(value)),
                f"metadata: {name!r}={value!r} can't be sent in a header; write plain ASCII, "
                "without white space in names and around values",
            )
        _check_unique("metadata", self.metadata, ignore_case=True)
        size = sum(len(name) + len(value) for name, value in self.metadata)
        require(size <= _MOST_METADATA, f"metadata: {size} bytes are given, 8 KiB is the most")


@dataclass(frozen=True, kw_only=True)
class AzureOptions(Options):
    """Options specific to Azure Blob Storage.

    Secrets are not options: the connection string, account key or shared access signature is read
    from ``AZURE_STORAGE_*``, else azure-identity finds credentials, unless ``anonymous`` is given.
    """

    variables: ClassVar[str] = "CLOUDCKPT_AZURE_"

    endpoint_url: str | None = option(
        None, "blob endpoint of the account; default: https://<account>.blob.core.windows.net"
    )
    account: str | None = option(
        None, "storage account of az://container URIs; AZURE_STORAGE_ACCOUNT works too"
    )
    anonymous: bool = option(False, "send no credentials: for containers that everybody may read")
    checksum: Switch = option(
        "auto",
        "send CRC64 for the store to verify; 'auto' is on for Azure and off for custom endpoints",
    )
    access_tier: str | None = option(None, "access tier of the blobs, e.g. Cool")
    encryption_scope: str | None = option(None, "encryption scope of the blobs")
    tags: Pairs = option((), "blob index tags, e.g. team=nlp,run=7")

    def _check(self) -> None:
        check_endpoint(self.endpoint_url)
        _check_tags(self.tags, _AZURE_TAGS)
        tier = self.access_tier
        require(
            tier is None or re.fullmatch("[A-Za-z0-9]+", tier) is not None,
            f"access_tier={tier!r}: write the name of a tier, e.g. 'Cool' or 'Cold'",
        )
        require(
            tier is None or tier.lower() != "archive",
            f"access_tier={tier!r}: what is in the archive tier can't be loaded before it is "
            "rehydrated, which takes hours; write 'Cold', and archive old checkpoints by a "
            "lifecycle rule",
        )


def _check_tags(tags: Pairs, allowed: str) -> None:
    """Checks that the store accepts these tags; it would refuse them only after the data was sent.

    Args:
        tags: Names and values.
        allowed: The pattern of an allowed character.

    Raises:
        ConfigError: If it does not.
    """
    require(len(tags) <= _MOST_TAGS, f"tags: {len(tags)} tags are given, {_MOST_TAGS} is the most")
    longest_name, longest_value = _LONGEST_TAG
    for name, value in tags:
        require(
            1 <= len(name) <= longest_name and len(value) <= longest_value,
            f"tags: {name!r}={value!r}: a name has 1 to {longest_name} characters, a value at most "
            f"{longest_value}",
        )
        require(
            re.fullmatch(f"{allowed}*", name + value) is not None,
            f"tags: {name!r}={value!r} holds a character that the store does not take",
        )
    _check_unique("tags", tags)


def _check_unique(option: str, pairs: Pairs, *, ignore_case: bool = False) -> None:
    """Checks that no name is given twice: a store refuses that, or keeps one of the values."""
    seen: set[str] = set()
    for name, _ in pairs:
        folded = name.lower() if ignore_case else name
        require(folded not in seen, f"{option}: give {name!r} once, not twice")
        seen.add(folded)
