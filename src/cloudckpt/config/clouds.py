"""The options specific to each cloud."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from cloudckpt.config.options import Options, Pairs, check_endpoint, option, require

__all__ = ["AzureOptions", "GCSOptions", "S3Options"]

# https://learn.microsoft.com/rest/api/storageservices/set-blob-tags
_AZURE_TAGS = r"[A-Za-z0-9 +\-./:=_]"
_S3_TAGS = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]"
# https://cloud.google.com/storage/quotas#objects: bytes of an object's custom metadata
_MOST_METADATA = 8 * 1024 - 64  # the write's name takes some of them
# a token of RFC 9110, and a header value without outer white space, which would be cut off
_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_VALUE = r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?"

_ANONYMOUS = "send no credentials: for buckets that everybody may read"


@dataclass(frozen=True, kw_only=True)
class S3Options(Options):
    """Options specific to S3 and the stores that speak its protocol.

    Credentials come from boto3's own chain unless ``anonymous`` or ``profile`` is given.
    """

    variables: ClassVar[str] = "CLOUDCKPT_S3_"

    endpoint_url: str | None = option(
        None, "of an S3-compatible store; AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL work too"
    )
    region: str | None = option(
        None, "of the bucket; else AWS_REGION, AWS_DEFAULT_REGION, the profile's, in this order"
    )
    profile: str | None = option(None, "profile of the AWS configuration files")
    anonymous: bool = option(False, _ANONYMOUS)
    addressing_style: Literal["auto", "path", "virtual"] | None = option(
        None, "'auto', 'path' or 'virtual'; else the profile's addressing_style, else 'auto'"
    )
    dialect: Literal[
        "auto", "aws", "express", "r2", "coreweave", "minio", "ceph", "huggingface",
        "other",
    ] = option(
        "auto",
        "whose S3 it is, by its row in docs/s3.md; 'auto' knows those with hosts of their own, and "
        "takes a store on your own hosts for 'other'",
    )  # fmt: skip
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = option(
        None, "server-side encryption: 'AES256', 'aws:kms', 'aws:kms:dsse'"
    )
    kms_key_id: str | None = option(None, "key of 'aws:kms' encryption")
    storage_class: str | None = option(None, "storage class of the objects, e.g. STANDARD_IA")
    tags: Pairs = option((), "object tags, e.g. team=nlp,run=7")
    requester_pays: bool = option(False, "accept the charges of a requester-pays bucket")

    def _check(self) -> None:
        check_endpoint(self.endpoint_url)
        _check_tags(self.tags, _S3_TAGS)
        has_aws = any(name.lower().startswith("aws:") for name, _ in self.tags)
        require(
            not has_aws, "tags: names that begin with 'aws:' are reserved for AWS: choose others"
        )
        require(
            not (self.anonymous and (self.profile or self.requester_pays)),
            "anonymous=True sends no credentials: leave out the profile and requester_pays",
        )
        with_kms = self.sse in ("aws:kms", "aws:kms:dsse")
        require(with_kms or not self.kms_key_id, "kms_key_id also needs sse='aws:kms'")


@dataclass(frozen=True, kw_only=True)
class GCSOptions(Options):
    """Options specific to Google Cloud Storage.

    Credentials come from Google's application default chain (a file is named by
    ``GOOGLE_APPLICATION_CREDENTIALS``) unless ``anonymous`` is given.
    """

    variables: ClassVar[str] = "CLOUDCKPT_GCS_"

    endpoint_url: str | None = option(
        None, "of the service or of an emulator; STORAGE_EMULATOR_HOST works too"
    )
    anonymous: bool = option(False, _ANONYMOUS)
    user_project: str | None = option(None, "project that pays for a requester-pays bucket")
    kms_key_name: str | None = option(
        None, "customer-managed key, projects/…/locations/…/keyRings/…/cryptoKeys/…"
    )
    storage_class: str | None = option(None, "storage class of the objects, e.g. NEARLINE")
    metadata: Pairs = option((), "custom metadata of objects, e.g. team=nlp,run=7")

    def _check(self) -> None:
        check_endpoint(self.endpoint_url)
        # the metadata must be read back as written, but headers ignore case in names and outer
        # white space
        form = "write plain ASCII, without white space in names and around values"
        _check_pairs("metadata", self.metadata, _NAME, _VALUE, form, same=str.lower)
        size = sum(len(name) + len(value) for name, value in self.metadata)
        require(
            size <= _MOST_METADATA,
            f"metadata: {size} bytes are too many; the limit of Google is 8 KiB",
        )
        has_ours = any(name.lower().startswith("cloudckpt") for name, _ in self.metadata)
        require(
            not has_ours, "metadata: names that begin with 'cloudckpt' are reserved: choose others"
        )


@dataclass(frozen=True, kw_only=True)
class AzureOptions(Options):
    """Options specific to Azure Blob Storage.

    Secrets are not options: the connection string, account key or shared access signature is read
    from ``AZURE_STORAGE_*``, else azure-identity finds credentials, unless ``anonymous`` is given.
    """

    variables: ClassVar[str] = "CLOUDCKPT_AZURE_"

    endpoint_url: str | None = option(
        None, "of the account's blobs; default: https://<account>.blob.core.windows.net"
    )
    anonymous: bool = option(False, _ANONYMOUS)
    access_tier: str | None = option(None, "access tier of the blobs, e.g. Cool")
    encryption_scope: str | None = option(None, "encryption scope of the blobs")
    tags: Pairs = option((), "blob index tags, e.g. team=nlp,run=7")

    def _check(self) -> None:
        check_endpoint(self.endpoint_url)
        _check_tags(self.tags, _AZURE_TAGS)
        tier = self.access_tier
        require(
            tier is None or re.fullmatch("(?i:(?!archive$)[a-z0-9]+)", tier) is not None,
            f"access_tier={tier!r}: write the name of a tier, e.g. 'Cool' or 'Cold'; blobs in "
            "'Archive' can't be loaded before they are rehydrated, which takes hours",
        )


def _check_tags(tags: Pairs, allowed: str) -> None:
    """Raises ConfigError for invalid tags, which a store would refuse only after the data."""
    require(len(tags) <= 10, f"tags: {len(tags)} tags are too many; the limit is 10")
    form = (
        "write names of 1 to 128 and values of up to 256 characters, of those that the store allows"
    )
    _check_pairs("tags", tags, f"{allowed}{{1,128}}", f"{allowed}{{0,256}}", form)


def _check_pairs(
    option: str, pairs: Pairs, key: str, value: str, form: str, same: Callable[[str], str] = str
) -> None:
    """Checks names and values against patterns, and refuses repeated names, as stores do."""
    seen = set()
    for name, content in pairs:
        fits = re.fullmatch(key, name) and re.fullmatch(value, content)
        require(bool(fits), f"{option}: {name!r}={content!r}: {form}")
        require(same(name) not in seen, f"{option}: {name!r} is given twice; give it once")
        seen.add(same(name))
