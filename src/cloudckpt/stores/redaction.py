"""Removes credentials from texts of servers and libraries, for messages; bounds their length.

A transport's or SDK's error message may quote what it was about to send: http.client puts a
header's value into its ValueError, urllib3 the URL with its signature, requests a proxy's URL with
its password. Every rank raises and logs such a message, so it is redacted here first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn
from urllib.parse import quote, unquote

from cloudckpt.errors import CloudCheckpointError

__all__ = ["conceal", "masked", "raise_without_context", "reason", "excerpt"]

_MASK = "***"
_LONGEST_WORD = 500  # characters shown of a server's or SDK's message
_LONGEST_TEXT = 10_000  # characters of an error's message, or of a chained exception
_LEAST = 8  # characters; anything shorter is a word (an emulator's password), not a secret
_SURE = 16  # characters; a secret this long can't be part of a longer word, such as a bucket's name

# every pattern examines a bounded number of characters: a server may have chosen the text
_PATTERNS = (
    # http.client and requests quote a header value that they refuse
    (
        r"(header value:?\s{0,4})b?(?:'(?:[^'\\]|\\.){0,9000}'|\"(?:[^\"\\]|\\.){0,9000}\")",
        rf"\1{_MASK}",
    ),
    # cryptography quotes a line of a key that it takes for a header
    (r"(\bInvalidHeader\().*", rf"\1{_MASK}"),
    (r"(\b(?:https?|socks\w{0,4})://)[^\s'\"<>]{0,300}@", rf"\1{_MASK}@"),
    (r"\bAWS4-[A-Z0-9-]{1,40}[\s,][^\n]*", _MASK),
    (r"\b(Bearer|Basic|SharedKey)\s{1,4}[\w.~+/=:-]{16,}", rf"\1 {_MASK}"),
    (
        r"(\b(?:sig|signature|x-(?:amz|goog)-(?:signature|security-token|s3session-token|credential)|AccountKey"
        r"|SharedAccessSignature|\w{0,40}secret\w{0,40}|\w{0,40}(?:session|security|access|refresh|id"
        r"|subject)_?token|client_assertion|assertion|private_key|password)[\"']?\s{0,4}(?:=|%3D|:)"
        r"\s{0,4}[\"']?)[^\s&;,\"'<>]+",
        rf"\1{_MASK}",
    ),
    (r"\beyJ[\w-]{8,2000}\.[\w-]+(?:\.[\w-]*)?", _MASK),  # JSON web tokens
    (r"\bya29\.[\w.-]+", _MASK),  # Google's access tokens
    (
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
        _MASK,
    ),
)
_COMPILED = [(re.compile(p, re.IGNORECASE | re.DOTALL), new) for p, new in _PATTERNS]

_VARIABLES = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"),
    *("AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_BEARER_TOKEN"),
    *("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_CLIENT_SECRET", "AZURE_PASSWORD"),
    *("AZURE_CLIENT_CERTIFICATE_PASSWORD",),
)


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """Returns a text with ``***`` in place of every known or recognized credential; nothing is cut.

    Known are `secrets`, and the secrets and proxy passwords in environment variables. A known
    secret of fewer than 8 characters is left, as is one of fewer than 16 within a longer word.
    """
    return _without(text, _known(secrets))


def excerpt(text: str, secrets: Iterable[str] = (), *, most: int = _LONGEST_WORD) -> str:
    """Returns a server's, proxy's or SDK's text without credentials and cut to `most` characters.

    `secrets` are as in :func:`masked`. An error is sent to all ranks and logged by each of them,
    so a server's page of a megabyte must not become part of it.
    """
    known = _known(secrets)
    # the cut may split a secret in two, which would then no longer be recognized: examine more
    window = most + max((len(form) for form in known), default=0) + _LONGEST_WORD
    shown = _without(text[:window], known)
    return shown if len(shown) <= most else f"{shown[:most]}…"


def _without(text: str, known: Iterable[str]) -> str:
    for user in _proxy_users():
        text = text.replace(f"{user}@", f"{_MASK}@")
    for form in known:
        if len(form) >= _SURE:
            text = text.replace(form, _MASK)
        elif form in text:
            text = re.sub(rf"(?<![\w./-]){re.escape(form)}(?![\w./-])", _MASK, text)
    for pattern, new in _COMPILED:
        text = pattern.sub(new, text)
    return text


def _known(secrets: Iterable[str]) -> list[str]:
    """Returns every spelling of `secrets` and the environment's secrets, the longest first."""
    values = {value for name in _VARIABLES if (value := os.environ.get(name))} | set(secrets)
    return sorted({form for value in values for form in _forms(value)}, key=len, reverse=True)


def _proxy_users() -> Iterator[str]:
    """Yields ``user:password`` of the proxy URLs in the environment variables."""
    for name, value in os.environ.items():
        user, at, _ = value.rpartition("@")
        if at and name.lower().endswith("_proxy"):
            yield user.rpartition("//")[2]


def _forms(value: str) -> Iterator[str]:
    """Yields the spellings (quoted, escaped) of a secret, and of secrets in a connection string.

    Spellings of fewer than 8 characters are left out.
    """
    parts = re.findall(r"\b(?:sig|AccountKey)=([^&;\s]+)", value)
    for one in (value, value.strip(), *parts, *map(unquote, parts)):
        quoted = (quote(one, safe, errors="surrogatepass") for safe in ("/", ""))
        for form in (one, repr(one)[1:-1], ascii(one)[1:-1], *quoted):
            if len(form) >= _LEAST:
                yield form


def reason(exc: BaseException, secrets: Iterable[str] = ()) -> str:
    """Returns an exception's class and message, without credentials and shortened."""
    return f"{type(exc).__name__}: {excerpt(str(exc), secrets)}"


def conceal(error: CloudCheckpointError, secrets: Iterable[str] = ()) -> None:
    """Removes credentials from an error, and drops its chained exceptions if they contain any.

    The error's message and cause are cut to `_LONGEST_TEXT` characters. Chained exceptions with a
    longer text are dropped, too, as they can't be examined.
    """
    secrets = tuple(secrets)
    error.message = masked(error.message[:_LONGEST_TEXT], secrets)
    error.args = (error.message, *error.args[1:])
    if error.cause is not None:
        error.cause = masked(error.cause[:_LONGEST_TEXT], secrets)
    texts = (text for inner in _beneath(error) for text in (str(inner), repr(inner)))
    if any(len(text) > _LONGEST_TEXT or masked(text, secrets) != text for text in texts):
        error.__cause__ = error.__context__ = None


def _beneath(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    waiting = [error.__cause__, error.__context__]
    while waiting:
        inner = waiting.pop()
        if inner is not None and id(inner) not in seen:
            seen.add(id(inner))
            yield inner
            waiting += [inner.__cause__, inner.__context__]


def raise_without_context(error: BaseException) -> NoReturn:
    """Raises an error without a ``__context__``, which would hold the exception being handled.

    ``raise … from None`` only hides the handled exception: it stays in ``__context__``, where
    loggers and debuggers find it.
    """
    try:
        raise error
    finally:
        error.__context__ = None
