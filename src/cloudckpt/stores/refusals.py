"""What the refusals of all clouds have in common: from an answer to the error that it means.

Each vendor has one table of :class:`Meaning`; :func:`refusal` makes the error of an answer from it.
"""

from __future__ import annotations

import datetime
import email.utils
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ClockError,
    CredentialsError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    ServerError,
    StorageFullError,
    StoreError,
    ThrottledError,
    TLSError,
    TransientStoreError,
    WrongRegionError,
)
from cloudckpt.stores.redaction import told

__all__ = ["Meaning", "kind_of", "refusal", "retry_after"]


class Meaning(NamedTuple):
    """What some codes of a vendor mean.

    They need an entry only if their class is not that of each HTTP status that they come with (or
    the text says what the store, whose own words are always shown, does not).

    Attributes:
        codes: A pattern of the codes; or an HTTP status, which other codes with it then mean.
        kind: The error to raise; None: that of the status.
        text: What it says, in place of the usual text of its class.
        is_certain: Whether it is documented that the request is then not carried out, whatever the
            status.
    """

    codes: str
    kind: type[StoreError] | None
    text: str = ""
    is_certain: bool = False


_CODE = re.compile(r"[A-Za-z][\w.]{0,99}")
_REQUEST_IDS = ("x-amz-request-id", "x-amz-id-2", "x-guploader-uploadid", "x-ms-request-id")
"""The headers with which the vendors' support finds a request in their logs."""
_TIMEOUTS = {"requesttimeout", "requesttimeoutexception", "operationtimedout"}  # in lower case

_TEXTS: Mapping[type[StoreError], str] = {
    AccessDeniedError: "access denied; check the policies for these credentials",
    BucketNotFoundError: "the bucket does not exist; check its name and the endpoint",
    ClockError: "this machine's clock is wrong by minutes",
    CredentialsError: "the store does not accept these credentials; correct or renew them",
    InvalidRequestError: "the store rejected the request; see the code in the cause",
    ObjectNotFoundError: "the object does not exist",
    PreconditionFailedError: (
        "the object is not in the expected state: it was written, replaced or deleted meanwhile"
    ),
    RangeNotSatisfiableError: "the object ends before the requested range",
    ServerError: "the store had an internal error",
    StorageFullError: "the disks of the store or a quota are full; free space, or raise the quota",
    ThrottledError: "the store is overloaded or unavailable at the moment",
    TLSError: "the store demands a newer version of TLS than this machine has",
    WrongRegionError: "the bucket is in another region",
}
_BY_STATUS: Mapping[int, type[StoreError]] = {
    200: ServerError,  # an error in the body of a success
    401: CredentialsError,
    403: AccessDeniedError,
    404: ObjectNotFoundError,
    408: ServerError,
    409: ServerError,  # another operation on the same object is under way
    412: PreconditionFailedError,
    416: RangeNotSatisfiableError,
    421: ServerError,  # of a connection that leads to another host
    425: ServerError,  # sent too early within a connection
    429: ThrottledError,
    499: ServerError,  # a gateway for which this side has gone away
    501: InvalidRequestError,
    503: ThrottledError,
    507: StorageFullError,
}
_OF_ALL = (
    Meaning(
        "407",
        InvalidRequestError,
        "a proxy requires a user and a password; write them into its URL (HTTP_PROXY, HTTPS_PROXY)",
    ),
)


def kind_of(status: int) -> type[StoreError]:
    """The error that an HTTP status means where the store's own code says nothing."""
    return _BY_STATUS.get(status, ServerError if status >= 500 else InvalidRequestError)


