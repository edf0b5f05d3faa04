"""Failures of TLS that will come again: a certificate that is not trusted, a server without TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from cloudckpt.errors import TLSError

__all__ = ["causes", "lasting_failure"]

_TRUST = (
    "if the endpoint has an authority of its own, name the file with its certificates in "
    "AWS_CA_BUNDLE (s3://) or REQUESTS_CA_BUNDLE (gs://, az://)"
)


def lasting_failure(error: BaseException, host: str) -> TLSError | None:
    """The error to raise if ``error`` came of such a failure; None if it may pass by itself."""
    for inner in causes(error):
        if isinstance(inner, ssl.SSLCertVerificationError):
            return TLSError(
                f"the certificate of {host} is not trusted: {inner.verify_message}; {_TRUST}",
                cause=inner,
            )
        if isinstance(inner, ssl.SSLError) and inner.reason == "WRONG_VERSION_NUMBER":
            return TLSError(
                f"{host} does not speak TLS; if that is as it should be, begin the endpoint's URL "
                "with http://",
                cause=inner,
            )
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error of urllib3 and what it came of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
