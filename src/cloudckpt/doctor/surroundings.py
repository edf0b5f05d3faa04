"""Checks outside of the bucket: credentials, endpoint, connection and clock."""

from __future__ import annotations

import dataclasses
import ipaddress
import time
from urllib.parse import urlsplit

from cloudckpt.doctor.findings import Finding, Values, failed, ok, skipped, warning
from cloudckpt.stores.credentials import Origin
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.http.options import Route
from cloudckpt.stores.rest import http_date

__all__ = ["Connection", "credentials", "endpoint"]

_SOON = 3600.0  # seconds
# clouds refuse requests whose signature differs from their clock by more than 15 minutes:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html (RequestTimeTooSkewed)
_MOST_SKEW = 900.0
_USUAL_SKEW = 60.0


def credentials(origin: Origin) -> Finding:
    """Reports where credentials come from, and when they expire."""
    whose = f"{origin.source}, {origin.identity}" if origin.identity else origin.source
    values: Values = {"source": origin.source, "identity": origin.identity, "ends": origin.ends}
    if origin.ends is None:
        return ok(whose, values=values)
    left = origin.ends - time.time()
    if left <= 0:
        return failed(f"{whose}; expired {_duration(-left)} ago", "renew them", values=values)
    whose = f"{whose}; valid for {_duration(left)}"
    if left < _SOON and "signature" in origin.source:  # all other credentials are renewed
        return warning(whose, "a long job needs credentials that last longer", values=values)
    return ok(whose, values=values)


def endpoint(route: Route) -> Finding:
    """Reports the endpoint, and the setting that supplied it; warns of unencrypted http."""
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


class Connection:
    """A connection to the store, which is tested by a request without credentials."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._http = HttpClient(dataclasses.replace(route.http, connections=1))
        self._skew: float | None = None
        self.interrupt = self._http.interrupt

    def test(self) -> Finding:
        """Connects, sends the request and reports the response time; keeps the clocks' difference.

        Raises:
            StoreError: If no response comes.
        """
        began, clock = time.monotonic(), time.time()
        with self._http.send("HEAD", self._route.url, {}) as reply:
            took = time.monotonic() - began
            date = http_date(reply.headers.get("Date", ""))
        self._skew = None if date is None else clock + took / 2 - date
        way = ", through a proxy" if self._route.http.proxy else ""
        return ok(f"answered after {took * 1000:.0f} ms{way}", values={"seconds": took})

    def clock(self) -> Finding:
        """Reports how far this machine's clock is from the server's."""
        if self._skew is None:
            return skipped("the server's response has no date to compare with")
        skew = round(self._skew)
        values: Values = {"skew_seconds": skew}
        side = "ahead of" if skew > 0 else "behind"
        found = f"{_duration(abs(skew))} {side} the server's" if abs(skew) > 1 else "is right"
        found, advice = f"this machine's clock {found}", "set it by NTP or chrony"
        if abs(skew) > _MOST_SKEW:
            return failed(f"{found}: requests will be rejected", advice, values=values)
        if abs(skew) > _USUAL_SKEW:
            return warning(found, advice, values=values)
        return ok(found, values=values)

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _is_near(host: str) -> bool:
    """Returns whether a host is localhost, or an address of this machine or a private network."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host == "localhost"