def refusal(
    table: Sequence[Meaning],
    status: int,
    code: str,
    words: Sequence[str],
    action: str,
    uri: str,
    headers: Mapping[str, str],
    *,
    means: str = "",
    is_foreign: bool = False,
) -> StoreError:
    """The error for an answer that is no success: by its code, else by its status.

    429 always asks to slow down: the code may then name a quota, or a refusal as such, and would
    end what goes well a minute later. A 404 without a code may be what some gateway has answered in
    the store's place: taken for the store's word, it would make a training job begin anew over its
    checkpoints, and let the objects of a checkpoint that is there be swept away.

    Args:
        table: What the vendor documents.
        status: The HTTP status; 0 if it is not known.
        code: The error code, if the answer has one in the format of the vendor; else empty.
        words: What else the store says.
        action: What was tried.
        uri: On what.
        headers: Of the answer; they may tell when the store wants to be asked again.
        means: The code that such an answer should have, if it should have another.
        is_foreign: Whether stores of this kind never answer so without a code.
    """
    if status == 404 and is_foreign and not _CODE.fullmatch(code):
        foreign = ServerError(
            "something between this machine and the store has answered in its place; check the "
            "endpoint and the proxy (cloudckpt doctor)",
            uri=uri,
            cause=f"{action}: HTTP {status} without an error code of the store",
        )
        foreign.status = status
        return foreign
    known = None if status == 429 else _find(table, means or code, status)
    meaning = known or _find((*table, *_OF_ALL), str(status), status)
    kind = (meaning and meaning.kind) or kind_of(400 if known and status == 200 else status)
    text = (meaning and meaning.text) or _TEXTS[kind]
    is_known = known is not None and (known.is_certain or kind is not ServerError)
    given = {name.lower(): value.strip() for name, value in headers.items()}
    said = " ".join(filter(None, (told(code), f"HTTP {status}" if status else "")))
    cause = ": ".join(filter(None, (action, said, *map(told, words))))
    identity = " ".join(told(given[name]) for name in _REQUEST_IDS if given.get(name))
    if identity:
        cause += f"; request {identity}"
    certain = _is_certain(code, status, is_known=is_known)
    error = kind(text, uri=uri, cause=cause, certain=certain)
    error.status = status or None
    if isinstance(error, TransientStoreError):
        error.retry_after = retry_after(given)
    if isinstance(error, ClockError) and (ahead := _ahead(given)) is not None:
        error.ahead = ahead
        minutes, where = round(abs(ahead) / 60), "ahead of" if ahead > 0 else "behind"
        error.message += f": it is {minutes} minutes {where} the store's"
        if not minutes:
            error.message = "the request reached the store minutes after it was signed"
    return error


def _find(table: Sequence[Meaning], code: str, status: int) -> Meaning | None:
    """The entry of a code. A store that fails inside may give a reason that passes with it."""
    passes = kind_of(status) in (ServerError, ThrottledError) and status not in (200, 409)
    for meaning in table:
        if passes and meaning.kind and not issubclass(meaning.kind, TransientStoreError):
            continue
        if re.fullmatch(meaning.codes, code):
            return meaning
    return None


def _is_certain(code: str, status: int, *, is_known: bool) -> bool:
    """Whether an answer is the store's own word that it has not carried out the request.

    A gateway that answers in the store's place may carry the request out later: Envoy's 503 says
    that its connection to the store broke, perhaps behind the request.
    """
    if not _CODE.fullmatch(code) or code.lower() in _TIMEOUTS:
        return False
    return is_known or 300 <= status < 499  # which is a gateway's


def _ahead(headers: Mapping[str, str]) -> float | None:
    """Seconds that this machine's clock is ahead of that of an answer, if that has a date."""
    date = _date(headers.get("date", ""))
    if date is None:
        return None
    return (datetime.datetime.now(datetime.timezone.utc) - date).total_seconds()


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the store wants us to wait: a number or a date, as HTTP has it.

    A date is compared with that of the answer: this machine's clock may be wrong. The names of the
    headers are in lower case.
    """
    for name, a_second in (("x-ms-retry-after-ms", 1000), ("retry-after", 1)):
        wait = headers.get(name, "")
        if wait.isascii() and wait.isdigit():
            return float(wait) / a_second
    date = _date(wait)
    if date is None:
        return None
    now = _date(headers.get("date", "")) or datetime.datetime.now(datetime.timezone.utc)
    seconds = (date - now).total_seconds()
    return seconds if seconds > 0 else None


def _date(text: str) -> datetime.datetime | None:
    """A time as headers write it; None if it is none."""
    try:
        date = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=datetime.timezone.utc)
