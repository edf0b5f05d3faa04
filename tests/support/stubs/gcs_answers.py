"""What goes over the wire of the Cloud Storage stub: requests, answers and refusals.

Documented (https://cloud.google.com/storage/docs/json_api/v1/status-codes and
.../xml-api/reference-status): the shape of both error bodies, the statuses, the reasons and codes,
and the texts of 401, of the general 403 and of 412. Taken from reports of what the service sent:
the texts of the other refusals, the reason ``required`` of a missing project (documented is
``UserProjectMissing``), the plain text instead of JSON where media was asked for. Assumed: the XML
codes ``SlowDown`` for 429 and ``MalformedXML``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

XML_HEAD = "<?xml version='1.0' encoding='UTF-8'?>"
XML_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Request:
    """A request as the log keeps it.

    Attributes:
        method: GET, PUT, …
        path: As sent, percent-encoded, without the query.
        query: Decoded; a parameter without a value has an empty one.
        headers: By lower-case name, without Authorization.
        token: Whether there was a bearer token, not which.
        size: Bytes of the body.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    token: bool
    size: int


@dataclass(frozen=True)
class Call:
    """A request under way: what the log keeps, and what it does not."""

    request: Request
    body: bytes
    bearer: str | None


@dataclass(frozen=True)
class Answer:
    """An answer; ``size`` is that of the body if it is not sent (HEAD)."""

    status: int = 200
    headers: Headers = ()
    body: bytes = b""
    size: int | None = None


@dataclass
class RefusalError(Exception):
    """A request that is turned down, in the words of both APIs."""

    status: int
    reason: str
    message: str
    code: str
    text: str | None = None
    domain: str = "global"
    location: tuple[str, str] | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)

    def as_json(self) -> Answer:
        entry = {"message": self.message, "domain": self.domain, "reason": self.reason}
        if self.location is not None:
            entry["locationType"], entry["location"] = self.location
        error = {"code": self.status, "message": self.message, "errors": [entry]}
        return json_answer({"error": error}, self.status, self.headers)

    def as_text(self) -> Answer:
        """For requests of media, even where they are part of the JSON API."""
        headers = [("Content-Type", "text/html; charset=UTF-8"), *self.headers]
        return Answer(self.status, headers, self.message.encode())

    def as_xml(self) -> Answer:
        details = f"<Details>{escape(self.message)}</Details>" if self.text else ""
        message = escape(self.text or self.message)
        inner = f"<Code>{self.code}</Code><Message>{message}</Message>{details}"
        return xml_answer(f"<Error>{inner}</Error>", self.status, self.headers)


def json_answer(value: object, status: int = 200, headers: Headers = ()) -> Answer:
    body = json.dumps(value).encode()
    return Answer(status, [("Content-Type", "application/json; charset=UTF-8"), *headers], body)


def xml_answer(xml: str, status: int = 200, headers: Headers = ()) -> Answer:
    body = f"{XML_HEAD}{xml}".encode()
    return Answer(status, [("Content-Type", "application/xml; charset=UTF-8"), *headers], body)


def no_bucket() -> RefusalError:
    message = "The specified bucket does not exist."
    return RefusalError(404, "notFound", message, "NoSuchBucket")


def no_object(bucket: str, key: str) -> RefusalError:
    message = f"No such object: {bucket}/{key}"
    return RefusalError(404, "notFound", message, "NoSuchKey", "The specified key does not exist.")


def no_upload() -> RefusalError:
    message = "The requested upload was not found."
    return RefusalError(404, "notFound", message, "NoSuchUpload")


def condition_not_met() -> RefusalError:
    return RefusalError(
        412,
        "conditionNotMet",
        "At least one of the pre-conditions you specified did not hold.",
        "PreconditionFailed",
        location=("header", "If-Match"),
    )


def invalid(message: str, code: str = "InvalidArgument") -> RefusalError:
    return RefusalError(400, "invalid", message, code)


def bad_checksum(given: str, computed: str) -> RefusalError:
    message = f'Provided CRC32C "{given}" doesn\'t match calculated CRC32C "{computed}".'
    text = "The Content-MD5 or x-goog-hash you specified did not match what we received."
    return RefusalError(400, "invalid", message, "BadDigest", text)


def out_of_range(size: int) -> RefusalError:
    return RefusalError(
        416,
        "requestedRangeNotSatisfiable",
        "Request range not satisfiable",
        "InvalidRange",
        "The requested range cannot be satisfied.",
        headers=[("Content-Range", f"bytes */{size}")],
    )


def no_credentials(given: bool) -> RefusalError:
    challenge = ("WWW-Authenticate", 'Bearer realm="https://accounts.google.com/"')
    return RefusalError(
        401,
        "authError" if given else "required",
        "Invalid Credentials" if given else "Login Required",
        "AuthenticationRequired",
        "Authentication required.",
        location=("header", "Authorization"),
        headers=[challenge],
    )


def denied(permission: str) -> RefusalError:
    message = (
        f"somebody@example.com does not have {permission} access to the Google Cloud Storage "
        f"object. Permission '{permission}' denied on resource (or it may not exist)."
    )
    return RefusalError(403, "forbidden", message, "AccessDenied", "Access denied.")


def no_user_project() -> RefusalError:
    message = "Bucket is a requester pays bucket but no user project provided."
    return RefusalError(400, "required", message, "UserProjectMissing")


def wrong_user_project() -> RefusalError:
    message = (
        "The caller does not have serviceusage.services.use access to the Google Cloud project."
    )
    return RefusalError(403, "forbidden", message, "UserProjectAccessDenied")


def too_fast(bucket: str, key: str) -> RefusalError:
    message = (
        f"The object {bucket}/{key} exceeded the rate limit for object mutation operations "
        "(create, update, and delete). Please reduce your request rate. "
        "See https://cloud.google.com/storage/docs/gcs429."
    )
    return RefusalError(429, "rateLimitExceeded", message, "SlowDown", domain="usageLimits")


def retained(bucket: str, key: str, until: str) -> RefusalError:
    message = (
        f"Object '{bucket}/{key}' is subject to bucket's retention policy or object retention "
        f"and cannot be deleted or overwritten until {until}"
    )
    text = "Object overwrite or deletion is not allowed due to retention policy."
    return RefusalError(403, "retentionPolicyNotMet", message, "RetentionPolicyNotMet", text)
