"""Recognizes TLS failures that a retry can't mend, such as an untrusted certificate."""

from __future__ import annotations

import itertools
import re
import ssl
from collections.abc import Iterator, Sequence

import urllib3

from cloudckpt.errors import TLSError

__all__ = ["causes", "lasting_failure"]

_TRUST = (
    "if the endpoint uses its own certificate authority, name the file with its certificates "
    "in AWS_CA_BUNDLE (s3://) or REQUESTS_CA_BUNDLE (gs://, az://)"
)
# OpenSSL's reason codes; RECORD_LAYER_FAILURE since 3.2
_LASTING = (
    (
        re.compile("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE"),
        "{} does not speak TLS; if it should not, begin the endpoint's URL (or the proxy's) with "
        "http://",
    ),
    (
        re.compile(
            r"NO_PROTOCOLS_AVAILABLE|UNSUPPORTED_PROTOCOL|(SSLV3|TLSV1|TLSV13)_ALERT_"
            r"(HANDSHAKE_FAILURE|INSUFFICIENT_SECURITY|PROTOCOL_VERSION|ACCESS_DENIED|UNKNOWN_CA"
            r"|\w*CERTIFICATE\w*)"
        ),
        "{} refused the TLS handshake: it expects another TLS version or cipher, or a client "
        "certificate that it accepts",
    ),
)
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
# libraries of OpenSSL whose errors concern a file; the errors of a handshake come from "SSL"
_OF_FILES = ("ASN1", "PEM", "X509")


def lasting_failure(
    error: BaseException, host: str, *, bundle: str | None = None
) -> TLSError | None:
    """Returns a TLSError if `error` comes of a lasting TLS failure; None if a retry may help.

    Args:
        error: The exception.
        host: The server, for messages.
        bundle: The file or folder of CA certificates, if known.
    """
    chain = list(causes(error))
    if (unread := _unread_file(chain)) is not None:
        return TLSError(
            f"the certificates of the authorities{f' in {bundle}' if bundle else ''} can't be "
            f"read, so {host} can't be verified; correct AWS_CA_BUNDLE (s3://) or "
            "REQUESTS_CA_BUNDLE, which name their file, or unset the variable",
            cause=unread,
            certain=True,
        )
    if any(isinstance(inner, urllib3.exceptions.ProxyError) for inner in chain):
        host = f"the proxy for {host}"
    for inner in chain:
        if isinstance(inner, ssl.SSLCertVerificationError):
            text = f"the certificate of {host} is not trusted: {inner.verify_message}; {_TRUST}"
            return TLSError(text, cause=inner, certain=True)
        reason = (inner.reason if isinstance(inner, ssl.SSLError) else None) or ""
        text = next((text for known, text in _LASTING if known.fullmatch(reason)), "")
        if text:
            return TLSError(text.format(host), cause=inner)
    return None


def _unread_file(chain: Sequence[BaseException]) -> OSError | None:
    """Returns the error of reading the CA certificates' file, which urllib3 wraps."""
    for outer, inner in itertools.pairwise(chain):
        if not isinstance(outer, urllib3.exceptions.SSLError):
            continue
        if isinstance(inner, ssl.SSLError) and inner.library in _OF_FILES:
            return inner
        if isinstance(inner, _NO_FILE):
            return inner
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception of urllib3, then its causes, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        wrapped = (arg for arg in error.args if isinstance(arg, BaseException))
        error = error.__cause__ or next(wrapped, None) or error.__context__
