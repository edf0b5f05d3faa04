"""Deletions by the hundred in one multipart request, as Google and Azure have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import unquote

from benchmarks.server.message import Answer, Body

_CALL = re.compile(r"^Content-ID: *(\S+)(?:.*?)^DELETE (\S+) HTTP/1\.1", re.M | re.S | re.I)


def delete_each(body: Body, status: int, delete: Callable[[str], int]) -> Answer:
    """Answers each call of the batch with what `delete` returns for its path."""
    text = body.read().decode()
    parts: list[str] = []
    for name, target in _CALL.findall(text):
        result = HTTPStatus(delete(unquote(target.partition("?")[0])))
        parts.append(
            f"--batch\r\nContent-Type: application/http\r\nContent-ID: {_answered(name)}\r\n\r\n"
            f"HTTP/1.1 {result.value} {result.phrase}\r\nContent-Length: 0\r\n\r\n\r\n"
        )
    data = "".join([*parts, "--batch--\r\n"]).encode()
    return Answer(status, {"Content-Type": "multipart/mixed; boundary=batch"}, data)


def _answered(name: str) -> str:
    """Azure repeats the name of a call, Google marks it as that of an answer."""
    return name.replace("<", "<response-", 1)
