"""The options of HTTP connections (limits, proxy, certificates), and the TLS contexts made from
them.
"""

from __future__ import annotations

import os
import ssl
import threading
from dataclasses import dataclass, field

import urllib3
import urllib3.exceptions
import urllib3.util.ssl_

from cloudckpt.config import Config
from cloudckpt.stores.http.native_tls import LongReadTLSSocket

__all__ = ["LONGER", "Contexts", "HttpOptions", "first_set"]

LONGER = 15
"""How many times ``read_timeout`` the response to a completion or a copy may take to begin."""


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """The options of HTTP connections: the user's, the proxy and the certificates.

    Attributes:
        config: The user's options.
        proxy: The URL of the proxy; None for no proxy.
        ca_bundle: The file or folder of CA certificates; None for the system's.
        client_cert: The file of a client certificate and its key; None for no certificate.
    """

    config: Config
    proxy: str | None = field(default=None, repr=False)  # its URL may have a password
    ca_bundle: str | None = None
    client_cert: str | None = None

    @classmethod
    def of_environment(cls, config: Config, endpoint: str) -> HttpOptions:
        """Returns the options with the proxy and CA certificates that ``requests`` would use.

        Google's and Azure's own clients send their requests through ``requests``.
        """
        import requests.utils

        found = requests.utils.get_environ_proxies(endpoint)
        bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
        return cls(
            config=config,
            proxy=requests.utils.select_proxy(endpoint, found),
            ca_bundle=bundle or requests.utils.DEFAULT_CA_BUNDLE_PATH,
        )


def first_set(*variables: str) -> str:
    """Returns the name of the first of these variables that is set and not blank; else empty."""
    return next((name for name in variables if os.environ.get(name, "").strip()), "")


class Contexts:
    """The TLS context of one client; certificate files are read once, which takes 24 ms of CPU."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._made: ssl.SSLContext | None = None

    def get(self) -> ssl.SSLContext:
        """Returns the context, creating it on first use.

        Raises:
            urllib3.exceptions.SSLError: If the CA certificates can't be read.
            OSError: If the client certificate can't be read.
        """
        with self._lock:
            if self._made is None:
                self._made = self._read()
            return self._made

    def _read(self) -> ssl.SSLContext:
        options = self._options
        context = urllib3.util.ssl_.create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED)
        context.sslsocket_class = LongReadTLSSocket
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
        # urllib3 sets these on each connection, while another thread may be reading them without
        # the GIL
        context.set_alpn_protocols(urllib3.util.ssl_.ALPN_PROTOCOLS)
        context.set_alpn_protocols = lambda _: None  # type: ignore[method-assign, assignment]
        return context
