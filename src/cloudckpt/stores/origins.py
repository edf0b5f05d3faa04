"""Where a store's settings come from, in words for users."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cloudckpt.config.options import Options
from cloudckpt.stores.http.options import HttpOptions

__all__ = ["Origin", "Route", "first_set", "named_by"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where credentials come from; nothing of it is a secret.

    Attributes:
        source: Such as ``the environment (AWS_ACCESS_KEY_ID)``.
        identity: Whose they are, as far as that is known: an account, or how a key's id ends.
        ends: When they do, in seconds since 1970; None if that is never, or not known.
    """

    source: str
    identity: str = ""
    ends: float | None = None


@dataclass(frozen=True, kw_only=True)
class Route:
    """How a bucket is reached.

    Attributes:
        url: Of the bucket.
        endpoint_from: What names the endpoint, such as ``AWS_ENDPOINT_URL_S3``.
        region: That requests are signed for; empty where there are none.
        region_from: What names the region.
        http: How connections are made.
    """

    url: str
    endpoint_from: str
    region: str = ""
    region_from: str = ""
    http: HttpOptions


def named_by(options: Options, name: str) -> str:
    """What gives an option its value: its variable, or an argument; empty if nothing does."""
    value = getattr(options, name)
    if value is None:
        return ""
    variable = f"{options.variables}{name.upper()}"
    if os.environ.get(variable) == value:
        return variable
    return f"{type(options).__name__}({name}=…)"


def first_set(*variables: str) -> str:
    """The first of these environment variables that says something; empty if none does."""
    return next((name for name in variables if os.environ.get(name, "").strip()), "")
