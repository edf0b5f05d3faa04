"""Azure from an event loop: azure-storage-blob composes the requests and reads the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from azure.core.pipeline.transport import AsyncHttpResponse, AsyncHttpTransport, HttpRequest
from azure.storage.blob import BlobProperties
from azure.storage.blob.aio import ContainerClient

from cloudckpt.errors import RangeNotSatisfiableError
from cloudckpt.stores.async_http import AsyncCalls, send_for_call, tls_of
from cloudckpt.stores.asynchronous import AsyncStore
from cloudckpt.stores.azure import AzureStore
from cloudckpt.stores.azure_access import API_VERSION
from cloudckpt.stores.base import AT_FIRST, ObjectInfo, ObjectStore
from cloudckpt.stores.rest import Marks
from cloudckpt.stores.sdk import Answer

__all__ = ["open_azure"]


def open_azure(store: ObjectStore) -> Callable[[], AsyncStore]:
    """Returns a factory to call on an event loop; this function itself reads files, and blocks."""
    assert isinstance(store, AzureStore)
    access = store._access
    tls = tls_of(access.http_options, store.root)

    def make() -> AsyncStore:
        client = ContainerClient(
            access.endpoint,
            access.container,
            api_version=API_VERSION,
            transport=_Transport(),
            retry_total=0,
        )
        return _AsyncAzure(store, client, AsyncCalls(store, access.http_options, tls))

    return make


class _AsyncAzure(AsyncStore):
    def __init__(self, store: AzureStore, client: ContainerClient, calls: AsyncCalls) -> None:
        self._uri = store.uri
        self._client = client
        self._calls = calls

    async def look(self, key: str) -> ObjectInfo:
        try:
            with self._calls.about(key):
                blob = self._client.get_blob_client(key)
                found = (await blob.download_blob(offset=0, length=1)).properties
        except RangeNotSatisfiableError:  # it is empty
            return ObjectInfo(key, 0, "")
        return ObjectInfo(key, found.size, _quoted(found.etag))

    async def objects(self, prefix: str) -> list[ObjectInfo]:
        return [_found(blob) async for blob in self._listed(prefix, self._client.list_blobs)]

    async def level(self, prefix: str) -> list[ObjectInfo | str]:
        found: list[ObjectInfo | str] = []
        async for blob in self._listed(prefix, self._client.walk_blobs):
            is_blob = isinstance(blob, BlobProperties)
            found.append(_found(blob) if is_blob else _folder(blob, prefix))
            if len(found) == AT_FIRST:
                break
        return found

    async def folders(self, prefix: str) -> list[str]:
        return [
            _folder(blob, prefix)
            async for blob in self._listed(prefix, self._client.walk_blobs)
            if not isinstance(blob, BlobProperties)
        ]

    async def _listed(self, prefix: str, list_blobs: Callable[..., Any]) -> AsyncIterator[Any]:
        begun = Marks(self._uri(prefix))
        with self._calls.about(prefix):
            listed = list_blobs(name_starts_with=prefix or None, results_per_page=1000).by_page()
        while True:
            with self._calls.about(prefix):
                page = await anext(listed, None)
                found = [] if page is None else [blob async for blob in page]
            for blob in found:
                yield blob
            if page is None:
                return
            if listed.continuation_token:
                begun.add((listed.continuation_token,))

    async def close(self) -> None:
        await self._calls.close()


def _found(blob: Any) -> ObjectInfo:
    modified = blob.last_modified.timestamp()
    return ObjectInfo(blob.name, blob.size, _quoted(blob.etag), modified=modified)


def _folder(blob: Any, prefix: str) -> str:
    name: str = blob.name
    return name.removeprefix(prefix).rstrip("/")


def _quoted(tag: str | None) -> str:
    return '"{}"'.format((tag or "").strip('"'))


class _Transport(AsyncHttpTransport[HttpRequest, "_Response"]):
    """Takes the place of azure-core's own sending."""

    async def send(self, request: HttpRequest, **_: Any) -> _Response:
        answer = await send_for_call(request.method, request.url, request.headers)
        return _Response(request, answer)

    async def open(self) -> None:
        """Does nothing: the caller opens the connections."""

    async def close(self) -> None:
        """Does nothing: the caller closes the connections."""

    async def __aexit__(self, *_: object) -> None:
        pass


class _Response(AsyncHttpResponse):
    """An answer, read to its end."""

    def __init__(self, request: HttpRequest, answer: Answer) -> None:
        super().__init__(request, None)
        self.status_code = answer.status
        self.headers = answer.headers  # type: ignore[assignment]
        self.content_type = self.headers.get("content-type")
        self._body = answer.body

    def body(self) -> bytes:
        return self._body

    async def load_body(self) -> None:
        """Does nothing: the body has been read."""

    def stream_download(self, *_: Any, **__: Any) -> _Stream:
        return _Stream(self)


class _Stream(AsyncIterator[bytes]):
    """The body of an answer in one piece, with the attributes of azure-core's own."""

    def __init__(self, response: _Response) -> None:
        self.response = response
        self.content_length = len(response.body())
        self._rest = [response.body()]

    async def __anext__(self) -> bytes:
        if not self._rest:
            raise StopAsyncIteration
        return self._rest.pop()
