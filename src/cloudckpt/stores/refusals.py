"""Maps a cloud's error response to the exception to raise; shared by all vendors.

Each vendor supplies a table of :class:`Meaning`; :func:`refusal` looks an error response up in it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cloudckpt import errors
from cloudckpt.errors import StoreError
from cloudckpt.stores.redaction import excerpt
from cloudckpt.stores.rest import http_date

__all__ = ["DAMAGED", "NO_UPLOAD", "Meaning", "Refusal", "kind_of", "refusal", "retry_after"]


class Meaning(NamedTuple):
    """An entry of a vendor's table: the exception that some error codes stand for.

    A code needs an entry only if its HTTP status alone would give the wrong exception class, or if
    the usual message of the class does not say enough. The store's own words are shown as well, in
    the error's cause.

    Attributes:
        codes: A regular expression for the error codes; or an HTTP status, which then applies to
            all codes without an entry.
        kind: The exception class; None: the class of the HTTP status.
        text: The message; empty: the usual message of the class.
        is_certain: Whether the vendor documents that a request refused with this code was not
            carried out, whatever the status.
    """

    codes: str
    kind: type[StoreError] | None
    text: str = ""
    is_certain: bool = False


DAMAGED = "the store received damaged or incomplete bytes; check the network and its proxies"
"""The message for a body that does not match its checksum or length."""
NO_UPLOAD = "the upload does not exist any more: it was completed or aborted; save again"
"""The message for a multipart upload that the store does not know."""

_CODE = re.compile(r"[A-Za-z][\w.]{0,99}")
_REQUEST_IDS = ("x-amz-request-id", "x-amz-id-2", "x-guploader-uploadid", "x-ms-request-id")
"""The response headers with the request ID, by which a vendor's support finds a request."""
_TIMEOUTS = {"requesttimeout", "requesttimeoutexception", "operationtimedout"}  # in lower case

_TEXTS: Mapping[type[StoreError], str] = {
    errors.AccessDeniedError: "access denied; check the policies for these credentials",
    errors.BucketNotFoundError: (
        "the bucket does not exist (on Azure: the container); check its name and the endpoint"
    ),
    errors.ClockError: "this machine's clock is wrong by minutes; set it by NTP",
    errors.CredentialsError: "the store does not accept these credentials; correct or renew them",
    errors.InvalidRequestError: "the store rejects the request; see the reason in the cause",
    errors.ObjectNotFoundError: "there is no such object; check the location",
    errors.PreconditionFailedError: (
        "the condition of the request does not hold: the object exists already, or was replaced or "
        "deleted after its version was read; read it again before you go on"
    ),
    errors.RangeNotSatisfiableError: "the object ends before the requested range; write it again",
    errors.ServerError: "the store reports a temporary failure; try again later",
    errors.StorageFullError: (
        "the disks of the store or a quota are full; free space, or raise the quota"
    ),
    errors.ThrottledError: "the store is overloaded or unavailable; try again later",
    errors.TLSError: "the store demands a newer version of TLS; update this machine's OpenSSL",
    errors.WrongRegionError: "the bucket is in another region; set AWS_REGION or S3Options.region",
}
_BY_STATUS: Mapping[int, type[StoreError]] = {
    200: errors.ServerError,  # an error in the body of a 200
    401: errors.CredentialsError,
    403: errors.AccessDeniedError,
    404: errors.ObjectNotFoundError,
    408: errors.ServerError,
    409: errors.ServerError,  # conflict with another operation on the same object
    412: errors.PreconditionFailedError,
    416: errors.RangeNotSatisfiableError,
    421: errors.ServerError,  # misdirected request: the connection leads to another host
    425: errors.ServerError,  # too early: sent before the TLS handshake was complete
    429: errors.ThrottledError,
    499: errors.ServerError,  # from a gateway that considers the client gone
    501: errors.InvalidRequestError,
    503: errors.ThrottledError,
    507: errors.StorageFullError,
}
_OF_ALL = (
    Meaning(
        "407",
        errors.InvalidRequestError,
        "a proxy requires a user and a password; write them into its URL (HTTP_PROXY, HTTPS_PROXY)",
    ),
    Meaning(
        "413",
        errors.InvalidRequestError,
        "the store, or a proxy on the way, takes no body of this size: raise its limit (nginx: "
        "client_max_body_size), or send smaller parts: Config(part_size=...), CLOUDCKPT_PART_SIZE",
    ),
)


def kind_of(status: int) -> type[StoreError]:
    """Returns the exception class for an HTTP status without a more specific error code."""
    return _BY_STATUS.get(
        status, errors.ServerError if status >= 500 else errors.InvalidRequestError
    )


class Refusal(NamedTuple):
    """The error code and the texts of an error response, as its vendor writes them.

    Attributes:
        code: The error code in the vendor's format; empty if the response has none.
        words: Further texts of the response, for the message.
        alias: The error code to look up in place of a misleading `code`; empty if it is right.
        is_foreign: Whether stores of this vendor give an error code in such a response, so that one
            without a code comes from a proxy or a gateway.
        permission: The permission without which the store answers a read of a missing object with
            "access denied"; empty if there is none.
    """

    code: str
    words: Sequence[str] = ()
    alias: str = ""
    is_foreign: bool = False
    permission: str = ""


