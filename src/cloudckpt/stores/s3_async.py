"""S3 from an event loop: requests that aiobotocore composes and whose answers it reads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from cloudckpt.errors import RangeNotSatisfiableError
from cloudckpt.stores.async_http import AsyncCalls, send_for_call, tls_of
from cloudckpt.stores.asynchronous import AsyncStore
from cloudckpt.stores.base import AT_FIRST, ObjectInfo, ObjectStore
from cloudckpt.stores.rest import Marks
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3_control import folders_in, objects_in

__all__ = ["open_s3"]


def open_s3(store: ObjectStore) -> Callable[[], AsyncStore] | None:
    """Makes, on an event loop, what looks at a bucket; this itself reads files, and blocks.

    None for a dialect whose listings or reads are too different: there threads look.
    """
    assert isinstance(store, S3Store)
    access = store._access
    if access.dialect.redirects or not access.dialect.any_prefix:
        return None
    client, tls = access.async_client(_send), tls_of(access.http_options, store.root)
    return lambda: _AsyncS3(store, client, AsyncCalls(store, access.http_options, tls))


class _AsyncS3(AsyncStore):
    def __init__(self, store: S3Store, client: Any, calls: AsyncCalls) -> None:
        self._bucket = store.root.removeprefix("s3://")
        self._uri = store.uri
        self._client = client
        self._calls = calls

    async def look(self, key: str) -> ObjectInfo:
        try:
            with self._calls.about(key):
                found = await self._client.get_object(
                    Bucket=self._bucket, Key=key, Range="bytes=0-0"
                )
                size = int(found["ContentRange"].rpartition("/")[2])
                return ObjectInfo(key, size, found["ETag"])
        except RangeNotSatisfiableError:  # it is empty
            return ObjectInfo(key, 0, "")

    async def objects(self, prefix: str) -> list[ObjectInfo]:
        return [found async for page in self._pages(prefix) for found in objects_in(page)]

    async def level(self, prefix: str) -> list[ObjectInfo | str]:
        found: list[ObjectInfo | str] = []
        async for page in self._pages(prefix, Delimiter="/"):
            found += [*objects_in(page), *folders_in(page, prefix)]
            if len(found) >= AT_FIRST:
                break
        return found[:AT_FIRST]

    async def folders(self, prefix: str) -> list[str]:
        pages = self._pages(prefix, Delimiter="/")
        return [name async for page in pages for name in folders_in(page, prefix)]

    async def _pages(self, prefix: str, **wanted: str) -> AsyncIterator[Any]:
        begun = Marks(self._uri(prefix))
        while True:
            with self._calls.about(prefix):
                page = await self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=prefix, **wanted
                )
            yield page
            if not page.get("IsTruncated"):
                return
            wanted["ContinuationToken"] = page.get("NextContinuationToken", "")
            begun.add((wanted["ContinuationToken"],))

    async def close(self) -> None:
        await self._calls.close()


class _Body:
    """The body of an answer, as aiobotocore reads it from aiohttp."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data


async def _send(request: Any, **_: Any) -> Any:
    """Takes the place of aiobotocore's own sending."""
    from aiobotocore.awsrequest import AioAWSResponse

    answer = await send_for_call(request.method, request.url, request.headers)
    return AioAWSResponse(request.url, answer.status, answer.headers, _Body(answer.body))
