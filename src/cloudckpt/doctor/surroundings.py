"""Checks outside the bucket: packages, credentials, the route to the store, the clock."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from cloudckpt._version import __version__
from cloudckpt.config import Config
from cloudckpt.doctor.findings import Finding, Values, failed, ok, skipped, warning
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.origins import Origin, Route

__all__ = ["Connection", "anonymous", "credentials", "endpoint", "names", "versions"]

_PACKAGES = (
    *("torch", "urllib3", "awscrt", "boto3", "google-auth", "google-cloud-storage"),
    *("azure-storage-blob", "azure-identity"),
)
_SOON = 3600.0  # seconds
# clouds refuse requests that were signed 15 minutes ago, or will be:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html (RequestTimeTooSkewed)
_MOST_SKEW = 900.0
_USUAL_SKEW = 60.0
_COST_OF_RECORDS = "a load takes 1.2 to 4 times the CPU; see docs/decisions.md"


def versions() -> Finding:
    """Which versions are installed."""
    found: dict[str, str | float | None] = {
        "cloudckpt": __version__,
        "Python": platform.python_version(),
        "OpenSSL": ssl.OPENSSL_VERSION.removeprefix("OpenSSL "),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    there = (f"{name} {version}" for name, version in found.items() if version is not None)
    return ok(", ".join(there), values=found)


def credentials(origin: Origin) -> Finding:
    """Where credentials come from, and how long they last."""
    whose = f"{origin.source}, {origin.identity}" if origin.identity else origin.source
    values: Values = {"source": origin.source, "identity": origin.identity, "ends": origin.ends}
    if origin.ends is None:
        return ok(whose, values=values)
    left = origin.ends - time.time()
    if left <= 0:
        return failed(f"{whose}; expired {_duration(-left)} ago", "renew them", values=values)
    whose = f"{whose}; valid for {_duration(left)}"
    if left < _SOON and "signature" in origin.source:  # all others are renewed
        return warning(whose, "a long job needs one that lasts longer", values=values)
    return ok(whose, values=values)


def anonymous(config: Config) -> Config:
    """The same options without credentials, for the same endpoint."""
    return dataclasses.replace(
        config,
        s3=dataclasses.replace(config.s3, anonymous=True, profile=None, requester_pays=False),
        gcs=dataclasses.replace(config.gcs, anonymous=True, impersonate=None),
        azure=dataclasses.replace(config.azure, anonymous=True),
    )


def endpoint(route: Route) -> Finding:
    """Where requests go, and which setting says so."""
    parts = urlsplit(route.url)
    found = f"{parts.scheme}://{parts.netloc}, by {route.endpoint_from}"
    if route.region:
        found += f"; region {route.region}, by {route.region_from}"
    values: Values = {
        "endpoint": f"{parts.scheme}://{parts.netloc}",
        "endpoint_from": route.endpoint_from,
        "region": route.region,
        "region_from": route.region_from,
    }
    if parts.scheme == "http" and not _is_near(parts.hostname or ""):
        return warning(found, "http is not encrypted: use https outside of tests", values=values)
    return ok(found, values=values)


def names(route: Route) -> Finding:
    """Whether the host, or the proxy if there is one, has an address."""
    proxy = route.http.proxy
    parts = urlsplit(proxy if proxy and "://" in proxy else f"//{proxy}" if proxy else route.url)
    host = parts.hostname or ""
    what = f"the proxy {host}" if proxy else host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        return failed(
            f"{what} has no address: {exc}",
            "check the name of the bucket, account or endpoint, the region, and the DNS of this "
            "machine or pod",
            values={"host": host},
        )
    addresses = sorted({str(address[0]) for *_, address in found})
    if addresses == [host]:
        return ok(f"{what} is an address already", values={"host": host, "addresses": 1})
    return ok(
        f"{what} is {', '.join(addresses[:4])}", values={"host": host, "addresses": len(addresses)}
    )


class Connection:
    """One request without credentials: any answer shows how the server is reached, and its time."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._http = HttpClient(dataclasses.replace(route.http, connections=1))
        self._skew: float | None = None
        self.interrupt = self._http.interrupt

    def look(self) -> Finding:
        """Connects and sends the request.

        Raises:
            StoreError: If no answer comes.
        """
        began, clock = time.monotonic(), time.time()
        with self._http.send("HEAD", self._route.url, {}) as reply:
            took = time.monotonic() - began
            told, tls, why = reply.headers.get("Date", ""), reply.tls, reply.obstacle
        try:
            self._skew = clock + took / 2 - parsedate_to_datetime(told).timestamp()
        except (TypeError, ValueError):
            self._skew = None
        found = f"answered after {took * 1000:.0f} ms"
        if self._route.http.proxy:
            found += ", through a proxy"
        if tls is None:
            return ok(f"{found}, without TLS", values={"seconds": took, "protocol": None})
        protocol, cipher = tls
        values: Values = {
            "seconds": took,
            "protocol": protocol,
            "cipher": cipher,
            "native": "no" if why else "yes",
        }
        found += f", by {protocol} with {cipher}"
        if why:
            slow = f"answers are received record by record ({why}): {_COST_OF_RECORDS}"
            return warning(f"{found}; {slow}", values=values)
        return ok(f"{found}; answers are received by whole buffers, without the GIL", values=values)

    def clock(self) -> Finding:
        """How far this machine's clock is from the server's."""
        if self._skew is None:
            return skipped("the server did not say what time it is")
        skew = round(self._skew)
        values: Values = {"skew_seconds": skew}
        side = "ahead of" if skew > 0 else "behind"
        found = f"{_duration(abs(skew))} {side} the server's" if abs(skew) > 1 else "is right"
        found, advice = f"this machine's clock {found}", "set it by NTP or chrony"
        if abs(skew) > _MOST_SKEW:
            return failed(f"{found}: requests are refused", advice, values=values)
        if abs(skew) > _USUAL_SKEW:
            return warning(found, advice, values=values)
        return ok(found, values=values)

    def close(self) -> None:
        """Releases the connection."""
        self._http.close()


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _is_near(host: str) -> bool:
    """Whether a host's name is that of this machine or in a private network."""
    return host in ("localhost", "::1") or host.startswith(("127.", "10.", "192.168."))
