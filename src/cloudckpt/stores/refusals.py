"""What refusals of all clouds have in common: the statuses of HTTP, and when to come back."""

from __future__ import annotations

import datetime
import email.utils
import re
from collections.abc import Mapping

from cloudckpt.errors import (
    AccessDeniedError,
    CredentialsError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    ServerError,
    StorageFullError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores.credentials import masked

__all__ = [
    "CUT_SHORT",
    "DAMAGED",
    "EXPIRED",
    "NOT_AS_EXPECTED",
    "NO_OBJECT",
    "NO_UPLOAD",
    "SLOW_DOWN",
    "TOO_SHORT",
    "Meaning",
    "by_code",
    "by_status",
    "is_certain",
    "from_elsewhere",
    "meant",
    "refusal",
]

Meaning = tuple[type[StoreError], str]
"""The error to raise, and what it says."""

CUT_SHORT: Meaning = (ServerError, "the body arrived short")
DAMAGED: Meaning = (ServerError, "the bytes arrived damaged")
EXPIRED: Meaning = (CredentialsError, "the credentials have expired; renew them")
NOT_AS_EXPECTED: Meaning = (PreconditionFailedError, "the object is not in the expected state")
NO_OBJECT: Meaning = (ObjectNotFoundError, "there is no such object")
NO_UPLOAD: Meaning = (ObjectNotFoundError, "there is no such multipart upload any more")
SLOW_DOWN: Meaning = (ThrottledError, "the store asks to slow down")
TOO_SHORT: Meaning = (RangeNotSatisfiableError, "the object ends before the range does")

_CODE = re.compile(r"[A-Za-z][\w.]*")
_REQUEST_IDS = ("x-amz-request-id", "x-amz-id-2", "x-guploader-uploadid", "x-ms-request-id")
"""The headers with which the vendors' support finds a request in their logs."""
_TIMEOUTS = {"requesttimeout", "operationtimedout"}  # in lower case

_BY_STATUS: Mapping[int, Meaning] = {
    401: (CredentialsError, "the store does not accept these credentials"),
    403: (AccessDeniedError, "access denied; check the policies for these credentials"),
    404: NO_OBJECT,
    408: (ServerError, "the store gave up waiting for the request"),
    409: (ServerError, "another operation on the same object is under way"),
    412: NOT_AS_EXPECTED,
    416: TOO_SHORT,
    429: SLOW_DOWN,
    501: (InvalidRequestError, "the store does not know this operation"),
    503: (ThrottledError, "the store is unavailable for the moment"),
    507: (StorageFullError, "the store's disks are full"),
}


def by_code(texts: Mapping[type[StoreError], Mapping[str, str]]) -> dict[str, Meaning]:
    """What each code means, given texts for the codes of each class, with spaces between codes."""
    return {
        code: (kind, text)
        for kind, of_kind in texts.items()
        for codes, text in of_kind.items()
        for code in codes.split()
    }


def by_status(status: int) -> Meaning:
    """What an HTTP status says where the store's own code says nothing."""
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500 or status == 200:  # an error in the body of a success
        return ServerError, "the store failed inside"
    return InvalidRequestError, "the store rejects the request"


def meant(status: int, known: Meaning | None, own: Mapping[int, Meaning]) -> Meaning:
    """What an answer means: by its code, else by its status.

    429 always asks to slow down. The code may then name a quota, or a refusal as such, and would
    end what goes well a minute later.

    Args:
        status: The HTTP status.
        known: What the vendor documents about the code, if it does.
        own: What statuses mean to this vendor in particular.
    """
    if status == 429:
        return SLOW_DOWN
    return known or own.get(status) or by_status(status)


def is_certain(code: str, status: int, known: Meaning | None) -> bool:
    """Whether an answer is the store's own word that it has not carried out the request.

    A gateway that answers in the store's place may carry the request out later: Envoy's 503 says
    that its connection to the store broke, perhaps behind the request.

    Args:
        code: The error code, if the answer has one in the format of the vendor; else empty.
        status: The HTTP status.
        known: What the vendor documents about the code, if it does.
    """
    if not _CODE.fullmatch(code) or code.lower() in _TIMEOUTS:
        return False
    if known is not None and known[0] is not ServerError:
        return True
    return 300 <= status < 500


def from_elsewhere(
    status: int, code: str, body: bytes, action: str, uri: str
) -> ServerError | None:
    """The error for a 404 that some gateway has answered in the store's place; else None.

    The page of a proxy or of a captive portal says nothing about objects; taken for the store's
    word, it would make a training job begin anew over its checkpoints. A store that answers
    without any body can't be told from those.

    Args:
        status: The HTTP status.
        code: The error code of the store, if there is one in the body or the headers.
        body: The body, if stores of this kind answer with none but their own.
        action: What was tried.
        uri: On what.
    """
    if status != 404 or code or not body.strip():
        return None
    return ServerError(
        f"{action}: something between this machine and the store has answered in its place; check "
        "the endpoint and the proxy",
        uri=uri,
        cause=f"HTTP {status} without an error code of the store",
    )


def refusal(
    meaning: Meaning,
    action: str,
    uri: str,
    cause: str | None,
    headers: Mapping[str, str],
    *,
    certain: bool,
) -> StoreError:
    """The error; it knows when the store wants to be asked again, if the answer says so.

    Args:
        meaning: What the answer means.
        action: What was tried.
        uri: On what.
        cause: The store's own words.
        headers: Of the answer, in any case.
        certain: See :func:`is_certain`.
    """
    kind, text = meaning
    given = {name.lower(): value.strip() for name, value in headers.items()}
    identity = " ".join(given[name] for name in _REQUEST_IDS if given.get(name))
    words = "; ".join((*filter(None, [cause]), *([f"request {identity}"] if identity else ())))
    error = kind(
        f"{action}: {text}", uri=uri, cause=masked(words) if words else None, certain=certain
    )
    if isinstance(error, TransientStoreError):
        error.retry_after = _retry_after(given)
    return error


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the store wants us to wait: a number or a date, as HTTP has it."""
    for name, a_second in (("x-ms-retry-after-ms", 1000), ("retry-after", 1)):
        wait = headers.get(name, "")
        if wait.isascii() and wait.isdigit():
            return float(wait) / a_second
    try:
        date = email.utils.parsedate_to_datetime(wait)
    except (ValueError, TypeError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.timezone.utc)
    seconds = (date - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
    return seconds if seconds > 0 else None
