"""``s3://``: AWS S3 and the stores that speak its protocol.

boto3 finds credentials, region and endpoint, signs, and carries out the small control operations.
Parts and ranges travel through :mod:`cloudckpt.stores.http` as signed requests with an unsigned
payload; integrity rests on CRC32C (and TLS), so no byte is hashed for the signature.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from cloudckpt.checksum import combine, to_base64
from cloudckpt.config import Config
from cloudckpt.errors import (
    CloudCheckpointError,
    ConnectionLostError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    ServerError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import (
    Body,
    Capabilities,
    ObjectInfo,
    ObjectStore,
    Part,
    Progress,
    Upload,
    nbytes,
)
from cloudckpt.stores.http import HttpClient, Reply
from cloudckpt.stores.s3_access import (
    BucketAccess,
    object_headers,
    object_parameters,
    translated,
)
from cloudckpt.stores.s3_errors import from_answer, from_code

__all__ = ["S3Store"]

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_MIN_PART = 5 * 1024**2
_MAX_PART = 5 * 1024**3
_MAX_PARTS = 10_000
_KEYS_PER_DELETE = 1000


class S3Store(ObjectStore):
    """One bucket of S3 or of a store with its API (MinIO, Ceph RGW, R2, moto)."""

    def __init__(self, bucket: str, config: Config) -> None:
        self.root = f"s3://{bucket}"
        self._bucket = bucket
        self._access = BucketAccess(bucket, config, self.root)
        self._client = self._access.client
        self._http = HttpClient(self._access.http_options)
        options, aws = config.s3, self._access.is_aws
        self._checksums = aws if options.checksum == "auto" else options.checksum == "on"
        self.capabilities = Capabilities(
            conditional_writes=True if aws else None,
            min_part_size=_MIN_PART,
            max_part_size=_MAX_PART,
            max_parts=_MAX_PARTS,
            max_put_size=_MAX_PART,
        )
        self._knows_quotes = aws  # in If-Match; others have to show it
        self._object_headers = object_headers(options)
        self._object_parameters = object_parameters(options)
        pays = options.requester_pays
        self._payer: dict[str, Any] = {"RequestPayer": "requester"} if pays else {}
        self._payer_headers = {"x-amz-request-payer": "requester"} if pays else {}

    def put(
        self,
        key: str,
        body: Body,
        *,
        crc32c: int,
        if_absent: bool = False,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        size = nbytes(body)
        headers = {"Content-Length": str(size), **self._object_headers, **self._checksum(crc32c)}
        if if_absent:
            headers["If-None-Match"] = "*"
        for tag in self._spellings(if_version):
            if tag is not None:
                headers["If-Match"] = tag
            try:
                info = self._put(key, size, headers, body, progress)
            except PreconditionFailedError as error:
                refused = error
            else:
                self._knows_quotes = self._knows_quotes or tag == if_version is not None
                return info
        raise refused

    def _put(
        self,
        key: str,
        size: int,
        headers: Mapping[str, str],
        body: Body,
        progress: Progress | None,
    ) -> ObjectInfo:
        try:
            with self._send("PUT", key, headers, body=body, progress=progress) as reply:
                return ObjectInfo(key, size, self._tag(reply, key))
        except ObjectNotFoundError as error:
            if "If-Match" not in headers:
                raise
            raise PreconditionFailedError(
                "the object that was to be replaced is gone", uri=self.uri(key), cause=error
            ) from error

    def _spellings(self, version: str | None) -> list[str | None]:
        """How to write an ETag in If-Match: Ceph RGW 16 knows its own only without the quotes."""
        if version is None or self._knows_quotes or '"' not in version:
            return [version]
        return [version, version.strip('"')]

    def create_upload(self, key: str, part_size: int) -> Upload:
        parameters = dict(self._object_parameters)
        if self._checksums:
            parameters |= {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}
        with translated("create a multipart upload of", self.uri(key)):
            answer = self._client.create_multipart_upload(
                Bucket=self._bucket, Key=key, **parameters, **self._payer
            )
        if not answer.get("UploadId"):
            raise ServerError("the answer names no upload", uri=self.uri(key))
        return Upload(key, answer["UploadId"], part_size)

    def put_part(
        self,
        upload: Upload,
        number: int,
        body: Body,
        *,
        crc32c: int,
        progress: Progress | None = None,
    ) -> Part:
        size = nbytes(body)
        headers = {"Content-Length": str(size), **self._checksum(crc32c)}
        query = {"partNumber": str(number), "uploadId": upload.id}
        with self._send("PUT", upload.key, headers, query, body, progress) as reply:
            return Part(number, size, self._tag(reply, upload.key), crc32c)

    def complete_upload(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        total: dict[str, Any] = {}
        listed: list[dict[str, Any]] = [
            {"PartNumber": part.number, "ETag": part.tag} for part in parts
        ]
        if self._checksums:
            for entry, part in zip(listed, parts, strict=True):
                entry["ChecksumCRC32C"] = to_base64(part.crc32c)
            whole = combine((part.crc32c, part.size) for part in parts)
            total = {"ChecksumCRC32C": to_base64(whole), "ChecksumType": "FULL_OBJECT"}
        with translated("complete the multipart upload of", self.uri(upload.key)):
            answer = self._client.complete_multipart_upload(
                Bucket=self._bucket,
                Key=upload.key,
                UploadId=upload.id,
                MultipartUpload={"Parts": listed},
                **total,
                **self._payer,
            )
        size = sum(part.size for part in parts)
        if not answer.get("ETag"):  # 200 is sent before the work is done: look into the body
            raise ServerError("the completion has no result", uri=self.uri(upload.key))
        return ObjectInfo(upload.key, size, answer["ETag"])

    def abort_upload(self, upload: Upload) -> None:
        with (
            contextlib.suppress(ObjectNotFoundError),
            translated("abort the multipart upload of", self.uri(upload.key)),
        ):
            self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=upload.key, UploadId=upload.id, **self._payer
            )

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=prefix, **self._payer
        )
        with translated("list the multipart uploads under", self.uri(prefix)):
            for page in pages:
                for entry in page.get("Uploads", ()):
                    yield Upload(entry["Key"], entry["UploadId"], 0)

    def get(self, key: str) -> tuple[bytearray, ObjectInfo]:
        with self._send("GET", key, {}) as reply:
            if reply.length is None:
                raise ConnectionLostError("the answer has no length", uri=self.uri(key))
            data = bytearray(reply.length)
            reply.read_into([memoryview(data)])
            return data, ObjectInfo(key, len(data), self._tag(reply, key))

    def get_range(
        self,
        key: str,
        start: int,
        into: Sequence[memoryview],
        *,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        size = nbytes(into)
        headers = {"Range": f"bytes={start}-{start + size - 1}"}
        if if_version:
            headers["If-Match"] = if_version
        with self._send("GET", key, headers) as reply:
            total = _check_range(reply, start, size, self.uri(key))
            version = self._tag(reply, key)
            try:
                reply.read_into(into, progress)
            except ConnectionLostError as error:
                error.version = version
                raise
            return ObjectInfo(key, total, version)

    def head(self, key: str) -> ObjectInfo:
        try:
            with self._send("HEAD", key, {}) as reply:
                return ObjectInfo(key, reply.length or 0, self._tag(reply, key))
        except TransientStoreError:
            raise
        except StoreError:
            # the answer to HEAD has no body: ask again in a way that tells the reason
            return self.get_range(key, 0, [memoryview(bytearray(1))])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix, **self._payer
        )
        with translated("list", self.uri(prefix)):
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield ObjectInfo(entry["Key"], entry["Size"], entry["ETag"])

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(dict.fromkeys(keys))
        for start in range(0, len(wanted), _KEYS_PER_DELETE):
            batch = [{"Key": key} for key in wanted[start : start + _KEYS_PER_DELETE]]
            with translated("delete", self.uri(batch[0]["Key"])):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True}, **self._payer
                )
            for failed in answer.get("Errors", ()):
                raise from_code(
                    failed.get("Code", ""), 0, failed.get("Message", ""), "delete",
                    self.uri(failed.get("Key", "")),
                )  # fmt: skip

    def close(self) -> None:
        self._http.close()
        self._client.close()

    def interrupt(self, threads: Collection[int]) -> None:
        self._http.interrupt(threads)

    @contextlib.contextmanager
    def _send(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None = None,
        body: Body = (),
        progress: Progress | None = None,
    ) -> Iterator[Reply]:
        """One signed request; an answer that is no success is raised as its error."""
        if not {".", ".."}.isdisjoint(key.split("/")):
            raise InvalidRequestError("'.' and '..' can't be part of a key", uri=self.uri(key))
        url = self._access.base + quote(key, safe="/-._~")
        if query:
            url += "?" + urlencode(query, quote_via=quote)
        try:
            signed = self._access.sign(method, url, {**headers, **self._payer_headers})
            with self._http.send(method, url, signed, body, progress) as reply:
                if reply.status not in (200, 204, 206):
                    answer = reply.read() if method != "HEAD" else b""
                    raise from_answer(reply.status, reply.headers, answer, method, self.uri(key))
                yield reply
        except CloudCheckpointError as error:
            if error.uri is None:
                error.uri = self.uri(key)
            raise

    def _checksum(self, crc32c: int) -> dict[str, str]:
        return {"x-amz-checksum-crc32c": to_base64(crc32c)} if self._checksums else {}

    def _tag(self, reply: Reply, key: str) -> str:
        tag = reply.headers.get("ETag")
        if not tag:
            raise ConnectionLostError("the answer has no ETag", uri=self.uri(key))
        return tag


def _check_range(reply: Reply, start: int, size: int, uri: str) -> int:
    """Whether the answer is the range that was asked for; returns the object's size."""
    if reply.status == 200:  # a store that ignores Range
        if start != 0 or reply.length != size:
            raise InvalidRequestError("the store ignored the Range header", uri=uri)
        return size
    unit, _, span = reply.headers.get("Content-Range", "").partition(" ")
    extent, _, total = span.partition("/")
    if unit != "bytes" or not total.isdigit():
        raise ConnectionLostError(f"the answer has no usable Content-Range: {span!r}", uri=uri)
    if extent != f"{start}-{start + size - 1}":
        raise RangeNotSatisfiableError(
            f"the object ends before the range does: bytes {extent} of {total} were offered "
            f"for {start}-{start + size - 1}",
            uri=uri,
        )
    return int(total)
