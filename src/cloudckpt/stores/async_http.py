"""Requests that an event loop sends for the vendors' asynchronous SDKs.

aiobotocore and azure-storage-blob compose the requests and read the answers. The requests are sent
here, with the store's credentials, limits, proxies and errors: a store behaves the same from an
event loop as from a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from cloudckpt._version import __version__
from cloudckpt.errors import (
    ConfigError,
    ConnectionLostError,
    InvalidRequestError,
    MissingDependencyError,
    StoreError,
)
from cloudckpt.stores.asynchronous import in_thread
from cloudckpt.stores.credentials import conceal, reason
from cloudckpt.stores.http import HttpOptions, proxy_url
from cloudckpt.stores.rest import Authorized, Request, RestStore
from cloudckpt.stores.sdk import Answer, Call, explained, sent_headers
from cloudckpt.stores.tls import lasting_failure

try:
    import aiohttp
    import yarl
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.aio needs aiohttp and aiobotocore; install them with: "
        "pip install 'cloudckpt[aio]'",
        cause=exc,
    ) from exc

__all__ = ["AsyncCalls", "send_for_call", "tls_of"]

_call: ContextVar[tuple[AsyncCalls, Call]] = ContextVar("cloudckpt_call")


async def send_for_call(method: str, url: str, headers: Mapping[str, str | bytes]) -> Answer:
    """Sends a request that an SDK has composed, as part of the SDK call it belongs to."""
    calls, call = _call.get()
    call.has_sent = True
    return await calls.send(method, url, sent_headers(headers, call), key=call.key)


class AsyncCalls:
    """The connections of one event loop to a store."""

    def __init__(self, store: RestStore, options: HttpOptions, tls: ssl.SSLContext) -> None:
        """``tls`` is the result of :func:`tls_of` for ``options``; making it reads files."""
        self._store = store
        proxy = None if options.proxy is None else proxy_url(options.proxy)
        self._proxy = None if proxy is None else proxy.url
        self._timeout = aiohttp.ClientTimeout(
            total=options.completion_timeout,
            sock_connect=options.connect_timeout,
            sock_read=options.read_timeout,
        )
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=options.connections, ssl=tls),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"cloudckpt/{__version__}", "Accept-Encoding": "identity"},
            skip_auto_headers=("Content-Type",),
            auto_decompress=False,
        )

    @contextlib.contextmanager
    def about(self, key: str) -> Iterator[None]:
        """Around one call of an SDK; see :func:`~cloudckpt.stores.sdk.explained`."""
        call = Call(key)
        token = _call.set((self, call))
        try:
            with explained(call, self._store.uri(key)):
                yield
        finally:
            _call.reset(token)

    async def send(self, method: str, url: str, headers: Mapping[str, str], *, key: str) -> Answer:
        """Sends a request that an SDK has composed; retries once if the refusal can be remedied.

        Args:
            method: The method of the request, which has no body.
            url: Where to send it.
            headers: Names and values.
            key: The key that the request concerns, for messages.

        Raises:
            StoreError: If the request fails.
        """
        request = Request(method, url, headers, key=key)
        seen: set[type[StoreError]] = set()
        while True:
            used = await in_thread(partial(self._store.authorized, request))
            try:
                return await self._sent(request, used)
            except StoreError as error:
                error.uri = error.uri or self._store.uri(key)
                conceal(error, used.secrets)
                mends = partial(self._store.mends, error, used)
                if type(error) in seen or not await in_thread(mends):
                    raise
                seen.add(type(error))

    async def _sent(self, request: Request, used: Authorized) -> Answer:
        method = request.method
        try:
            url = yarl.URL(used.url, encoded=True)
            async with self._http.request(
                method,
                url,
                headers=used.headers,
                allow_redirects=False,
                proxy=self._proxy,
                timeout=self._timeout,
            ) as reply:
                status, headers, body = reply.status, reply.headers, await reply.read()
        except aiohttp.InvalidURL as exc:
            raise InvalidRequestError(
                f"{method} can't be sent: its URL is none",
                cause=reason(exc, used.secrets),
                certain=True,
            ) from exc
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as exc:
            # aiohttp's TLS errors have OpenSSL's classes, but not their messages
            lasting = lasting_failure(exc.__cause__ or exc, urlsplit(used.url).netloc)
            if lasting is not None:
                raise lasting from exc
            raise ConnectionLostError(
                f"{method} got no answer",
                cause=reason(exc, used.secrets),
                certain=isinstance(exc, aiohttp.ClientConnectorError),
            ) from exc
        if not 200 <= status < 300:
            uri = self._store.uri(request.key)
            raise self._store.failure(status, headers, body, method, uri)
        return Answer(status, headers, body)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()


def tls_of(options: HttpOptions, uri: str) -> ssl.SSLContext:
    """The certificates that https connections trust and present.

    Raises:
        ConfigError: If the files that the options name can't be read.
    """
    bundle: dict[str, Any] = {}
    if options.ca_bundle is not None:
        bundle = {"capath" if os.path.isdir(options.ca_bundle) else "cafile": options.ca_bundle}
    try:
        context = ssl.create_default_context(**bundle)
        if options.client_cert is not None:
            context.load_cert_chain(options.client_cert)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(
            "the certificates that https needs can't be read; check AWS_CA_BUNDLE (s3://) or "
            "REQUESTS_CA_BUNDLE (az://)",
            uri=uri,
            cause=reason(exc),
        ) from exc
    return context
