"""``s3://``: AWS S3 and the stores that speak its protocol.

boto3 finds credentials, region and endpoint, signs, and carries out the small control operations.
Parts and ranges travel through :mod:`cloudckpt.stores.http` as signed requests with an unsigned
payload; integrity rests on CRC32C (and TLS), so no byte is hashed for the signature.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

import urllib3

from cloudckpt.checksum import combine, to_base64
from cloudckpt.config import Config, S3Options
from cloudckpt.errors import (
    CloudCheckpointError,
    ConnectionLostError,
    CredentialsError,
    InvalidRequestError,
    MissingDependencyError,
    ObjectNotFoundError,
    PreconditionFailedError,
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
from cloudckpt.stores.http import HttpClient, HttpOptions, Reply
from cloudckpt.stores.s3_errors import from_answer, from_code

try:
    import boto3
    import botocore.exceptions
    import botocore.session
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest, AWSResponse
    from botocore.config import Config as BotoConfig
    from botocore.httpsession import get_cert_path
    from botocore.utils import get_environ_proxies
except ImportError as exc:
    raise MissingDependencyError(
        "s3:// needs boto3; install it with: pip install 'cloudckpt[s3]'", cause=exc
    ) from exc

__all__ = ["S3Store"]

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_MIN_PART = 5 * 1024**2
_MAX_PART = 5 * 1024**3
_MAX_PARTS = 10_000
_KEYS_PER_DELETE = 1000


class S3Store(ObjectStore):
    """One bucket of S3 or of a store with its API (MinIO, Ceph RGW, R2, moto)."""

    def __init__(self, bucket: str, config: Config) -> None:
        options = config.s3
        self.root = f"s3://{bucket}"
        self._bucket = bucket
        self._options = options
        with self._errors("", "connect"):
            core = botocore.session.Session(profile=options.profile)
            session = boto3.session.Session(botocore_session=core, region_name=options.region)
            self._client = session.client(
                "s3", endpoint_url=options.endpoint_url, config=_boto_config(config)
            )
            self._credentials = session.get_credentials()
            if self._credentials is None:
                raise CredentialsError(
                    "no AWS credentials were found: neither in the environment "
                    "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE), nor "
                    "in a profile of ~/.aws/config and ~/.aws/credentials (AWS_PROFILE), nor from "
                    "the container's or instance's role",
                    uri=self.root,
                )
            self._base = self._resolve()
        host = self._base.split("/")[2].partition(":")[0]
        aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        self._checksums = aws if options.checksum == "auto" else options.checksum == "on"
        self.capabilities = Capabilities(
            conditional_writes=True if aws else None,
            min_part_size=_MIN_PART,
            max_part_size=_MAX_PART,
            max_parts=_MAX_PARTS,
            max_put_size=_MAX_PART,
        )
        self._object_headers = _object_headers(options)
        self._request_headers = (
            {"x-amz-request-payer": "requester"} if options.requester_pays else {}
        )
        self._payer: dict[str, Any] = (
            {"RequestPayer": "requester"} if options.requester_pays else {}
        )
        self._http = HttpClient(
            _http_options(self._client, core.get_config_variable("ca_bundle"), config)
        )

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
            with contextlib.suppress(PreconditionFailedError):
                return self._put(key, size, headers, body, progress)
        raise PreconditionFailedError("the object is not in the expected state", uri=self.uri(key))

    def _put(
        self,
        key: str,
        size: int,
        headers: Mapping[str, str],
        body: Body,
        progress: Progress | None,
    ) -> ObjectInfo:
        with self._send("PUT", key, headers, body=body, progress=progress) as reply:
            return ObjectInfo(key, size, self._tag(reply, key))

    def _spellings(self, version: str | None) -> tuple[str | None, ...]:
        """How to write an ETag in If-Match: Ceph RGW 16 knows its own only without the quotes."""
        if version is None or self.capabilities.conditional_writes or '"' not in version:
            return (version,)
        return (version, version.strip('"'))

    def create_upload(self, key: str, part_size: int) -> Upload:
        parameters = _object_parameters(self._options)
        if self._checksums:
            parameters |= {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}
        with self._errors(key, "create a multipart upload of"):
            answer = self._client.create_multipart_upload(
                Bucket=self._bucket, Key=key, **parameters, **self._payer
            )
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
        with self._errors(upload.key, "complete the multipart upload of"):
            answer = self._client.complete_multipart_upload(
                Bucket=self._bucket,
                Key=upload.key,
                UploadId=upload.id,
                MultipartUpload={"Parts": listed},
                **total,
                **self._payer,
            )
        size = sum(part.size for part in parts)
        return ObjectInfo(upload.key, size, answer.get("ETag", ""))

    def abort_upload(self, upload: Upload) -> None:
        with (
            contextlib.suppress(ObjectNotFoundError),
            self._errors(upload.key, "abort the multipart upload of"),
        ):
            self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=upload.key, UploadId=upload.id, **self._payer
            )

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=prefix
        )
        with self._errors(prefix, "list the multipart uploads under"):
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
            reply.read_into(into, progress)
            return ObjectInfo(key, total, self._tag(reply, key))

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
        with self._errors(prefix, "list"):
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield ObjectInfo(entry["Key"], entry["Size"], entry["ETag"])

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(dict.fromkeys(keys))
        for start in range(0, len(wanted), _KEYS_PER_DELETE):
            batch = [{"Key": key} for key in wanted[start : start + _KEYS_PER_DELETE]]
            with self._errors(batch[0]["Key"], "delete"):
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

    def _resolve(self) -> str:
        """The URL of the bucket, ending in a slash, as botocore resolves it.

        botocore's rules (path or virtual style, access points, FIPS, dual stack, endpoints of other
        vendors) are left to botocore: the hook sees the request that it would send.
        """
        seen: list[str] = []

        def capture(request: Any, **_: Any) -> AWSResponse:
            seen.append(request.url)
            return AWSResponse(
                request.url, 200, {}, urllib3.HTTPResponse(io.BytesIO(), preload_content=False)
            )

        events = self._client.meta.events
        events.register("before-send.s3.HeadObject", capture)
        try:
            self._client.head_object(Bucket=self._bucket, Key="x")
        finally:
            events.unregister("before-send.s3.HeadObject", capture)
        return seen[0].partition("?")[0].removesuffix("x")

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
        url = self._base + quote(key, safe="/-._~")
        if query:
            url += "?" + urlencode(query, quote_via=quote)
        if not url.isascii():
            raise InvalidRequestError("the URL is not ASCII", uri=self.uri(key))
        try:
            signed = self._sign(method, url, {**headers, **self._request_headers})
            with self._http.send(method, url, signed, body, progress) as reply:
                if reply.status not in (200, 204, 206):
                    answer = reply.read() if method != "HEAD" else b""
                    raise from_answer(reply.status, reply.headers, answer, method, self.uri(key))
                yield reply
        except CloudCheckpointError as error:
            if error.uri is None:
                error.uri = self.uri(key)
            raise
        except botocore.exceptions.BotoCoreError as exc:
            self._raise(exc, key, method)

    def _sign(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        request = AWSRequest(method, url, headers=dict(headers))
        request.context["client_config"] = _UNSIGNED_PAYLOAD
        frozen = self._credentials.get_frozen_credentials()  # refreshes them when they are due
        S3SigV4Auth(frozen, "s3", self._client.meta.region_name or "us-east-1").add_auth(request)
        return dict(request.headers.items())

    def _checksum(self, crc32c: int) -> dict[str, str]:
        return {"x-amz-checksum-crc32c": to_base64(crc32c)} if self._checksums else {}

    def _tag(self, reply: Reply, key: str) -> str:
        tag = reply.headers.get("ETag")
        if not tag:
            raise ConnectionLostError("the answer has no ETag", uri=self.uri(key))
        return tag

    @contextlib.contextmanager
    def _errors(self, key: str, action: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as exc:
            self._raise(exc, key, action)

    def _raise(self, exc: Exception, key: str, action: str) -> NoReturn:
        uri = self.uri(key)
        if isinstance(exc, botocore.exceptions.ClientError):
            answer: Mapping[str, Any] = exc.response
            error, meta = answer.get("Error", {}), answer.get("ResponseMetadata", {})
            raise from_code(
                str(error.get("Code", "")),
                int(meta.get("HTTPStatusCode", 0)),
                str(error.get("Message", "")),
                action,
                uri,
                meta.get("HTTPHeaders", {}),
            ) from exc
        credentials = (
            botocore.exceptions.NoCredentialsError,
            botocore.exceptions.PartialCredentialsError,
            botocore.exceptions.CredentialRetrievalError,
            botocore.exceptions.ProfileNotFound,
            botocore.exceptions.TokenRetrievalError,
            botocore.exceptions.UnauthorizedSSOTokenError,
            botocore.exceptions.SSOTokenLoadError,
        )
        if isinstance(exc, credentials):
            raise CredentialsError(
                "the AWS credentials can't be used; check AWS_PROFILE, the AWS_* variables and "
                "~/.aws, or sign in again",
                uri=uri,
                cause=exc,
            ) from exc
        if isinstance(exc, botocore.exceptions.HTTPClientError):
            raise ConnectionLostError(
                f"could not {action} the object: no answer from the endpoint", uri=uri, cause=exc
            ) from exc
        raise InvalidRequestError(f"boto3 can't {action} the object", uri=uri, cause=exc) from exc


_UNSIGNED_PAYLOAD = BotoConfig(s3={"payload_signing_enabled": False})


def _boto_config(config: Config) -> BotoConfig:
    return BotoConfig(
        connect_timeout=config.connect_timeout,
        read_timeout=max(config.read_timeout, 120.0),  # completing a large upload takes its time
        max_pool_connections=config.connections,
        retries={"total_max_attempts": 1, "mode": "standard"},  # retries have one home: transfer
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version="s3v4",
        s3={
            "addressing_style": config.s3.addressing_style,
            "us_east_1_regional_endpoint": "regional",
        },
        user_agent_extra="cloudckpt",
    )


def _http_options(client: Any, ca_bundle: str | None, config: Config) -> HttpOptions:
    """Proxies and certificates as boto3 finds them."""
    meta = client.meta
    certificate = meta.config.client_cert
    proxies = meta.config.proxies or get_environ_proxies(meta.endpoint_url)
    ca_bundle = ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE")
    return HttpOptions(
        connections=config.connections,
        connect_timeout=config.connect_timeout,
        read_timeout=config.read_timeout,
        stall_timeout=config.stall_timeout,
        proxies=tuple(sorted((proxies or {}).items())),
        ca_bundle=ca_bundle or get_cert_path(True),
        client_cert=certificate if isinstance(certificate, str) else None,
    )


_HEADER_OF = {
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "BucketKeyEnabled": "x-amz-server-side-encryption-bucket-key-enabled",
    "StorageClass": "x-amz-storage-class",
    "ACL": "x-amz-acl",
    "Tagging": "x-amz-tagging",
}


def _object_parameters(options: S3Options) -> dict[str, Any]:
    """What every new object gets, as parameters of boto3."""
    wanted = {
        "ServerSideEncryption": options.sse,
        "SSEKMSKeyId": options.kms_key_id,
        "BucketKeyEnabled": options.bucket_key or None,
        "StorageClass": options.storage_class,
        "ACL": options.acl,
        "Tagging": urlencode(options.tags) or None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _object_headers(options: S3Options) -> dict[str, str]:
    """The same, as headers."""
    return {
        _HEADER_OF[name]: "true" if value is True else str(value)
        for name, value in _object_parameters(options).items()
    }


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
        raise InvalidRequestError(
            f"the object ends before the range does: bytes {extent} of {total} were offered "
            f"for {start}-{start + size - 1}",
            uri=uri,
        )
    return int(total)