def refusal(
    table: Sequence[Meaning],
    response: Refusal,
    status: int,
    headers: Mapping[str, str],
    action: str,
    uri: str,
) -> StoreError:
    """Returns the exception for an error response: by its error code, else by its HTTP status.

    A 429 is always a ThrottledError: its code may name a quota or a denial, which would end a job
    that could go on a minute later. A 404 without an error code, though the store would give one
    (``is_foreign``), comes from a gateway, and is a ServerError. If it were believed, a training
    job would start from scratch although its checkpoints exist, and a sweep would delete the
    objects of an intact checkpoint.

    Args:
        table: The vendor's error codes.
        response: The response's error code and texts.
        status: The HTTP status; 0 if unknown.
        headers: The headers of the response, such as ``retry-after`` and request IDs.
        action: The operation that failed, for the message.
        uri: The object or bucket of the request.
    """
    code = response.code
    headers = {name.lower(): value.strip() for name, value in headers.items()}
    if status == 404 and response.is_foreign and not _CODE.fullmatch(code):
        foreign = errors.ServerError(
            "another server, such as a proxy, has answered in place of the store; check the "
            "endpoint and the proxy (try cloudckpt doctor)",
            uri=uri,
            cause=f"{action}: HTTP {status}, without an error code of the store",
        )
        foreign.status = status
        return foreign
    known = None if status == 429 else _find(table, response.alias or code, status)
    meaning = known or _find((*table, *_OF_ALL), str(status), status)
    kind = (meaning and meaning.kind) or kind_of(400 if known and status == 200 else status)
    text = (meaning and meaning.text) or _TEXTS[kind]
    is_known = known is not None and (known.is_certain or kind is not errors.ServerError)
    shown = " ".join(filter(None, (excerpt(code), f"HTTP {status}" if status else "")))
    cause = ": ".join(filter(None, (action, shown, *map(excerpt, response.words))))
    identity = " ".join(excerpt(headers[name]) for name in _REQUEST_IDS if headers.get(name))
    if identity:
        cause += f"; request {identity}"
    certain = _is_certain(code, status, kind, is_known=is_known)
    error = kind(text, uri=uri, cause=cause, certain=certain)
    error.status = status or None
    if isinstance(error, errors.TransientStoreError):
        error.retry_after = retry_after(headers)
    is_read = action in ("GET", "HEAD")
    if isinstance(error, errors.AccessDeniedError) and response.permission and is_read:
        error.message += (
            f"; without the permission {response.permission}, the store gives the same answer for "
            "an object that does not exist"
        )
    if isinstance(error, errors.ClockError) and (ahead := _ahead(headers)) is not None:
        error.ahead = ahead
        minutes, where = round(abs(ahead) / 60), "ahead of" if ahead > 0 else "behind"
        error.message += f" (it is {minutes} min {where} the store's)"
        if not minutes:
            error.message = "the request arrived minutes after it was signed; check the network"
    return error


def _find(table: Sequence[Meaning], code: str, status: int) -> Meaning | None:
    """Returns the table entry of an error code; None if there is none.

    If the status stands for a temporary failure, as 429 and most 5xx do, entries with lasting
    errors are skipped: a store that fails internally may report a reason that goes away with the
    failure.
    """
    passing = (errors.ServerError, errors.ThrottledError)
    may_pass = kind_of(status) in passing and status not in (200, 409)
    for meaning in table:
        if may_pass and meaning.kind and not issubclass(meaning.kind, errors.TransientStoreError):
            continue
        if re.fullmatch(meaning.codes, code):
            return meaning
    return None


def _is_certain(code: str, status: int, kind: type[StoreError], *, is_known: bool) -> bool:
    """Returns whether the response proves that the store itself did not carry out the request.

    A gateway that responds in the store's place may still have delivered the request: Envoy sends
    503 when its connection to the store breaks, possibly after the request was sent. `is_known`
    says whether the vendor's table lists the code for requests that are not carried out.
    """
    if not _CODE.fullmatch(code) or code.lower() in _TIMEOUTS:
        return False
    if status == 200 and kind is errors.ThrottledError:  # in the middle of the work
        return False
    return is_known or 300 <= status < 499  # 499 is sent by gateways, not by stores


def _ahead(headers: Mapping[str, str]) -> float | None:
    """Returns the local clock's lead over a response's date, in seconds; None without a date."""
    date = http_date(headers.get("date", ""))
    return None if date is None else time.time() - date


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds to wait that the ``Retry-After`` header of a response asks for.

    The header is a number of seconds, or a date; a date is compared with the response's own
    ``Date`` header, as this machine's clock may be wrong.

    Args:
        headers: The headers of the response; their names are in lower case.

    Returns:
        The seconds, 0.0 for the number 0; None if the header is missing or not valid, or if its
        date has passed.
    """
    wait = headers.get("retry-after", "")
    if wait.isascii() and wait.isdigit():
        return float(wait)
    if (date := http_date(wait)) is None:
        return None
    seconds = date - (http_date(headers.get("date", "")) or time.time())
    return seconds if seconds > 0 else None
