"""How stores refuse: the same trouble in the words of each vendor.

These faults find out from a request which dialect it is in, so that a test need not know it.
"""

import http.client
from collections.abc import Callable
from dataclasses import dataclass

from support.stubs.gcs_answers import RefusalError
from support.wire.faults import Delay, Reset, Stall
from support.wire.hop import Answer, Fault, Hop
from support.wire.naming import Naming, azure_naming, google_naming, s3_naming
from support.wire.request import Headers, Request

# trouble -> HTTP status and code
S3 = {
    "slow down": (503, "SlowDown"),
    "too many requests": (429, "TooManyRequests"),
    "internal error": (500, "InternalError"),
    "denied": (403, "AccessDenied"),
    "key disabled": (400, "KMS.DisabledException"),
    "expired token": (400, "ExpiredToken"),
    "wrong region": (301, "PermanentRedirect"),
}
# trouble -> HTTP status, the JSON API's reason, the XML API's code
GOOGLE = {
    "slow down": (503, "backendError", "ServiceUnavailable"),
    "too many requests": (429, "rateLimitExceeded", "SlowDown"),
    "internal error": (500, "internalError", "InternalError"),
    "denied": (403, "forbidden", "AccessDenied"),
    "key disabled": (400, "invalid", "InvalidArgument"),
    "expired token": (401, "authError", "AuthenticationRequired"),
}
# trouble -> HTTP status and code
AZURE = {
    "slow down": (503, "ServerBusy"),
    "too many requests": (429, "TooManyRequests"),
    "internal error": (500, "InternalError"),
    "denied": (403, "AuthorizationPermissionMismatch"),
    "key disabled": (403, "KeyVaultEncryptionKeyNotFound"),
    "expired token": (403, "AuthenticationFailed"),
}


_WORDS = "Injected by a test."


def _s3(request: Request, trouble: str) -> Answer:
    status, code = S3[trouble]
    headers: Headers = (("Content-Type", "application/xml"),)
    if trouble == "wrong region":
        headers += (("x-amz-bucket-region", "eu-north-1"),)
    return Answer(status, "", headers, _xml(code, _WORDS))


def _google(request: Request, trouble: str) -> Answer:
    status, reason, code = GOOGLE[trouble]
    refusal = RefusalError(status, reason, _WORDS, code)
    if not request.target.startswith(("/storage/", "/upload/", "/download/")):
        answer = refusal.as_xml()
    else:
        answer = refusal.as_text() if "alt=media" in request.target else refusal.as_json()
    return Answer(answer.status, "", tuple(answer.headers), answer.body)


def _azure(request: Request, trouble: str) -> Answer:
    status, code = AZURE[trouble]
    message = f"{_WORDS}\nRequestId:1\nTime:2026-01-01T00:00:00Z"
    headers = (("Content-Type", "application/xml"), ("x-ms-error-code", code))
    return Answer(status, "", headers, _xml(code, message))


def _xml(code: str, message: str) -> bytes:
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{error}'.encode()


_ANSWERS: dict[Naming, Callable[[Request, str], Answer]] = {
    s3_naming: _s3,
    google_naming: _google,
    azure_naming: _azure,
}


@dataclass(frozen=True)
class Refusal(Fault):
    """Answers in the server's place that there is trouble.

    Attributes:
        trouble: Which.
        retry_after: Seconds that the client is asked to wait.
        carry_out: Whether the server carries out the request all the same.
        status: Another one than the trouble's own: 200, if it was sent before there was trouble.
    """

    trouble: str
    retry_after: int | None = None
    carry_out: bool = False
    status: int | None = None

    def inflict(self, hop: Hop) -> None:
        if self.carry_out:
            hop.forward()
        answer = _ANSWERS[hop.request.naming](hop.request, self.trouble)
        status = self.status or answer.status
        headers = answer.headers
        if self.retry_after is not None:
            headers += (("Retry-After", str(self.retry_after)),)
        reason = http.client.responses.get(status, "")
        hop.send(Answer(status, reason, headers, answer.body))


def _page(status: int, content: str, kind: str = "text/html") -> Answer:
    reason = http.client.responses[status]
    return Answer(status, reason, (("Content-Type", kind), ("Server", "gateway")), content.encode())


_NOT_REACHED = "upstream connect error or disconnect/reset before headers. reset reason: reset"
_HTML = "<html><head><title>{0}</title></head><body><center><h1>{0}</h1></center></body></html>"
GATEWAYS = {
    "envoy": _page(503, _NOT_REACHED, "text/plain"),
    "corporate proxy": _page(403, _HTML.format("Access Denied (policy_denied)")),
    "login": _page(401, _HTML.format("Unauthorized")),
    "not found": _page(404, "default backend - 404", "text/plain"),
    "precondition": _page(412, _HTML.format("412 Precondition Failed")),
}
"""Answers that no store gives, by what gives them."""


@dataclass(frozen=True)
class AnswerFirst(Fault):
    """Answers in the server's place; the request is kept, to be forwarded when the test says so.

    Attributes:
        answer: Of the gateway.
        kept: Where the requests go.
    """

    answer: Answer
    kept: list[Hop]

    def inflict(self, hop: Hop) -> None:
        hop.send(self.answer)
        self.kept.append(hop)


COMMON = {
    "reset": Reset("request"),
    "lost answer": Reset("answer"),
    "slow down": Refusal("slow down", retry_after=0),
    "internal error": Refusal("internal error"),
    "too many requests": Refusal("too many requests"),
    "late answer": Delay(0.2),
    "denied": Refusal("denied"),
    "stall before the answer": Stall("answer"),
}
"""What any request of a save or a load may meet."""
