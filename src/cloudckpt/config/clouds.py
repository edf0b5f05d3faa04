"""The options specific to each cloud."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from cloudckpt.config.options import Options, Pairs, check_endpoint, option, require

__all__ = ["AzureOptions", "GCSOptions", "S3Options"]

_ANONYMOUS = "send no credentials: for buckets that everybody may read"


@dataclass(frozen=True, kw_only=True)
class S3Options(Options):
    """Options specific to S3 and the stores that speak its protocol.

    boto3 finds the credentials, in ``profile`` if that is given; with ``anonymous``, none are sent.
    ``anonymous`` excludes ``profile`` and ``requester_pays``; ``kms_key_id`` needs an ``sse`` of
    ``aws:kms`` or ``aws:kms:dsse``.
    """

    variables: ClassVar[str] = "CLOUDCKPT_S3_"

    endpoint_url: str | None = option(
        None, "URL of an S3-compatible store; AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL work too"
    )
    region: str | None = option(
        None, "the bucket's; else AWS_REGION, AWS_DEFAULT_REGION, the profile's, in this order"
    )
    profile: str | None = option(None, "profile of the AWS configuration files")
    anonymous: bool = option(False, _ANONYMOUS)
    addressing_style: Literal["auto", "path", "virtual"] | None = option(
        None, "'auto', 'path' or 'virtual'; else the profile's addressing_style, else 'auto'"
    )
    dialect: Literal[
        "auto", "aws", "express", "r2", "coreweave", "minio", "huggingface", "other"
    ] = option(
        "auto",
        "the kind of store, see the table in docs/s3.md; 'auto' recognizes a store by its host, "
        "and takes one on a host of yours for 'other'",
    )  # fmt: skip
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = option(
        None, "server-side encryption: 'AES256', 'aws:kms', 'aws:kms:dsse'"
    )
    kms_key_id: str | None = option(None, "KMS key of the encryption")
    storage_class: str | None = option(None, "storage class of the objects, e.g. STANDARD_IA")
    tags: Pairs = option((), "object tags, e.g. team=nlp,run=7")
    requester_pays: bool = option(False, "accept the charges of a requester-pays bucket")

    def _check(self) -> None:
        check_endpoint(self.endpoint_url)
        require(
            not (self.anonymous and (self.profile or self.requester_pays)),
            "anonymous=True sends no credentials: leave it out to use profile or requester_pays",
        )
        with_kms = self.sse in ("aws:kms", "aws:kms:dsse")
        require(
            with_kms or not self.kms_key_id,
            "kms_key_id also needs sse='aws:kms' or sse='aws:kms:dsse'",
        )


@dataclass(frozen=True, kw_only=True)
class GCSOptions(Options):
    """Options specific to Google Cloud Storage.

    Credentials are Google's application default credentials (``GOOGLE_APPLICATION_CREDENTIALS``
    may name their file); with ``anonymous``, none are sent.
    """

    variables: ClassVar[str] = "CLOUDCKPT_GCS_"

    endpoint_url: str | None = option(
        None, "URL of the service or of an emulator; STORAGE_EMULATOR_HOST works too"
    )
    anonymous: bool = option(False, _ANONYMOUS)
    user_project: str | None = option(None, "project that pays for a requester-pays bucket")
    kms_key_name: str | None = option(
        None, "customer-managed key, projects/…/locations/…/keyRings/…/cryptoKeys/…"
    )
    storage_class: str | None = option(None, "storage class of the objects, e.g. NEARLINE")

    def _check(self) -> None:
        check_endpoint(self.endpoint_url)


@dataclass(frozen=True, kw_only=True)
class AzureOptions(Options):
    """Options specific to Azure Blob Storage.

    Secrets are not options: the connection string, account key or shared access signature is read
    from ``AZURE_STORAGE_*``, else azure-identity finds credentials; with ``anonymous``, none are
    sent.
    """

    variables: ClassVar[str] = "CLOUDCKPT_AZURE_"

    endpoint_url: str | None = option(
        None, "URL of the account's blobs; default: https://<account>.blob.core.windows.net"
    )
    anonymous: bool = option(False, _ANONYMOUS)
    access_tier: str | None = option(None, "access tier of the blobs, e.g. Cool")
    encryption_scope: str | None = option(None, "encryption scope of the blobs")
    tags: Pairs = option((), "blob index tags, e.g. team=nlp,run=7")

    def _check(self) -> None:
        check_endpoint(self.endpoint_url)
        tier = self.access_tier
        require(
            tier is None or re.fullmatch("(?i:(?!archive$)[a-z0-9]+)", tier) is not None,
            f"access_tier={tier!r}: write the name of a tier, e.g. 'Cool' or 'Cold'; blobs in "
            "'Archive' can't be loaded before they are rehydrated, which takes hours",
        )
