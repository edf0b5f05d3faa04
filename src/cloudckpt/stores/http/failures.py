"""Maps the failures of connections to errors, and recognizes those that a retry can't mend."""

from __future__ import annotations

import itertools
import re
import ssl
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import urllib3

from cloudckpt.errors import ConnectionLostError, InvalidRequestError, StoreError, TLSError
from cloudckpt.stores.http.connections import LateError
from cloudckpt.stores.redaction import excerpt

__all__ = ["causes", "failure", "lasting_tls_failure"]

_TUNNEL = re.compile(r"Tunnel connection failed: (4\d\d)\b.*")
_TRUST = (
    "if the endpoint uses its own certificate authority, name the file with its certificates "
    "in AWS_CA_BUNDLE (s3://, hf://) or REQUESTS_CA_BUNDLE (gs://, az://)"
)
# OpenSSL's reason codes; RECORD_LAYER_FAILURE since 3.2
_LASTING = (
    (
        re.compile("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE"),
        "{} does not speak TLS: check the port; for a server without TLS, begin the URL of the "
        "endpoint (or of the proxy) with http://",
    ),
    (
        re.compile(
            r"NO_PROTOCOLS_AVAILABLE|UNSUPPORTED_PROTOCOL|(SSLV3|TLSV1|TLSV13)_ALERT_"
            r"(HANDSHAKE_FAILURE|INSUFFICIENT_SECURITY|PROTOCOL_VERSION|ACCESS_DENIED|UNKNOWN_CA"
            r"|\w*CERTIFICATE\w*)"
        ),
        "the TLS handshake with {} failed: this machine and that server have no TLS version or "
        "cipher in common, or the server demands a client certificate that it accepts; update "
        "the older of the two, or check the client certificate",
    ),
)
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
# libraries of OpenSSL whose errors concern a file; the errors of a handshake come from "SSL"
_OF_FILES = ("ASN1", "PEM", "X509")


def failure(exc: BaseException, method: str, url: str, bundle: str | None) -> StoreError:
    """Returns the error for a request that had no response, given the exception of urllib3.

    `bundle` is the file or folder of CA certificates; None if it is not known.
    """
    host = urlsplit(url).netloc.rpartition("@")[2]
    lasting = _refused_by_proxy(exc, host) or lasting_tls_failure(exc, host, bundle=bundle)
    if lasting is not None:
        return lasting
    inner = getattr(exc, "original_error", exc)  # urllib3's ProxyError wraps it
    # no connection was made; also for refused connections and unresolved names
    unsent = isinstance(inner, urllib3.exceptions.ConnectTimeoutError)
    why = f"no connection to {host} for" if unsent else f"no answer from {host} to"
    return ConnectionLostError(
        f"{why} a {method} request: check the endpoint and the network (try cloudckpt doctor)",
        cause=_plain(exc),
        certain=unsent,
    )


def lasting_tls_failure(
    error: BaseException, host: str, *, bundle: str | None = None
) -> TLSError | None:
    """Returns a TLSError if a lasting TLS failure caused `error`; None if a retry may help.

    Args:
        error: The exception.
        host: The server, for messages.
        bundle: The file or folder of CA certificates; None if it is not known.
    """
    chain = list(causes(error))
    if (unread := _unread_file(chain)) is not None:
        return TLSError(
            f"the CA certificates{f' in {bundle}' if bundle else ''} can't be read, so the "
            f"certificate of {host} can't be verified: correct the file, or the setting that names "
            "it (s3://, hf://: AWS_CA_BUNDLE, or ca_bundle of the AWS profile; gs://, az://: "
            "CURL_CA_BUNDLE; all: REQUESTS_CA_BUNDLE)",
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
    """Returns the exception of reading the file of CA certificates; None if the chain has none."""
    for outer, inner in itertools.pairwise(chain):
        if not isinstance(outer, urllib3.exceptions.SSLError):
            continue
        if isinstance(inner, ssl.SSLError) and inner.library in _OF_FILES:
            return inner
        if isinstance(inner, _NO_FILE):
            return inner
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, then those that it wraps or that caused it, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        wrapped = (arg for arg in error.args if isinstance(arg, BaseException))
        error = error.__cause__ or next(wrapped, None) or error.__context__


def _refused_by_proxy(exc: BaseException, host: str) -> StoreError | None:
    """Returns the error if a proxy refuses the host for good; None if none does."""
    said = _TUNNEL.search(excerpt(str(exc)))
    if said is None or int(said[1]) in (408, 425, 429):
        return None
    advice = (
        "write a user and a password into its URL"
        if said[1] == "407"
        else "configure it to allow this host, use another proxy, or add the host to NO_PROXY"
    )
    return InvalidRequestError(
        f"the proxy that HTTPS_PROXY (or ALL_PROXY) names refuses to connect to {host}: {advice}",
        cause=said[0],
        certain=True,
    )


def _plain(exc: BaseException) -> str:
    """Returns the class and message of the error that urllib3 wraps, or a LateError's message."""
    for inner in causes(exc):
        if isinstance(inner, LateError):  # urllib3 would only report a timeout
            return str(inner)
    reason = getattr(exc, "reason", None)
    inner = reason if isinstance(reason, BaseException) else exc
    text = re.sub(r"^\w+\(host=.*?\): ", "", str(inner).rpartition(">: ")[2] or str(inner))
    return f"{type(inner).__name__}: {excerpt(text)}"
