"""What networks and stores do to requests: faults for a ``FaultyProxy``.

Each says what happens to one request. Own ones derive from :class:`~wire.hop.Fault`.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from support.wire.hop import Answer, Fault, Hop
from support.wire.request import Headers, Request

Moment = Literal["request", "answer", "body"]
"""When a fault strikes: ``request``, while the request's body is read, which is then not forwarded;
``answer``, when the request was carried out and nothing was answered; ``body``, in the answer's
body."""


@dataclass(frozen=True)
class Reset(Fault):
    """Resets the connection; at ``answer``, the request was carried out and its answer is lost.

    Attributes:
        moment: When.
        after: Bytes of the body (of the request, or of the answer) that pass before.
    """

    moment: Moment = "request"
    after: int = 0

    def inflict(self, hop: Hop) -> None:
        _go_to(hop, self.moment, self.after)
        hop.reset()


@dataclass(frozen=True)
class Stall(Fault):
    """Lets nothing more through, and keeps the connection open.

    Attributes:
        moment: When.
        after: Bytes of the body (of the request, or of the answer) that pass before.
    """

    moment: Moment = "answer"
    after: int = 0

    def inflict(self, hop: Hop) -> None:
        _go_to(hop, self.moment, self.after)
        hop.stall()


@dataclass(frozen=True)
class Truncate(Fault):
    """Closes the connection in an orderly way after a part of the answer's body.

    Attributes:
        after: Bytes of the body that are sent.
    """

    after: int = 0

    def inflict(self, hop: Hop) -> None:
        _go_to(hop, "body", self.after)
        hop.hang_up()


@dataclass(frozen=True)
class Drip(Fault):
    """Sends the body one byte at a time, so that no wait for the next byte ever takes long.

    Attributes:
        interval: Seconds between two bytes.
    """

    interval: float

    def inflict(self, hop: Hop) -> None:
        answer = hop.forward()
        hop.send(answer, stop=0)
        hop.drip(hop.payload(answer), self.interval)


@dataclass(frozen=True)
class Throttle(Fault):
    """Lets the bodies of the request and of the answer pass at an even pace: a slow link.

    Attributes:
        rate: Bytes a second.
    """

    rate: float

    def inflict(self, hop: Hop) -> None:
        hop.take_slowly(self.rate)
        hop.send_slowly(hop.forward(), self.rate)


@dataclass(frozen=True)
class Corrupt(Fault):
    """Flips the bits of one byte of the answer's body, if it has one.

    Attributes:
        at: Which byte, modulo the length of the body.
    """

    at: int = 0

    def inflict(self, hop: Hop) -> None:
        answer = hop.forward()
        hop.send(replace(answer, body=_flipped(answer.body, self.at)))


@dataclass(frozen=True)
class CorruptUpload(Fault):
    """Flips the bits of one byte of the request's body, if it has one.

    Attributes:
        at: Which byte, modulo the length of the body.
    """

    at: int = 0

    def inflict(self, hop: Hop) -> None:
        hop.send(hop.forward(body=_flipped(hop.body(), self.at)))


@dataclass(frozen=True)
class Respond(Fault):
    """Answers in the server's place; see :func:`s3_error` and its companions.

    Attributes:
        answer: What is answered.
        carry_out: Whether the server carries out the request all the same.
    """

    answer: Answer
    carry_out: bool = False

    def inflict(self, hop: Hop) -> None:
        if self.carry_out:
            hop.forward()
        hop.send(self.answer)


@dataclass(frozen=True)
class Delay(Fault):
    """Holds a request back before it is forwarded, or its answer; both arrive, if late.

    Attributes:
        seconds: How long.
        moment: ``request`` or ``answer``.
    """

    seconds: float
    moment: Literal["request", "answer"] = "answer"

    def inflict(self, hop: Hop) -> None:
        hop.body()
        if self.moment == "request":
            hop.pause(self.seconds)
        answer = hop.forward()
        if self.moment == "answer":
            hop.pause(self.seconds)
        hop.send(answer)


@dataclass(frozen=True)
class Call(Fault):
    """Calls a function of the test, and goes on when it returns. It may block, or kill a process.

    Attributes:
        function: What to call with the request.
        moment: ``request``, when a part of its body has arrived, or ``answer``, when it was
            carried out.
        after: Bytes of the request's body that have arrived before.
    """

    function: Callable[[Request], object]
    moment: Literal["request", "answer"] = "request"
    after: int = 0

    def inflict(self, hop: Hop) -> None:
        if self.moment == "request":
            hop.take(self.after)
            self.function(hop.request)
            hop.send(hop.forward())
        else:
            answer = hop.forward()
            self.function(hop.request)
            hop.send(answer)


@dataclass(frozen=True)
class StripHeaders(Fault):
    """Forwards a request without some headers: a store that ignores them.

    Attributes:
        names: The headers, in any case.
    """

    names: Collection[str]

    def inflict(self, hop: Hop) -> None:
        dropped = {name.lower() for name in self.names}
        kept = tuple(pair for pair in hop.request.headers if pair[0].lower() not in dropped)
        hop.send(hop.forward(replace(hop.request, headers=kept)))


@dataclass(frozen=True)
class StripQuery(Fault):
    """Forwards a request without some parameters of its URL: a store that ignores them.

    Attributes:
        names: The parameters.
    """

    names: Collection[str]

    def inflict(self, hop: Hop) -> None:
        path, _, query = hop.request.target.partition("?")
        kept = [pair for pair in query.split("&") if pair.partition("=")[0] not in self.names]
        target = "?".join(filter(None, (path, "&".join(kept))))
        hop.send(hop.forward(replace(hop.request, target=target)))


def s3_error(
    status: int,
    code: str,
    message: str = "injected by a test",
    headers: Headers = (),
    *,
    carry_out: bool = False,
) -> Respond:
    """An error as S3 words it; with status 200 it is one that came too late for the status."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    xml = f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()
    reason = http.client.responses.get(status, "")
    typed = (("Content-Type", "application/xml"), *headers)
    return Respond(Answer(status, reason, typed, xml), carry_out)


def _go_to(hop: Hop, moment: Moment, after: int) -> None:
    if moment == "request":
        hop.take(after)
        return
    answer = hop.forward()
    if moment == "body":
        hop.send(answer, stop=after)


def _flipped(body: bytes, at: int) -> bytes:
    if not body:
        return body
    changed = bytearray(body)
    changed[at % len(changed)] ^= 0xFF
    return bytes(changed)
