"""Many deletions in one request: the multipart body of Azure's Blob Batch, and its answer."""

from __future__ import annotations

import email
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message

from cloudckpt.errors import ServerError

__all__ = ["SubAnswer", "compose", "parse"]


@dataclass(frozen=True)
class SubAnswer:
    """The answer to one of the requests; ``number`` counts from 0, or is None for all of them."""

    number: int | None
    status: int
    headers: Mapping[str, str]
    body: bytes


def compose(boundary: str, deletions: Sequence[tuple[str, Mapping[str, str]]]) -> bytes:
    """The body of a batch of DELETE requests, given their targets (path and query) and headers."""
    lines: list[str] = []
    for number, (target, headers) in enumerate(deletions):
        lines += [
            f"--{boundary}",
            "Content-Type: application/http",
            "Content-Transfer-Encoding: binary",
            f"Content-ID: {number}",
            "",
            f"DELETE {target} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
            "Content-Length: 0",
            "",
        ]
    lines += [f"--{boundary}--", ""]
    return "\r\n".join(lines).encode("ascii")


def parse(content_type: str, body: bytes, count: int, uri: str) -> list[SubAnswer]:
    """The answers within the answer to a batch: ``count`` of them, or one for all.

    Raises:
        ServerError: If it is none.
    """
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    message = email.message_from_bytes(head + body)
    if not message.is_multipart():
        raise ServerError("the answer to the batch is not the multipart body it should be", uri=uri)
    answers = [_sub_answer(part, uri) for part in message.walk() if not part.is_multipart()]
    if len(answers) < count and all(answer.number is not None for answer in answers):
        raise ServerError(f"the batch has {len(answers)} answers, not {count}", uri=uri)
    return answers


def _sub_answer(part: Message, uri: str) -> SubAnswer:
    content = part.get_payload(decode=True)
    line, _, rest = content.lstrip().partition(b"\n") if isinstance(content, bytes) else (b"",) * 3
    fields = line.split()
    if len(fields) < 2 or not fields[0].startswith(b"HTTP/") or not fields[1].isdigit():
        raise ServerError("an answer within the batch is not the HTTP it should be", uri=uri)
    answer = email.message_from_bytes(rest)
    answered = answer.get_payload(decode=True)
    number = part.get("Content-ID", "").strip()
    return SubAnswer(
        int(number) if number.isdigit() else None,
        int(fields[1]),
        dict(answer.items()),
        answered if isinstance(answered, bytes) else b"",
    )
