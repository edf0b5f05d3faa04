"""``gs://``: Google Cloud Storage.

google-auth finds credentials and renews tokens. Objects are written, read, listed and deleted
through the JSON API, which emulators also speak; only multipart uploads, which it lacks, go through
the XML API. A version is an object's generation. Every body is sent with its CRC32C, and that of an
object made of parts is compared with the parts'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote

from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.config import Config
from cloudckpt.errors import (
    ConnectionLostError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ServerError,
    StoreError,
)
from cloudckpt.stores.base import (
    MOST_READ,
    Body,
    ObjectInfo,
    ObjectStore,
    Part,
    Progress,
    Retry,
    Upload,
    once,
    whole_checksum,
)
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.stores.gcs.access import BucketAccess
from cloudckpt.stores.gcs.errors import from_answer
from cloudckpt.stores.gcs.json_api import (
    JsonObjects,
    carried_out,
    creation_headers,
    generation,
    parse_crc32c,
)
from cloudckpt.stores.http.bodies import Reply
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.http.messages import encode_key, encode_query
from cloudckpt.stores.origins import Route
from cloudckpt.stores.rest import RestStore
from cloudckpt.stores.xml_api import Dialect, XmlMultipart

__all__ = ["GCSStore"]

# https://cloud.google.com/storage/quotas#objects
_MIN_PART = 5 * 1024**2
_MAX_PART = 5 * 1024**3
_MAX_PARTS = 10_000
_MAX_OBJECT = 5 * 1024**4

_WITHOUT_MULTIPART = (
    "; if this store, like many emulators, has no multipart uploads of the XML API, send objects "
    "whole: Config(part_size=5 * 1024**3, memory_budget=…), six times the largest object"
)
_NOT_IMPLEMENTED = 501

# how servers refuse a request that they do not have, which some take for a bucket and a key
_UNKNOWN_PATH = frozenset({404, 405, 501})
_COMPRESSIONS = frozenset({"br", "compress", "deflate", "gzip", "x-compress", "x-gzip", "zstd"})


class GCSStore(RestStore):
    """One bucket of Google Cloud Storage, or of an emulator."""

    metadata_prefix = "x-goog-meta-"

    def __init__(self, bucket: str, config: Config) -> None:
        root = f"gs://{bucket}"
        options = config.gcs
        creation = {"Content-Type": "application/octet-stream", **creation_headers(options)}
        self._access = BucketAccess(config, root)
        super().__init__(root, HttpClient(self._access.http_options), self._access.credentials)
        endpoint, is_google = self._access.endpoint, self._access.is_google
        checksums = is_google if options.checksum == "auto" else options.checksum == "on"
        self._objects = JsonObjects(self, endpoint, bucket, options, checksums=checksums)
        self._bucket_url = f"{endpoint}/{quote(bucket, safe='')}"  # of the XML API
        dialect = Dialect(creation=creation)
        if checksums:
            dialect = replace(dialect, part=lambda crc: {"x-goog-hash": f"crc32c={to_base64(crc)}"})
        self._multipart = XmlMultipart(self, self._bucket_url, dialect)
        self._may_be_cached = False  # whether data of the bucket may come from a cache
        self.capabilities = Capabilities(
            conditional_writes=is_google or None,
            conditional_deletes=is_google or None,
            create_only=is_google,
            min_part_size=_MIN_PART,
            max_part_size=_MAX_PART,
            max_parts=_MAX_PARTS,
            max_put_size=_MAX_PART,
            verifies=checksums,
            max_copy_size=_MAX_OBJECT,
        )

    def put(
        self,
        key: str,
        body: Body,
        *,
        checksum: int,
        attempt: str = "",
        if_absent: bool = False,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        wanted = "0" if if_absent else None if if_version is None else generation(if_version)
        return self._objects.insert(
            key, body, crc32c=checksum, attempt=attempt, if_generation=wanted, progress=progress
        )

    def create_upload(self, key: str, part_size: int) -> Upload:
        try:
            return self._multipart.create(key, part_size)
        except (InvalidRequestError, ObjectNotFoundError, ServerError) as error:
            is_unknown = isinstance(error, InvalidRequestError) or error.status in _UNKNOWN_PATH
            if is_unknown and not self._access.is_google:
                error.message += _WITHOUT_MULTIPART
            raise

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
        size = sum(part.size for part in parts)
        whole = whole_checksum(parts, CRC32C)
        # without a condition: multipart uploads know none, but each can be completed only once
        done = self._multipart.complete(upload, parts, {})
        fields = {name.lower(): value for name, value in done.headers.items()}
        version = fields.get("x-goog-generation")
        crc32c = parse_crc32c(fields.get("x-goog-hash", ""))
        if version is None or crc32c is None:  # the hash is not told of what KMS encrypts
            with carried_out():
                made = self._objects.stat(upload.key)
        else:
            made = ObjectInfo(upload.key, size, version, crc32c)
        return self._objects.checked(made, size, whole)

    def copies_from(self, source: ObjectStore) -> bool:
        return isinstance(source, GCSStore) and self._access.shares_realm(source._access)

    def copy(
        self,
        source: ObjectStore,
        found: ObjectInfo,
        key: str,
        *,
        attempt: str = "",
        if_absent: bool = False,
    ) -> ObjectInfo:
        assert isinstance(source, GCSStore)
        with self._copying(source, found):
            return self._objects.copy(
                source._objects, found, key, attempt=attempt, if_absent=if_absent
            )

    def abort_upload(self, upload: Upload) -> None:
        self._multipart.abort(upload)

    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:
        try:
            yield from self._multipart.open_uploads(prefix, retry)
        except InvalidRequestError as error:
            if error.status != _NOT_IMPLEMENTED:  # a store without such uploads has none open
                raise

    def get_latest(self, key: str, *, limit: int = MOST_READ) -> tuple[bytearray, ObjectInfo]:
        # metadata never come from a cache, and caches know data by the whole URL: also by the
        # generation that it is to have
        info = self.head(key)
        self.check_size(key, info.size, limit)
        data = bytearray(info.size)
        if data:
            try:
                self.get_range(key, 0, [memoryview(data)], if_version=info.version)
            except PreconditionFailedError as error:
                raise _replaced(self.uri(key)) from error
        return data, info

    def get_range(
        self,
        key: str,
        start: int,
        into: Sequence[memoryview],
        *,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        info = super().get_range(key, start, into, if_version=if_version, progress=progress)
        if if_version is None and self._may_be_cached:
            found = self.head(key)
            if found != info:
                raise _replaced(self.uri(key), found.version)
            info = found
        if if_version is not None and info.version != if_version:
            raise PreconditionFailedError("the object was replaced", uri=self.uri(key))
        return info

    def head(self, key: str) -> ObjectInfo:
        return self._objects.stat(key)

    def look(self, key: str) -> ObjectInfo:
        return self.head(key) if self._may_be_cached else super().look(key)

    def list(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo]:
        for objects, _ in self._objects.pages(prefix, retry):
            yield from objects

    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        for objects, folders in self._objects.pages(prefix, retry, delimiter="/"):
            yield from objects
            yield from (folder.removeprefix(prefix).rstrip("/") for folder in folders)

    def _delete(self, key: str, if_version: str | None) -> None:
        self._objects.delete(key, None if if_version is None else generation(if_version))

    def route(self) -> Route:
        return Route(
            url=self._bucket_url,
            endpoint_from=self._access.endpoint_from,
            http=self._access.http_options,
        )

    def object_url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        url = f"{self._bucket_url}/{encode_key(key)}"
        return f"{url}?{encode_query(query)}" if query else url

    @contextlib.contextmanager
    def _read(
        self, key: str, if_version: str | None, headers: Mapping[str, str]
    ) -> Iterator[Reply]:
        """As of all stores; content that is stored compressed is refused.

        Unless a request accepts gzip, Google decompresses such content while it is read, ignores
        ranges and leaves its size open (https://cloud.google.com/storage/docs/transcoding). It is
        not what its size and checksum say.
        """
        url = self._objects.content_url(key, generation(if_version) if if_version else None)
        asked = {**headers, "Accept-Encoding": "gzip"}
        with self.exchange("GET", url, asked, key=key) as reply:
            _check_encoding(reply, self.uri(key))
            yield reply

    def failure(
        self, status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
    ) -> StoreError:
        is_google = self._access.is_google
        return from_answer(status, headers, body, action, uri, is_google=is_google)

    def _authorized(
        self, method: str, url: str, headers: Mapping[str, str]
    ) -> tuple[str, Mapping[str, str]]:
        return url, {**headers, **self._access.headers(method, url)}

    def _version(self, reply: Reply, key: str) -> str:
        # what everybody may read and somebody else has written, without forbidding it to be cached
        if "public" in reply.headers.get("Cache-Control", ""):
            self._may_be_cached = True
        if version := reply.headers.get("x-goog-generation"):
            return version
        raise ConnectionLostError("the answer has no generation", uri=self.uri(key))


def _replaced(uri: str, version: str | None = None) -> ConnectionLostError:
    """``version``: the one to read instead."""
    return ConnectionLostError(
        "the object was replaced while it was read: it is read anew", version=version, uri=uri
    )


def _check_encoding(reply: Reply, uri: str) -> None:
    fields = {name.lower(): value for name, value in reply.headers.items()}
    for name in ("content-encoding", "x-goog-stored-content-encoding"):
        codings = {coding.strip().lower() for coding in fields.get(name, "").split(",")}
        if found := codings & _COMPRESSIONS:
            coding = ", ".join(sorted(found))
            raise InvalidRequestError(
                f"the object has Content-Encoding: {coding}, so what is read of it is not what its "
                "size and checksum say; write it again without: download it with `gcloud storage "
                "cp`, which decompresses gzip, and upload that without its options -z and -Z",
                uri=uri,
            )
