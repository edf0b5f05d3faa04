"""How connections are made: the user's limits, proxies and certificates, and TLS out of these.

And, for users, what says so: which setting names an endpoint or a region.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import urllib3
import urllib3.exceptions
import urllib3.util.ssl_

from cloudckpt.config import Config
from cloudckpt.config.general import NATIVE_TLS
from cloudckpt.config.options import Options
from cloudckpt.stores.http.native_tls import LongReadTLSSocket, TLSSocket

__all__ = ["LONGER", "Contexts", "HttpOptions", "Route", "first_set", "named_by"]

LONGER = 15
"""How many times as long as others the answer to a completion may take."""


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How connections are made: see :class:`cloudckpt.config.Config` for the times (seconds)."""

    connections: int
    connect_timeout: float
    read_timeout: float
    stall_timeout: float
    completion_timeout: float = 900.0
    proxy: str | None = field(default=None, repr=False)  # its URL may have a password
    ca_bundle: str | None = None
    client_cert: str | None = None
    verify_tls: bool = True
    native_tls: bool = True

    @classmethod
    def of(cls, config: Config, **others: Any) -> HttpOptions:
        """What the user wants, and what the store's own settings add."""
        return cls(
            connections=config.most_connections,
            connect_timeout=config.connect_timeout,
            read_timeout=config.read_timeout,
            completion_timeout=LONGER * config.read_timeout,
            stall_timeout=config.stall_timeout,
            native_tls=os.environ.get(NATIVE_TLS) != "0",
            **others,
        )

    @classmethod
    def of_environment(cls, config: Config, endpoint: str) -> HttpOptions:
        """With the proxy and the certificates that ``requests`` finds in the environment.

        Google's and Azure's own clients send their requests by it.
        """
        import requests.utils

        found = requests.utils.get_environ_proxies(endpoint)
        bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
        return cls.of(
            config,
            proxy=requests.utils.select_proxy(endpoint, found),
            ca_bundle=bundle or requests.utils.DEFAULT_CA_BUNDLE_PATH,
        )


@dataclass(frozen=True, kw_only=True)
class Route:
    """How a bucket is reached.

    Attributes:
        url: Of the bucket.
        endpoint_from: What names the endpoint, such as ``AWS_ENDPOINT_URL_S3``.
        region: That requests are signed for; empty where there are none.
        region_from: What names the region.
        http: How connections are made.
    """

    url: str
    endpoint_from: str
    region: str = ""
    region_from: str = ""
    http: HttpOptions


def named_by(options: Options, name: str) -> str:
    """What gives an option its value: its variable, or an argument; empty if nothing does."""
    value = getattr(options, name)
    if value is None:
        return ""
    variable = f"{options.variables}{name.upper()}"
    if os.environ.get(variable) == value:
        return variable
    return f"{type(options).__name__}({name}=…)"


def first_set(*variables: str) -> str:
    """The first of these environment variables that says something; empty if none does."""
    return next((name for name in variables if os.environ.get(name, "").strip()), "")


class Contexts:
    """The TLS of one client's connections: its files are read once, which takes 24 ms of CPU."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._made: dict[type[ssl.SSLSocket], ssl.SSLContext] = {}

    def to_store(self) -> ssl.SSLContext:
        """Of the sockets that bodies come by."""
        return self._of(LongReadTLSSocket if self._options.native_tls else TLSSocket)

    def to_proxy(self) -> ssl.SSLContext:
        """Of those to a proxy that itself speaks TLS."""
        return self._of(ssl.SSLSocket)

    def _of(self, kind: type[ssl.SSLSocket]) -> ssl.SSLContext:
        """Made when it is first needed; what can't be read fails each connection, by its name."""
        with self._lock:
            if kind not in self._made:
                context = self._read()
                context.sslsocket_class = kind
                self._made[kind] = context
            return self._made[kind]

    def _read(self) -> ssl.SSLContext:
        options = self._options
        context = urllib3.util.ssl_.create_urllib3_context(
            cert_reqs=ssl.CERT_REQUIRED if options.verify_tls else ssl.CERT_NONE
        )
        if options.ca_bundle is None:
            context.load_default_certs()
        else:
            is_folder = os.path.isdir(options.ca_bundle)
            where = {"capath" if is_folder else "cafile": options.ca_bundle}
            try:
                context.load_verify_locations(**where)
            except OSError as exc:
                raise urllib3.exceptions.SSLError(exc) from exc
        if options.client_cert is not None:
            context.load_cert_chain(options.client_cert)
        # urllib3 sets these for each connection, while another thread may copy them without the GIL
        context.set_alpn_protocols(urllib3.util.ssl_.ALPN_PROTOCOLS)
        context.set_alpn_protocols = _are_set  # type: ignore[method-assign, assignment]
        return context


def _are_set(protocols: Iterable[str]) -> None:
    """In place of a setter whose value is there."""
