"""Checks outside of the bucket: credentials, endpoint, connection and clock."""

from __future__ import annotations

import os
import re
import time
from urllib.parse import urlsplit

from cloudckpt.doctor.findings import Finding, Values, failed, ok, warning
from cloudckpt.stores.credentials import Access, Origin
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.rest import http_date

__all__ = ["connection", "credentials", "endpoint"]

_SOON = 3600.0  # seconds
# clouds refuse requests whose signature differs from their clock by more than 15 minutes:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html (RequestTimeTooSkewed)
_MOST_SKEW = 900.0
_USUAL_SKEW = 60.0
# the variables that decide where requests go; profiles and the arguments of options may do so too
_DECIDING = re.compile(
    r"CLOUDCKPT_(S3|GCS|AZURE)_ENDPOINT_URL|CLOUDCKPT_S3_(REGION|PROFILE)"
    r"|AWS_(ENDPOINT_URL(_S3)?|REGION|DEFAULT_REGION|PROFILE)"
    r"|STORAGE_EMULATOR_HOST|GOOGLE_CLOUD_UNIVERSE_DOMAIN"
    r"|AZURE_STORAGE_(CONNECTION_STRING|ACCOUNT(_NAME)?)"
)


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
        return warning(whose, "for a long job use credentials that last longer", values=values)
    return ok(whose, values=values)


def endpoint(access: Access) -> Finding:
    """Reports the endpoint and region, and which variables that may decide them are set.

    Warns of plain http, unless the endpoint is on this machine.
    """
    parts = urlsplit(access.url)
    address = f"{parts.scheme}://{parts.netloc}"
    given = ", ".join(sorted(filter(_DECIDING.fullmatch, os.environ)))
    found = f"{address}; region {access.region}" if access.region else address
    found += f"; variables that are set: {given}" if given else ""
    values: Values = {"endpoint": address, "region": access.region}
    if parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        return warning(found, "http is not encrypted: use https outside of tests", values=values)
    return ok(found, values=values)


def connection(access: Access, http: HttpClient) -> Finding:
    """Sends a request without credentials; reports the response time and the clock's error.

    Raises:
        StoreError: If no response comes.
    """
    began, clock = time.monotonic(), time.time()
    with http.send("HEAD", access.url, {}) as reply:
        took = time.monotonic() - began
        date = http_date(reply.headers.get("Date", ""))
    way = ", through a proxy" if access.http_options.proxy else ""
    found = f"answered after {took * 1000:.0f} ms{way}"
    if date is None:
        return ok(found, values={"seconds": took, "skew_seconds": None})
    skew = round(clock + took / 2 - date)
    values: Values = {"seconds": took, "skew_seconds": skew}
    side = "ahead of" if skew > 0 else "behind"
    state = f"{_duration(abs(skew))} {side} the server's" if abs(skew) > 1 else "right"
    found, advice = f"{found}; this machine's clock is {state}", "set the clock by NTP or chrony"
    if abs(skew) > _MOST_SKEW:
        return failed(f"{found}: requests will be rejected", advice, values=values)
    if abs(skew) > _USUAL_SKEW:
        return warning(found, advice, values=values)
    return ok(found, values=values)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
