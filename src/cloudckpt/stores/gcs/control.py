"""Google requests without payload, which google-cloud-storage composes and parses."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt.config import GCSOptions
from cloudckpt.errors import (
    ConnectionLostError,
    MissingDependencyError,
    ObjectNotFoundError,
    ServerError,
    TransientStoreError,
)
from cloudckpt.fork import late_imports
from cloudckpt.stores.base import ObjectInfo, Retry
from cloudckpt.stores.gcs.json_api import CACHE_CONTROL, generation, metadata_of, parse_crc32c
from cloudckpt.stores.pages import all_pages
from cloudckpt.stores.rest import RestStore
from cloudckpt.stores.sdk import SdkCalls

__all__ = ["Control"]

_Page = tuple[Sequence[ObjectInfo], Sequence[str]]
_LISTED = "name,size,generation,updated"


_DAY = 86_400


class Control:
    """The control requests of one bucket.

    Args:
        store: Whose requests they are.
        endpoint: The URL that paths are appended to.
        name: The bucket's name.
        options: What new objects get, and who pays.
    """

    def __init__(self, store: RestStore, endpoint: str, name: str, options: GCSOptions) -> None:
        self.name = name
        self._store = store
        self._endpoint = endpoint
        self._options = options
        self._calls = SdkCalls(store)
        self._tokens: dict[tuple[object, ...], str] = {}  # of copies that are under way

    @functools.cached_property
    def _client(self) -> Any:
        """Google's client, made when it is first needed, as only then its packages are imported."""
        try:
            with late_imports:
                from google.auth.credentials import AnonymousCredentials
                from google.cloud.storage import Client
        except ImportError as exc:
            raise MissingDependencyError(
                "gs:// needs google-cloud-storage to list, delete and copy; install it with: "
                "pip install 'cloudckpt[gcs]'",
                cause=exc,
            ) from exc
        return Client(
            project=None,
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": self._endpoint},
            _http=_Session(self._calls),
        )

    def _bucket(self, name: str) -> Any:
        return self._client.bucket(name, user_project=self._options.user_project)

    def list(self, prefix: str, retry: Retry) -> Iterator[ObjectInfo]:
        """The objects whose key begins with ``prefix``, page by page."""
        for page, _ in self._pages(prefix, retry, fields=f"items({_LISTED}),nextPageToken"):
            yield from page

    def list_level(self, prefix: str, retry: Retry) -> Iterator[ObjectInfo | str]:
        """The objects and the folders directly beneath ``prefix``, page by page."""
        fields = f"items({_LISTED}),prefixes,nextPageToken"
        for page, folders in self._pages(prefix, retry, delimiter="/", fields=fields):
            yield from page
            for folder in folders:
                yield folder.removeprefix(prefix).rstrip("/")

    def _pages(self, prefix: str, retry: Retry, **wanted: str) -> Iterator[_Page]:
        """The objects and the folders of each page."""

        def ask(marks: tuple[str, ...]) -> tuple[_Page, tuple[str, ...] | None]:
            with self._calls.about(prefix):
                found = self._client.list_blobs(
                    self._bucket(self.name),
                    prefix=prefix or None,
                    page_token=marks[0] if marks else None,
                    retry=None,
                    **wanted,
                )
                page = list(map(_found, next(found.pages, ())))
                token = found.next_page_token
                return (page, sorted(found.prefixes)), (token,) if token else None

        return all_pages(self._store.uri(prefix), ask, retry)

    def delete(self, key: str, version: str | None = None) -> None:
        """Removes an object; a missing object is not an error."""
        condition = None if version is None else int(generation(version))
        with contextlib.suppress(ObjectNotFoundError), self._calls.about(key):
            blob = self._bucket(self.name).blob(key)
            blob.delete(if_generation_match=condition, retry=None)

    def copy(
        self, source: str, found: ObjectInfo, key: str, *, attempt: str, if_absent: bool
    ) -> ObjectInfo:
        """Copies an object of the bucket ``source``.

        Google copies at once within a location and storage class. Otherwise it takes several
        requests, each for as much as Google likes; a retry continues where the last one ended.
        """
        copied = (source, found.key, found.version, key, attempt, if_absent)
        token = self._tokens.pop(copied, None)
        with self._calls.about(key, is_long=True):
            target, origin = self._new(key, attempt), self._bucket(source).blob(found.key)
            while True:
                try:
                    token, _, _ = target.rewrite(
                        origin,
                        token=token,
                        if_generation_match=0 if if_absent else None,
                        if_source_generation_match=int(generation(found.version)),
                        retry=None,
                    )
                except TransientStoreError:
                    if token is not None:
                        self._tokens[copied] = token
                    raise
                if token is None:
                    break
            uri, size, version = self._store.uri(key), target.size, target.generation
            if not version:
                raise ConnectionLostError("the answer lacks the generation", uri=uri)
            if size != found.size:
                raise ServerError(f"{found.size} bytes were copied, but {size} stored", uri=uri)
            crc32c = parse_crc32c(f"crc32c={target.crc32c or ''}")
            return ObjectInfo(key, size, str(version), crc32c)

    def _new(self, key: str, attempt: str) -> Any:
        """A blob with what new objects get, and the name of the write."""
        options = self._options
        blob = self._bucket(self.name).blob(key, kms_key_name=options.kms_key_name)
        blob.content_type = "application/octet-stream"
        blob.cache_control = CACHE_CONTROL
        blob.metadata = metadata_of(options, attempt)
        if options.storage_class is not None:
            blob.storage_class = options.storage_class
        return blob


def _found(blob: Any) -> ObjectInfo:
    """An object as a listing describes it."""
    modified = blob.updated.timestamp() if blob.updated else None
    return ObjectInfo(str(blob.name), blob.size, str(blob.generation), modified=modified)


class _Session:
    """What Google's client takes for a session of ``requests``."""

    def __init__(self, calls: SdkCalls) -> None:
        self._calls = calls
        self.is_mtls = False

    def request(
        self, method: str, url: str, data: Any = None, headers: Any = None, **_: Any
    ) -> _Response:
        answer = self._calls.send(method, url, headers or {}, data)
        return _Response(answer.status, answer.headers, answer.body)


@dataclass(frozen=True)
class _Response:
    status_code: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)
