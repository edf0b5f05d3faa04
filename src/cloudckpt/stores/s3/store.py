"""``s3://``: AWS S3 and stores with its protocol.

boto3 finds credentials, region and endpoint, and signs. Requests for objects are sent by
:mod:`cloudckpt.stores.http.client`. Integrity rests on CRC32C and TLS, so uploads above 1 MiB are
not hashed for the signature unless the profile demands it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote, unquote_plus
from xml.etree.ElementTree import Element

from cloudckpt.checksum import from_base64, to_base64
from cloudckpt.config import Config
from cloudckpt.errors import (
    AccessDeniedError,
    ConfigError,
    InvalidRequestError,
    StoreError,
    WrongRegionError,
)
from cloudckpt.stores.base import (
    CopySource,
    ObjectInfo,
    ObjectStore,
    Part,
    Retry,
    Upload,
    once,
)
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.stores.http.client import Reply, whole_number
from cloudckpt.stores.rest import UNRESERVED, Marks, Page, Signed, encode_query, iso_date
from cloudckpt.stores.s3.access import BucketAccess, object_headers
from cloudckpt.stores.s3.dialects import AWS
from cloudckpt.stores.s3.errors import from_answer
from cloudckpt.stores.s3.redirects import redirected_read
from cloudckpt.stores.xml_api import XmlStore, required, result_of, text, unqualified
from cloudckpt.uri import CheckpointURI

__all__ = ["HUGGING_FACE_ENDPOINT", "S3Store", "open_hugging_face"]

HUGGING_FACE_ENDPOINT = "https://s3.hf.co"  # https://huggingface.co/docs/hub/storage-buckets-s3

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_MIN_PART = 5 * 1024**2
_MAX_PART = 5 * 1024**3
_MAX_PARTS = 10_000
_NOT_IMPLEMENTED = 501
_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})


class S3Store(XmlStore):
    """A bucket of S3 or of a store with its API, see :mod:`cloudckpt.stores.s3.dialects`."""

    access: BucketAccess
    metadata_prefix = "x-amz-meta-"
    public_secrets = 1  # an access key's id is public, and may be a word such as a bucket's name

    def __init__(self, bucket: str, config: Config, root: str | None = None) -> None:
        """Opens a bucket; `root` is its URI for messages, by default ``s3://bucket``.

        Raises:
            InvalidURIError: If the bucket can't have this name.
            ConfigError: If the options or variables are invalid for this store.
            StoreError: If there are no usable credentials.
        """
        root = root or f"s3://{bucket}"
        CheckpointURI.parse(root)
        self.access = BucketAccess(bucket, config, root)
        super().__init__(root, self.access)
        self.bucket_url = self.access.bucket_url
        options, dialect = config.s3, self.access.dialect
        if dialect is AWS and options.storage_class in _ARCHIVES:
            raise ConfigError(
                f"storage_class={options.storage_class!r}: its objects can't be loaded before "
                "they are restored, which takes hours; write 'GLACIER_IR', and archive old "
                "checkpoints by a lifecycle rule",
                uri=root,
            )
        self._dialect = dialect
        # at other hosts, support of conditions is not documented
        known = self.access.is_at_vendor or None
        self._checksums = (
            dialect.verifies_checksums if config.checksum == "auto" else config.checksum == "on"
        )
        self.capabilities = Capabilities(
            conditional_writes=dialect.conditional_writes and known,
            conditional_deletes=bool(dialect.conditional_deletes) and self.access.is_at_vendor,
            min_part_size=_MIN_PART,
            max_part_size=_MAX_PART,
            max_parts=_MAX_PARTS,
            max_put_size=_MAX_PART,
            verifies=self._checksums,
            create_only=dialect.create_only and self.access.is_at_vendor,
            max_copy_size=_MAX_PART,
            copies_parts=dialect.copies_parts,
            equal_parts=dialect.equal_parts,
        )
        self._object_headers = object_headers(options)
        self.creation_headers = self._object_headers
        self._of_whole: Mapping[str, str] = {}
        self.copy_headers = {
            "x-amz-metadata-directive": "REPLACE",
            "x-amz-tagging-directive": "REPLACE",
            **self._object_headers,
        }
        if self._checksums:  # of the whole object; where the store lacks that, of the parts
            named = {"x-amz-checksum-algorithm": "CRC32C"}
            kind = "FULL_OBJECT" if dialect.whole_checksums else "COMPOSITE"
            of_kind = {"x-amz-checksum-type": kind}
            self._of_whole = of_kind if dialect.whole_checksums else {}
            self.creation_headers = {**named, **of_kind, **self._object_headers}
            self.copy_headers = {**named, **self.copy_headers}
            self.part_checksum = "ChecksumCRC32C"

    def part_headers(self, crc32c: int) -> Mapping[str, str]:
        # Object Lock demands the algorithm's name, or an MD5
        if not self._checksums:
            return {}
        return {
            "x-amz-sdk-checksum-algorithm": "CRC32C",
            "x-amz-checksum-crc32c": to_base64(crc32c),
        }

    def completion_headers(self, crc32c: int) -> Mapping[str, str]:
        # the request holds the checksums of the parts: a composite one would add nothing
        if not self._of_whole:
            return {}
        return {"x-amz-checksum-crc32c": to_base64(crc32c), **self._of_whole}

    def new_object_headers(self, checksum: int) -> dict[str, str]:
        return {**self._object_headers, **self.part_headers(checksum)}

    def complete_upload(
        self, upload: Upload, parts: Sequence[Part], *, if_version: str | None = None
    ) -> ObjectInfo:
        try:
            tag, _ = self._completed(upload, parts, self.write_headers("", if_version))
        except InvalidRequestError as error:
            if if_version is not None and error.status == _NOT_IMPLEMENTED:
                error.message = (
                    "the store can't complete an upload on the condition that no other writer was "
                    "faster: if only one job at a time writes to this location, set "
                    "Config(conditional_writes='off') or CLOUDCKPT_CONDITIONAL_WRITES=off"
                )
            raise
        self._sends_versions = True  # with each part; a first completion of Ceph's may lack it
        size = sum(part.size for part in parts)
        return ObjectInfo(upload.key, size, self.tag_of(tag, upload.key))

    def checksum_of(self, info: ObjectInfo) -> int:
        if self._checksums:
            wanted = {"x-amz-checksum-mode": "ENABLED", "If-Match": info.version}
            url = self.object_url(info.key)
            # a refused HEAD does not say why, and whether other credentials help: the reads do
            with (
                contextlib.suppress(AccessDeniedError, InvalidRequestError),
                self.exchange("HEAD", url, wanted, key=info.key) as reply,
            ):
                found = reply.headers.get("x-amz-checksum-crc32c")
                if found and reply.headers.get("x-amz-checksum-type") == "FULL_OBJECT":
                    return from_base64(found)
        return super().checksum_of(info)

    def copies_from(self, source: ObjectStore) -> bool:
        return isinstance(source, S3Store) and self.access.shares_realm(source.access)

    def copy_part(
        self, source: CopySource, upload: Upload, number: int, start: int, stop: int
    ) -> Part:
        is_whole = (start, stop) == (0, source.info.size)  # S3 cuts no source of less than 5 MB
        headers = {} if is_whole else {"x-amz-copy-source-range": f"bytes={start}-{stop - 1}"}
        url = self.object_url(upload.key, {"uploadId": upload.id, "partNumber": str(number)})
        tag, crc = self._copied(source, upload.key, url, headers)
        return Part(number, stop - start, self.tag_of(tag, upload.key), crc)

    def _copied(
        self, source: CopySource, key: str, url: str, headers: Mapping[str, str]
    ) -> tuple[str, int | None]:
        assert isinstance(source.store, S3Store)
        bucket = source.store.access.bucket  # or the ARN of an access point
        between = "/object/" if bucket.startswith("arn:") else "/"
        wanted = {
            **headers,
            "x-amz-copy-source": quote(bucket + between + source.info.key, safe=UNRESERVED),
            "x-amz-copy-source-if-match": source.info.version,
        }
        with (
            self._naming_source(source),
            self.exchange("PUT", url, wanted, key=key, is_long=True) as reply,
        ):
            made = result_of(self, reply, "PUT", self.uri(key))
            return text(made, "ETag"), _crc32c(made)

    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:
        uploads = super().list_uploads(self._listable(prefix), retry)
        return (upload for upload in uploads if upload.key.startswith(prefix))

    def _listable(self, prefix: str) -> str:
        """Returns the prefix to request: cut after its last slash if the store demands that."""
        return prefix if self._dialect.any_prefix else prefix[: prefix.rfind("/") + 1]

    def _pages(self, prefix: str, delimiter: str, retry: Retry) -> Iterator[Page]:
        if self._dialect.any_prefix:
            return super()._pages(prefix, delimiter, retry)
        whole = [*super()._pages(self._listable(prefix), delimiter, retry)]
        # unordered, with repeated folders
        found = (info for objects, _ in whole for info in objects if info.key.startswith(prefix))
        folders = {folder for _, folders in whole for folder in folders}
        return iter([(sorted(found, key=lambda info: info.key), sorted(folders))])

    def _page(self, prefix: str, delimiter: str, marks: Marks) -> tuple[Page, Marks | None]:
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        if delimiter:
            query["delimiter"] = delimiter
        if marks:
            query["continuation-token"] = marks[0]
        url = f"{self.bucket_url}?{encode_query(query)}"
        with self.exchange("GET", url, {}, key=prefix) as reply:
            page = unqualified(reply.read_all(), "ListBucketResult")
            decode = unquote_plus if text(page, "EncodingType") == "url" else str
            objects, folders = list[ObjectInfo](), list[str]()
            for entry in page.iterfind("Contents"):
                key, size = decode(required(entry, "Key")), whole_number(text(entry, "Size"))
                modified = iso_date(text(entry, "LastModified"))
                objects.append(ObjectInfo(key, size, text(entry, "ETag"), modified=modified))
            for entry in page.iterfind("CommonPrefixes"):
                folders.append(decode(required(entry, "Prefix")))
            token = text(page, "NextContinuationToken")
            follows = token or text(page, "IsTruncated") == "true"
            return (objects, folders), (token,) if follows else None

    def _delete(self, key: str, if_version: str | None) -> None:
        is_known_ignored = self._dialect.conditional_deletes is False
        condition = {"If-Match": if_version} if if_version and not is_known_ignored else {}
        self._removed(key, self.object_url(key), condition)

    def _read(
        self, key: str, if_version: str | None, headers: Mapping[str, str]
    ) -> contextlib.AbstractContextManager[Reply]:
        if not self._dialect.redirects:
            return super()._read(key, if_version, headers)
        if if_version:
            headers = {**headers, "If-Match": if_version}
        return redirected_read(self, self._http, self._head, key, if_version, headers)

    def recover(self, refused: StoreError, signed: Signed | None) -> bool:
        """Implements `recover` of the base class; switches to the region that a refusal names."""
        if not isinstance(refused, WrongRegionError):
            return super().recover(refused, signed)
        if signed is None or refused.region is None:
            return False
        return self.access.follow(refused.region, signed.url, signed.headers)

    def object_url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        url = self.access.base + quote(key, safe=UNRESERVED)
        return f"{url}?{encode_query(query)}" if query else url

    def failure(
        self, status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
    ) -> StoreError:
        return from_answer(status, headers, body, action, uri)


def open_hugging_face(uri: CheckpointURI, config: Config) -> S3Store:
    """Opens the Storage Bucket ``hf://buckets/namespace/name`` through its S3 gateway.

    Endpoint and region are always the gateway's: the options and variables may be for another store
    in the same job.
    """
    _, namespace, name = uri.bucket.split("/")
    there = replace(
        config.s3,
        endpoint_url=f"{HUGGING_FACE_ENDPOINT}/{namespace}",
        region="us-east-1",
        addressing_style="path",
        dialect="huggingface",
    )
    return S3Store(name, replace(config, s3=there), uri.root)


def _crc32c(made: Element) -> int | None:
    """Returns the CRC32C of a whole object in an XML result; None if it has no such CRC32C."""
    checksum = text(made, "ChecksumCRC32C")
    is_of_whole = "-" not in checksum and text(made, "ChecksumType") in ("", "FULL_OBJECT")
    return from_base64(checksum) if checksum and is_of_whole else None
