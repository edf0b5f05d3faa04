"""``gs://``: Google Cloud Storage.

google-auth finds credentials and renews tokens. Objects are written, read, listed and deleted
through the JSON API, which emulators also implement; multipart uploads, which that API lacks, go
through the XML API. A version is an object's generation. Every body is sent with its CRC32C, unless
checksums are off; the CRC32C of an object made of parts is compared with the one computed from the
checksums of its parts.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.config import Config
from cloudckpt.errors import (
    InvalidRequestError,
    PreconditionFailedError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import (
    Body,
    CopySource,
    ObjectInfo,
    ObjectStore,
    Part,
    Progress,
    Upload,
    random_suffix,
    whole_checksum,
)
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.stores.gcs.access import BucketAccess
from cloudckpt.stores.gcs.errors import from_answer
from cloudckpt.stores.gcs.json_api import (
    BRIEF,
    LISTED,
    RESOURCE,
    answer_of,
    creation_headers,
    described,
    generation,
    insertion,
    of_payload,
    parse_crc32c,
    resource_of,
)
from cloudckpt.stores.http.client import Reply
from cloudckpt.stores.rest import UNRESERVED, Marks, Page, encode_query, http_date
from cloudckpt.stores.xml_api import XmlStore

__all__ = ["GCSStore"]

# https://cloud.google.com/storage/quotas#objects
_MIN_PART = 5 * 1024**2
_MAX_PART = 5 * 1024**3
_MAX_PARTS = 10_000
_MAX_OBJECT = 5 * 1024**4

_COMPRESSED = re.compile(r"\b(br|compress|deflate|gzip|zstd)\b", re.IGNORECASE)


class GCSStore(XmlStore):
    """A bucket of Google Cloud Storage, or of an emulator."""

    access: BucketAccess
    metadata_prefix = "x-goog-meta-"
    version_header = "x-goog-generation"

    def __init__(self, bucket: str, config: Config) -> None:
        root = f"gs://{bucket}"
        options = config.gcs
        self.creation_headers = {
            "Content-Type": "application/octet-stream",
            **creation_headers(options),
        }
        self.access = BucketAccess(bucket, config, root)
        super().__init__(root, self.access)
        endpoint, is_google = self.access.endpoint, self.access.is_google
        checksums = is_google if config.checksum == "auto" else config.checksum == "on"
        self._options, self._checksums, self._endpoint = options, checksums, endpoint
        self._path = f"/storage/v1/b/{quote(bucket, safe='')}/o"  # of the JSON API
        self.bucket_url = self.access.url  # of the XML API
        self._tokens: dict[tuple[object, ...], str] = {}  # the rewrite tokens of copies under way
        self.capabilities = Capabilities(
            conditional_writes=is_google or None,
            conditional_deletes=is_google,
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
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        options = self._options
        resource = resource_of(options, attempt)
        if self._checksums:
            resource["crc32c"] = to_base64(checksum)
        boundary = f"cloudckpt-{random_suffix()}{random_suffix()}"
        before, after = insertion(resource, boundary)
        query = {"uploadType": "multipart", "name": key, "fields": RESOURCE}
        if if_version is not None:
            query["ifGenerationMatch"] = generation(if_version or "0")
        if options.kms_key_name is not None:
            query["kmsKeyName"] = options.kms_key_name
        size = sum(map(len, body))
        with self.exchange(
            "POST",
            self._url(f"/upload{self._path}", query),
            {"Content-Type": f"multipart/related; boundary={boundary}"},
            [memoryview(before), *body, memoryview(after)],
            of_payload(progress, len(before), size),
            key=key,
        ) as reply:
            return described(answer_of(reply), key)

    def part_headers(self, crc32c: int) -> Mapping[str, str]:
        return {"x-goog-hash": f"crc32c={to_base64(crc32c)}"} if self._checksums else {}

    def complete_upload(
        self, upload: Upload, parts: Sequence[Part], *, if_version: str | None = None
    ) -> ObjectInfo:
        size = sum(part.size for part in parts)
        whole = whole_checksum(parts, CRC32C)
        # no precondition: multipart uploads support none, but each can be completed only once
        _, headers = self._completed(upload, parts, {})
        version = headers.get("x-goog-generation")
        crc32c = parse_crc32c(headers.get("x-goog-hash", ""))
        if version is None or crc32c is None:  # the hash is missing for KMS-encrypted objects
            try:
                made = self.head(upload.key)
            except StoreError as error:
                error.certain = False  # the object was made
                raise
            if made.attempt not in ("", upload.attempt):  # an intact object of another write
                raise PreconditionFailedError(
                    "another writer replaced the object right after this upload; read it again",
                    uri=self.uri(upload.key),
                )
        else:
            made = ObjectInfo(upload.key, size, version, crc32c)
        if made.size == size and made.checksum in (None, whole):
            return made
        with contextlib.suppress(StoreError):  # it may have a name that readers look for
            self.delete(made.key, if_version=made.version)  # the condition spares a later object
        raise StoreError(  # the parts are gone, so a retry is impossible
            "the store joined the parts incorrectly: the size or the CRC32C of the object is "
            "wrong, so it is not used; save again",
            uri=self.uri(made.key),
        )

    def copies_from(self, source: ObjectStore) -> bool:
        return isinstance(source, GCSStore) and self.access.shares_realm(source.access)

    def copy(
        self, source: CopySource, key: str, *, attempt: str = "", if_version: str | None = None
    ) -> ObjectInfo:
        """Implements :meth:`cloudckpt.stores.base.ObjectStore.copy`.

        Google copies at once within a location and storage class. Otherwise the copy takes several
        requests, each for as many bytes as Google chooses; a retry continues where the last request
        ended.
        """
        assert isinstance(source.store, GCSStore)
        options = self._options
        kms = options.kms_key_name
        # empty metadata: otherwise the source's is copied
        resource = {"metadata": {}, **resource_of(options, attempt)}
        body = json.dumps({**resource, **({"kmsKeyName": kms} if kms else {})}).encode()
        query = {
            "destinationKmsKeyName": kms or "",
            "ifGenerationMatch": "" if if_version is None else generation(if_version or "0"),
            "ifSourceGenerationMatch": generation(source.info.version),
            **BRIEF,
        }
        target = f"{self._path.removeprefix('/storage/v1')}/{quote(key, safe='')}"
        path = f"{source.store._path}/{quote(source.info.key, safe='')}/rewriteTo{target}"
        copied = (path, source.info.version, attempt, if_version)
        token, answer = self._tokens.pop(copied, ""), dict[str, Any]()
        with self._naming_source(source):
            while not answer.get("done"):
                try:
                    with self.exchange(
                        "POST",
                        self._url(path, {**query, "rewriteToken": token}),
                        {"Content-Type": "application/json"},
                        [memoryview(body)],
                        key=key,
                        is_long=True,
                    ) as reply:
                        answer = answer_of(reply)
                        if answer["done"]:
                            made = described(answer["resource"], key)
                        else:
                            token = str(answer["rewriteToken"])
                except TransientStoreError:
                    if token:
                        self._tokens[copied] = token
                    raise
        return made

    def head(self, key: str) -> ObjectInfo:
        # the metadata, which no cache keeps
        url = self._url(f"{self._path}/{quote(key, safe='')}", {"fields": RESOURCE})
        with self.exchange("GET", url, {}, key=key) as reply:
            answered = http_date(reply.headers.get("Date", ""))
            return replace(described(answer_of(reply), key), answered=answered)

    def _delete(self, key: str, if_version: str | None) -> None:
        condition = generation(if_version) if if_version else ""
        query = {"ifGenerationMatch": condition, **BRIEF}
        url = self._url(f"{self._path}/{quote(key, safe='')}", query)
        self._removed(key, url, {})

    def _page(self, prefix: str, delimiter: str, marks: Marks) -> tuple[Page, Marks | None]:
        query = {
            "projection": "noAcl",
            "prefix": prefix,
            "delimiter": delimiter,
            "fields": f"items({LISTED}),{'prefixes,' if delimiter else ''}nextPageToken",
            **BRIEF,
            "pageToken": marks[0] if marks else "",
        }
        with self.exchange("GET", self._url(self._path, query), {}, key=prefix) as reply:
            page, objects = answer_of(reply), list[ObjectInfo]()
            for item in page.get("items", ()):
                objects.append(described(item, str(item["name"])))
            token = page.get("nextPageToken")
            return (objects, sorted(page.get("prefixes", ()))), (token,) if token else None

    def _url(self, path: str, query: Mapping[str, str]) -> str:
        """Returns a URL of the JSON API; slashes within names in `path` must be encoded.

        Empty values are left out of the query; the option ``user_project`` is added, as the API
        demands.
        """
        given = {name: value for name, value in query.items() if value}
        if self._options.user_project is not None:
            given["userProject"] = self._options.user_project
        url = self._endpoint + path
        return f"{url}?{encode_query(given)}" if given else url

    def object_url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        url = f"{self.bucket_url}/{quote(key, safe=UNRESERVED)}"
        return f"{url}?{encode_query(query)}" if query else url

    @contextlib.contextmanager
    def _read(
        self, key: str, if_version: str | None, headers: Mapping[str, str]
    ) -> Iterator[Reply]:
        """Sends a GET for an object's content; yields the response.

        Content that is stored compressed is refused, as its bytes are not those that were saved.
        The request accepts gzip: otherwise Google would decompress the content, ignore the range
        and omit the length
        (https://cloud.google.com/storage/docs/transcoding).
        """
        # The URL to which ``alt=media`` of the metadata URL may redirect; Google's own clients read
        # from it: https://cloud.google.com/storage/docs/request-endpoints
        query = {"alt": "media"}
        if if_version:
            query["ifGenerationMatch"] = generation(if_version)
        else:  # caches store public content by the whole URL, so a new one has the current object
            query["ifMetagenerationNotMatch"] = str(int(random_suffix(), 16) >> 1)
        url = self._url(f"/download{self._path}/{quote(key, safe='')}", query)
        asked = {**headers, "Accept-Encoding": "gzip"}
        with self.exchange("GET", url, asked, key=key) as reply:
            _check_encoding(reply)
            # an emulator may ignore the condition
            if if_version and reply.headers.get(self.version_header) != if_version:
                why = "another writer has replaced the object; read it again"
                raise PreconditionFailedError(why)
            yield reply

    def failure(
        self, status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
    ) -> StoreError:
        is_google = self.access.is_google
        return from_answer(status, headers, body, action, uri, is_google=is_google)


def _check_encoding(reply: Reply) -> None:
    """Raises InvalidRequestError if a response says that the object is stored compressed."""
    for name in ("content-encoding", "x-goog-stored-content-encoding"):
        if found := _COMPRESSED.search(reply.headers.get(name, "")):
            raise InvalidRequestError(
                f"the object is stored with Content-Encoding: {found[0]}, so its bytes are not "
                "those that were saved: download it with `gcloud storage cp`, which decompresses "
                "gzip, and upload it without the options -z and -Z"
            )
