"""``s3://``: AWS S3 and the stores that speak its protocol.

boto3 finds credentials, region and endpoint, and signs. All requests travel through
:mod:`cloudckpt.stores.http`, large ones with an unsigned payload; integrity rests on CRC32C (and
TLS), so the bytes of tensors are not hashed for the signature.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cloudckpt.checksum import to_base64
from cloudckpt.config import Config
from cloudckpt.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ServerError,
    StoreError,
    WrongRegionError,
)
from cloudckpt.stores.base import (
    Body,
    Capabilities,
    ObjectInfo,
    Part,
    Progress,
    Upload,
    nbytes,
)
from cloudckpt.stores.deletions import Failures, delete_all
from cloudckpt.stores.http import HttpClient, Reply
from cloudckpt.stores.rest import Pages, RestStore, encode_key, encode_query
from cloudckpt.stores.s3_access import (
    PAYLOAD_DIGEST,
    UNSIGNED_PAYLOAD,
    BucketAccess,
    object_headers,
)
from cloudckpt.stores.s3_errors import from_answer, from_code
from cloudckpt.stores.xml_answers import key_text, text, unqualified
from cloudckpt.stores.xml_multipart import Dialect, XmlMultipart

__all__ = ["S3Store"]

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_MIN_PART = 5 * 1024**2
_MAX_PART = 5 * 1024**3
_MAX_PARTS = 10_000
_KEYS_PER_DELETE = 1000
_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})

_MD5 = re.compile(r"[0-9a-f]{32}")
_MULTIPART = re.compile(r'"?[0-9a-f]{32}-[0-9]+"?')


class S3Store(RestStore):
    """One bucket of S3 or of a store with its API (MinIO, Ceph RGW, R2, moto)."""

    def __init__(self, bucket: str, config: Config) -> None:
        root = f"s3://{bucket}"
        self._access = BucketAccess(bucket, config, root)
        super().__init__(root, HttpClient(self._access.http_options), self._access.credentials)
        options, aws = config.s3, self._access.is_aws
        if aws and options.storage_class in _ARCHIVES:
            raise ConfigError(
                f"storage_class={options.storage_class!r}: what is in it can't be loaded before it "
                "is restored, which takes hours; write 'GLACIER_IR', and archive old checkpoints "
                "by a lifecycle rule",
                uri=root,
            )
        self._checksums = aws if options.checksum == "auto" else options.checksum == "on"
        self.capabilities = Capabilities(
            conditional_writes=True if aws else None,
            min_part_size=_MIN_PART,
            max_part_size=_MAX_PART,
            max_parts=_MAX_PARTS,
            max_put_size=_MAX_PART,
            verifies=self._checksums,
            create_only=aws,
        )
        self._knows_quotes = aws  # in If-Match; others have to show it
        self._object_headers = object_headers(options)
        self._payer = {"x-amz-request-payer": "requester"} if options.requester_pays else {}
        self._multipart = XmlMultipart(self, self._access.bucket_url, self._dialect())

    def _dialect(self) -> Dialect:
        if not self._checksums:
            return Dialect(creation=self._object_headers)
        kind = {"x-amz-checksum-type": "FULL_OBJECT"}
        return Dialect(
            creation={"x-amz-checksum-algorithm": "CRC32C", **kind, **self._object_headers},
            part=self._checksum,
            completion=lambda crc32c: {**self._checksum(crc32c), **kind},
            part_checksum="ChecksumCRC32C",
        )

    def put(
        self,
        key: str,
        body: Body,
        *,
        checksum: int,
        if_absent: bool = False,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        headers = {**self._object_headers, **self._checksum(checksum)}
        if if_absent:
            headers["If-None-Match"] = "*"
        certain = True
        for tag in self._spellings(if_version):
            if tag is not None:
                headers["If-Match"] = tag
            try:
                info = self._put(key, headers, body, progress)
            except StoreError as error:
                error.certain = certain = certain and error.certain
                if not isinstance(error, PreconditionFailedError):
                    raise
                refused = error
            else:
                self._knows_quotes = self._knows_quotes or tag == if_version is not None
                return info
        raise refused

    def _put(
        self, key: str, headers: Mapping[str, str], body: Body, progress: Progress | None
    ) -> ObjectInfo:
        try:
            with self.exchange(
                "PUT", self.object_url(key), headers, body, progress, key=key
            ) as reply:
                made = self._made(reply, key, nbytes(body))
        except ObjectNotFoundError as error:
            if "If-Match" not in headers:
                raise
            raise PreconditionFailedError(
                "the object that was to be replaced is gone",
                uri=self.uri(key),
                cause=error,
                certain=error.certain,
            ) from error
        return made or self._looked_up(key, nbytes(body))

    def _spellings(self, version: str | None) -> list[str | None]:
        """How to write an ETag in If-Match: Ceph RGW 16 knows its own only without the quotes."""
        if version is None or self._knows_quotes or '"' not in version:
            return [version]
        return [version, version.strip('"')]

    def create_upload(self, key: str, part_size: int) -> Upload:
        return self._multipart.create(key, part_size)

    def put_part(
        self,
        upload: Upload,
        number: int,
        body: Body,
        *,
        checksum: int,
        progress: Progress | None = None,
    ) -> Part:
        return self._multipart.put_part(upload, number, body, checksum, progress)

    def complete_upload(
        self, upload: Upload, parts: Sequence[Part], *, if_absent: bool = False
    ) -> ObjectInfo:
        condition = {"If-None-Match": "*"} if if_absent else {}
        tag = self._multipart.complete(upload, parts, condition).tag
        size = sum(part.size for part in parts)
        if tag:
            return ObjectInfo(upload.key, size, tag)
        made = self._looked_up(upload.key, size)  # Ceph RGW 16 does not name it at first
        if not _may_be_of(made.version, parts):
            raise ServerError("the completion has no result", uri=self.uri(upload.key))
        return made

    def abort_upload(self, upload: Upload) -> None:
        self._multipart.abort(upload)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        return self._multipart.open_uploads(prefix)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        query = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
        pages = Pages(self.uri(prefix))
        while True:
            url = f"{self._access.bucket_url}?{encode_query(query)}"
            with self.exchange("GET", url, {}, key=prefix) as reply:
                page = unqualified(reply.read_all(), self.uri(prefix))
            for entry in page.iterfind("Contents"):
                key = key_text(page, entry, "Key")
                yield ObjectInfo(key, int(text(entry, "Size")), text(entry, "ETag"))
            if text(page, "IsTruncated") != "true":
                return
            query["continuation-token"] = text(page, "NextContinuationToken")
            pages.next(query["continuation-token"])

    def delete(self, keys: Iterable[str]) -> None:
        delete_all(keys, _KEYS_PER_DELETE, self._delete)

    def _delete(self, keys: Sequence[str]) -> Failures:
        root = ElementTree.Element("Delete")
        ElementTree.SubElement(root, "Quiet").text = "true"
        for key in keys:
            ElementTree.SubElement(ElementTree.SubElement(root, "Object"), "Key").text = key
        body = ElementTree.tostring(root, "utf-8", xml_declaration=True)
        digest = hashlib.md5(body, usedforsecurity=False).digest()  # every vendor knows this one
        headers = {
            "Content-MD5": base64.b64encode(digest).decode("ascii"),
            "Content-Type": "application/xml",
        }
        url = f"{self._access.bucket_url}?delete"
        uri = self.uri(keys[0])
        with self.exchange("POST", url, headers, [memoryview(body)], key=keys[0]) as reply:
            answer = reply.read_all()
            root = unqualified(answer, uri)
            if root.tag == "Error":
                raise self.failure(reply.status, reply.headers, answer, "delete", uri)
        failures: Failures = []
        for failed in root.iterfind("Error"):
            key = failed.findtext("Key") or ""
            code, message = text(failed, "Code"), text(failed, "Message")
            error = from_code(code, 0, message, "delete", self.uri(key))
            # what is named in another way than it was asked for may be any of them
            failures += [(name, error) for name in ([key] if key in keys else keys)]
        return failures

    @contextlib.contextmanager
    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body = (),
        progress: Progress | None = None,
        *,
        key: str,
        is_long: bool = False,
    ) -> Iterator[Reply]:
        """The same; a request to the wrong region is sent once more, to the one that S3 names."""
        digest, used = self._access.payload_digest(method, body), self._access.region
        attempt = functools.partial(
            super().exchange, method, url, {**headers, PAYLOAD_DIGEST: digest}, body, progress,
            key=key, is_long=is_long,
        )  # fmt: skip
        was_certain = True  # of the first try
        try:
            with contextlib.ExitStack() as stack:
                reply = None
                try:
                    reply = stack.enter_context(attempt())
                except WrongRegionError as refused:
                    if refused.region is None or not self._access.follow(refused.region, used):
                        raise
                    was_certain = refused.certain
                if reply is None:
                    reply = stack.enter_context(attempt())
                yield reply
        except StoreError as error:
            error.certain = error.certain and was_certain
            if isinstance(error, AccessDeniedError) and digest == UNSIGNED_PAYLOAD:
                error.message += (
                    "; if a policy denies unsigned payloads (s3:x-amz-content-sha256), set "
                    "S3Options(payload_signing='on') or CLOUDCKPT_S3_PAYLOAD_SIGNING=on"
                )
            raise

    def object_url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        url = self._access.base + encode_key(key)
        return f"{url}?{encode_query(query)}" if query else url

    def failure(
        self, status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
    ) -> StoreError:
        return from_answer(status, headers, body, action, uri)

    def _authorized(
        self, method: str, url: str, headers: Mapping[str, str]
    ) -> tuple[str, Mapping[str, str]]:
        url = self._access.address(url)
        return url, self._access.sign(method, url, {**headers, **self._payer})

    def _if_version(self, version: str) -> Mapping[str, str]:
        return {"If-Match": version}

    def _checksum(self, crc32c: int) -> dict[str, str]:
        return {"x-amz-checksum-crc32c": to_base64(crc32c)} if self._checksums else {}


def _may_be_of(tag: str, parts: Sequence[Part]) -> bool:
    """Whether an ETag can be that of an object made of these parts.

    S3 makes it of the MD5 of each part and their number. Of other forms, as where the store
    encrypts, nothing can be said.
    """
    tags = [part.tag.strip('"') for part in parts]
    if not _MULTIPART.fullmatch(tag) or not all(map(_MD5.fullmatch, tags)):
        return True
    whole = hashlib.md5(b"".join(map(bytes.fromhex, tags)), usedforsecurity=False).hexdigest()
    return tag.strip('"') == f"{whole}-{len(parts)}"
