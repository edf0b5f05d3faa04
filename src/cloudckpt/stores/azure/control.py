"""Azure requests without payload, which azure-storage-blob composes and parses."""

from __future__ import annotations

import base64
import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from azure.core import MatchConditions
from azure.core.pipeline.transport import HttpRequest, HttpResponse, HttpTransport
from azure.core.utils import case_insensitive_dict
from azure.storage.blob import ContainerClient

from cloudckpt.errors import ObjectNotFoundError, ServerError
from cloudckpt.stores.azure.access import API_VERSION, ContainerAccess
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.stores.rest import RestStore
from cloudckpt.stores.sdk import Answer, SdkCalls

__all__ = ["Control"]


# https://learn.microsoft.com/rest/api/storageservices/put-block
_LIFE_OF_BLOCKS = 7  # days, of those that were not committed


class Control:
    """The control requests of one container."""

    def __init__(self, store: RestStore, access: ContainerAccess) -> None:
        self._store = store
        self._access = access
        self._calls = SdkCalls(store)

    @functools.cached_property
    def _client(self) -> ContainerClient:
        """Azure's client, made when it is first needed."""
        return ContainerClient(
            self._access.endpoint,
            self._access.container,
            api_version=API_VERSION,
            transport=_Transport(self._calls),
            retry_total=0,
        )

    def delete(self, key: str, version: str | None) -> None:
        """Removes a blob with its snapshots; if ``version`` is given, only that version."""
        condition = None if version is None else MatchConditions.IfNotModified
        with contextlib.suppress(ObjectNotFoundError), self._calls.about(key):
            blob = self._client.get_blob_client(key)
            blob.delete_blob(delete_snapshots="include", etag=version, match_condition=condition)

    def copy(
        self,
        source: ContainerAccess,
        found: ObjectInfo,
        key: str,
        created: Mapping[str, str],
        *,
        if_absent: bool,
    ) -> tuple[str, int | None]:
        """Copies a blob as :meth:`~cloudckpt.stores.base.ObjectStore.copy` says.

        Args:
            source: The container that it is in.
            found: The blob.
            key: The key of the copy.
            created: The headers of new blobs.
            if_absent: Whether the copy must not replace a blob.

        Returns:
            The copy's ETag, and its CRC64 if Azure returns it.
        """
        told: list[int | None] = []
        condition = MatchConditions.IfMissing if if_absent else None
        with self._calls.about(key, is_long=True):
            url, authorization = source.as_source(found.key)
            made = self._client.get_blob_client(key).start_copy_from_url(
                url,
                requires_sync=True,
                source_authorization=authorization,
                source_etag=found.version,
                source_match_condition=MatchConditions.IfNotModified,
                headers=dict(created),
                raw_response_hook=lambda answer: told.append(_crc64(answer.http_response.headers)),
                match_condition=condition,
            )
        if made.get("copy_status") != "success":
            raise ServerError(
                f"the copy was not made at once: {made.get('copy_status')}",
                uri=self._store.uri(key),
            )
        return str(made.get("etag") or ""), told[0]

    def copy_block(
        self,
        source: ContainerAccess,
        found: ObjectInfo,
        key: str,
        name: str,
        created: Mapping[str, str],
        start: int,
        stop: int,
    ) -> int | None:
        """Makes a range of another blob the block ``name``; returns its CRC64 if Azure does."""
        told: list[int | None] = []
        with self._calls.about(key, is_long=True):
            url, authorization = source.as_source(found.key)
            self._client.get_blob_client(key).stage_block_from_url(
                name,
                url,
                source_offset=start,
                source_length=stop - start,
                source_authorization=authorization,
                headers={**created, "x-ms-source-if-match": found.version},
                raw_response_hook=lambda answer: told.append(_crc64(answer.http_response.headers)),
            )
        return told[0]


def _phrases(found: Any) -> Iterator[str]:
    """Descriptions of what a container retains, by its properties."""
    if found.has_immutability_policy or found.immutable_storage_with_versioning_enabled:
        yield "everything for the time of an immutability policy"
    if found.has_legal_hold:
        yield "everything for a legal hold"


def _crc64(headers: Mapping[str, str]) -> int | None:
    """The CRC64 in the headers of an answer, whose eight bytes are little-endian."""
    text = headers.get("x-ms-content-crc64")
    return int.from_bytes(base64.b64decode(text), "little") if text else None


class _Transport(HttpTransport[HttpRequest, "_Response"]):
    """The transport of Azure's client, over the store's connections."""

    def __init__(self, calls: SdkCalls) -> None:
        self._calls = calls

    def send(self, request: HttpRequest, **_: Any) -> _Response:
        body: Any = request.body
        answer = self._calls.send(request.method, request.url, request.headers, body)
        return _Response(request, answer)

    def open(self) -> None:
        """Does nothing: the store's connections are open."""

    def close(self) -> None:
        """Does nothing: the store closes them."""

    def __exit__(self, *_: object) -> None:
        self.close()


class _Response(HttpResponse):
    """An answer, read to its end."""

    def __init__(self, request: HttpRequest, answer: Answer) -> None:
        super().__init__(request, None)
        self.status_code = answer.status
        self.headers = case_insensitive_dict(answer.headers)
        self.content_type = self.headers.get("content-type")
        self._body = answer.body

    def body(self) -> bytes:
        return self._body
