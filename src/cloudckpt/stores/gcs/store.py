"""``gs://``: Google Cloud Storage.

google-auth finds credentials and renews tokens. Objects are written, read, listed and deleted
through the JSON API, which emulators also speak; only multipart uploads, which it lacks, go through
the XML API. A version is an object's generation. Every body is sent with its CRC32C, and that of an
object made of parts is compared with the parts'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote

from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.config import Config
from cloudckpt.errors import (
    BucketNotFoundError,
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
    Capabilities,
    ObjectInfo,
    ObjectStore,
    Part,
    Progress,
    Retry,
    Upload,
    once,
    whole_checksum,
)
from cloudckpt.stores.gcs.access import BucketAccess
from cloudckpt.stores.gcs.control import Control
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
from cloudckpt.stores.origins import BucketRules, Route
from cloudckpt.stores.rest import Request, RestStore, encode_key, encode_query
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

# how servers refuse a path that they do not have, which some take for a bucket and a key
_UNKNOWN_PATH = frozenset({404, 405, 501})
_UNKNOWN = (BucketNotFoundError, InvalidRequestError, ObjectNotFoundError, ServerError)
_COMPRESSIONS = frozenset({"br", "compress", "deflate", "gzip", "x-compress", "x-gzip", "zstd"})
_AS_STORED = {"Accept-Encoding": "gzip"}

_Send = Callable[[str, Mapping[str, str]], Reply]


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
        self._downloads = _Downloads(endpoint, is_google=is_google)
        checksums = is_google if options.checksum == "auto" else options.checksum == "on"
        self._objects = JsonObjects(self, endpoint, bucket, options, checksums=checksums)
        self._control = Control(self, endpoint, bucket, options)
        self._bucket_url = f"{endpoint}/{quote(bucket, safe='')}"  # of the XML API
        dialect = Dialect(creation=creation)
        if checksums:
            dialect = replace(dialect, part=lambda crc: {"x-goog-hash": f"crc32c={to_base64(crc)}"})
        self._multipart = XmlMultipart(self, self._bucket_url, dialect)
        self.may_be_cached = False  # whether data of the bucket may come from a cache
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
            return self._control.copy(
                source._control.name, found, key, attempt=attempt, if_absent=if_absent
            )

    def abort_upload(self, upload: Upload) -> None:
        self._multipart.abort(upload)

    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:
        try:
            yield from self._multipart.open_uploads(prefix, retry)
        except InvalidRequestError as error:
            if error.status != _NOT_IMPLEMENTED:  # a store without such uploads has none open
                raise

    def get(self, key: str, *, limit: int = MOST_READ) -> tuple[bytearray, ObjectInfo]:
        data, info = super().get(key, limit=limit)
        if info.version:
            return data, info
        found = self.head(key)  # an emulator left it out: is it that of these bytes?
        if found.size != len(data) or found.checksum not in (None, CRC32C.of(data)):
            raise _replaced(self.uri(key))
        return data, found

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
        if not info.version or (if_version is None and self.may_be_cached):
            found = self.head(key)
            is_of_it = found.size == info.size and info.version in ("", found.version)
            if if_version is None and not is_of_it:
                raise _replaced(self.uri(key), found.version)
            info = found
        if if_version is not None and info.version != if_version:
            raise PreconditionFailedError("the object was replaced", uri=self.uri(key))
        return info

    def head(self, key: str) -> ObjectInfo:
        return self._objects.stat(key)

    def list(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo]:
        return self._control.list(prefix, retry)

    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        return self._control.list_level(prefix, retry)

    def _delete(self, key: str, if_version: str | None) -> None:
        self._control.delete(key, if_version)

    def rules(self, prefix: str) -> BucketRules:
        return self._control.rules(prefix)

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
    def _sent(self, request: Request) -> Iterator[Reply]:
        base = super()._sent
        with contextlib.ExitStack() as stack:

            def send(url: str, more: Mapping[str, str]) -> Reply:
                asked = replace(request, url=url, headers={**request.headers, **more})
                return stack.enter_context(base(asked))

            if self._downloads.is_content(request.url):
                reply = self._downloads.ask(request.url, send, self.uri(request.key))
            else:
                reply = send(request.url, {})
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

    def _content_url(self, key: str, if_version: str | None) -> str:
        query = {"alt": "media"}
        if if_version:
            query["ifGenerationMatch"] = generation(if_version)
        return self._objects.url(key, query)

    def _if_version(self, version: str) -> Mapping[str, str]:
        return {}  # it stands in the URL

    def _version(self, reply: Reply, key: str) -> str:
        # what everybody may read and somebody else has written, without forbidding it to be cached
        self.may_be_cached = self.may_be_cached or "public" in reply.headers.get(
            "Cache-Control", ""
        )
        return reply.headers.get("x-goog-generation", "")  # an emulator may leave it out


def _replaced(uri: str, version: str | None = None) -> ConnectionLostError:
    """``version``: the one to read instead."""
    return ConnectionLostError(
        "the object was replaced while it was read: it is read anew", version=version, uri=uri
    )


class _Downloads:
    """The reads of content at one endpoint.

    Google serves content at ``/download/storage/v1/…?alt=media``, where its own clients read it
    (https://cloud.google.com/storage/docs/request-endpoints). The URL of the metadata with
    ``alt=media`` may be answered by a redirect to there (303). Some emulators have only that one,
    which an endpoint that is not Google's is asked for when it does not seem to know the other.

    Content with ``Content-Encoding: gzip`` is decompressed by Google while it is read, which
    ignores ranges and leaves its size open, unless the request accepts gzip
    (https://cloud.google.com/storage/docs/transcoding). Requests do so, as those of Google's client
    for Python, and such content is refused: it is not what its size and checksum say.
    """

    def __init__(self, endpoint: str, *, is_google: bool) -> None:
        self._plain = f"{endpoint}/storage/v1/"
        self._download = f"{endpoint}/download/storage/v1/"
        self._is_known = is_google  # which of the two it has
        self._is_plain = False

    def is_content(self, url: str) -> bool:
        """Whether a URL of the JSON API is that of content."""
        return url.startswith(self._plain) and "alt=media" in url

    def ask(self, url: str, send: _Send, uri: str) -> Reply:
        """The answer to a read of content.

        Args:
            url: Without ``/download``.
            send: Sends a request to a URL with headers.
            uri: Of the object, for messages.

        Raises:
            StoreError: If it is refused.
            InvalidRequestError: If the content is compressed.
        """
        if self._is_plain:
            reply = send(url, _AS_STORED)
        else:
            try:
                reply = send(url.replace(self._plain, self._download, 1), _AS_STORED)
                self._is_known = True
            except _UNKNOWN as error:
                if self._is_known or not _may_lack_path(error):
                    raise
                reply = self._ask_plainly(url, send, error)
        _check_encoding(reply, uri)
        return reply

    def _ask_plainly(self, url: str, send: _Send, error: StoreError) -> Reply:
        """The answer of an endpoint that perhaps knows the other URL only.

        What it says there of the object counts. Another failure, as a redirect, says nothing of
        it: then the first answer was about the object.
        """
        try:
            reply = send(url, _AS_STORED)
        except StoreError as second:
            if second.status in (404, 412, 416):
                raise second from None
            raise error from None
        self._is_known = self._is_plain = True
        return reply


def _may_lack_path(refused: StoreError) -> bool:
    """Whether the endpoint has refused the path, and not the object, in Google's words."""
    return refused.status in _UNKNOWN_PATH and "No such object" not in (refused.cause or "")


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
