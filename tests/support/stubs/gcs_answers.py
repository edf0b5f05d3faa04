"""What goes over the wire of the Cloud Storage stub: requests, answers and refusals.

Documented (https://cloud.google.com/storage/docs/json_api/v1/status-codes and
.../xml-api/reference-status): the shape of both error bodies, the statuses, the reasons and codes,
and the text of 412. Taken from reports of what the service sent: the texts of the other refusals,
the reason ``required`` of a missing project (documented is ``UserProjectMissing``), the plain text
instead of JSON where media was asked for. Assumed: the XML code ``SlowDown`` for 429.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_XML_HEAD = "<?xml version='1.0' encoding='UTF-8'?>"

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Request:
    """A request as the log keeps it.

    Attributes:
        method: GET, PUT, …
        path: As sent, percent-encoded, without the query.
        query: Decoded; a parameter without a value has an empty one.
        headers: By lower-case name.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def payer(self) -> str | None:
        """The project that is to pay."""
        return self.query.get("userProject") or self.headers.get("x-goog-user-project")


@dataclass(frozen=True)
class Call:
    """A request under way: what the log keeps, and the body."""

    request: Request
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int = 200
    headers: Headers = ()
    body: bytes = b""


@dataclass
class RefusalError(Exception):
    """A request that is turned down, in the words of both APIs."""

    status: int
    reason: str
    message: str
    code: str

    def as_json(self) -> Answer:
        entry = {"message": self.message, "domain": "global", "reason": self.reason}
        error = {"code": self.status, "message": self.message, "errors": [entry]}
        return json_answer({"error": error}, self.status)

    def as_text(self) -> Answer:
        """For requests of media, even where they are part of the JSON API."""
        kind = ("Content-Type", "text/html; charset=UTF-8")
        return Answer(self.status, [kind], self.message.encode())

    def as_xml(self) -> Answer:
        inner = f"<Code>{self.code}</Code><Message>{escape(self.message)}</Message>"
        return xml_answer(f"<Error>{inner}</Error>", self.status)


def json_answer(value: object, status: int = 200) -> Answer:
    body = json.dumps(value).encode()
    return Answer(status, [("Content-Type", "application/json; charset=UTF-8")], body)


def xml_answer(xml: str, status: int = 200, headers: Headers = ()) -> Answer:
    kind = ("Content-Type", "application/xml; charset=UTF-8")
    return Answer(status, [kind, *headers], f"{_XML_HEAD}{xml}".encode())


def no_bucket() -> RefusalError:
    message = "The specified bucket does not exist."
    return RefusalError(404, "notFound", message, "NoSuchBucket")


def no_object(bucket: str, key: str) -> RefusalError:
    return RefusalError(404, "notFound", f"No such object: {bucket}/{key}", "NoSuchKey")


def no_upload() -> RefusalError:
    message = "The requested upload was not found."
    return RefusalError(404, "notFound", message, "NoSuchUpload")


def condition_not_met() -> RefusalError:
    message = "At least one of the pre-conditions you specified did not hold."
    return RefusalError(412, "conditionNotMet", message, "PreconditionFailed")


def invalid(message: str, code: str = "InvalidArgument") -> RefusalError:
    return RefusalError(400, "invalid", message, code)


def bad_checksum(given: str, computed: str) -> RefusalError:
    message = f'Provided CRC32C "{given}" doesn\'t match calculated CRC32C "{computed}".'
    return RefusalError(400, "invalid", message, "BadDigest")


def out_of_range() -> RefusalError:
    message = "Request range not satisfiable"
    return RefusalError(416, "requestedRangeNotSatisfiable", message, "InvalidRange")


def no_user_project() -> RefusalError:
    message = "Bucket is a requester pays bucket but no user project provided."
    return RefusalError(400, "required", message, "UserProjectMissing")


def too_fast(bucket: str, key: str) -> RefusalError:
    message = (
        f"The object {bucket}/{key} exceeded the rate limit for object mutation operations "
        "(create, update, and delete). Please reduce your request rate. "
        "See https://cloud.google.com/storage/docs/gcs429."
    )
    return RefusalError(429, "rateLimitExceeded", message, "SlowDown")


def retained(bucket: str, key: str, until: str) -> RefusalError:
    message = (
        f"Object '{bucket}/{key}' is subject to bucket's retention policy or object retention "
        f"and cannot be deleted or overwritten until {until}"
    )
    return RefusalError(403, "retentionPolicyNotMet", message, "RetentionPolicyNotMet")
