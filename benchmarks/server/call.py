"""What a request calls for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.server.message import Answer, Body, Request
from benchmarks.server.objects import Buckets

Handler = Callable[[Buckets, Request, Body], Answer]
"""Carries out a request, having read all of its body."""


@dataclass(frozen=True)
class Call:
    """An operation of S3."""

    operation: str
    request: Request
    """With the bucket and key that it is about."""
    handler: Handler
