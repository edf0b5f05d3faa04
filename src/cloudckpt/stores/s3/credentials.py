"""The keys that sign requests to S3: credentials found by boto3, or a session's keys.

botocore refreshes both by its own rules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import botocore.exceptions
from botocore.credentials import RefreshableCredentials

from cloudckpt.errors import AccessDeniedError, CredentialsError, TransientStoreError
from cloudckpt.stores.credentials import Credentials, Errors, Origin, SharedCall, fetching
from cloudckpt.stores.http.tls_errors import causes
from cloudckpt.stores.redaction import raise_alone
from cloudckpt.stores.refusals import Refusal
from cloudckpt.stores.s3.errors import from_code

__all__ = ["Keys", "Sessions", "fetching_keys"]

# characters, the documented minimum; the end of a shorter id would reveal too much of it
_LEAST_ID = 16
# seconds before the keys' expiry, as in botocore.utils.IdentityCache: from then on one thread
# renews them while the others use them; from then on all threads wait
_RENEWED, _AWAITED = 45, 10


class Keys:
    """The credentials that boto3 finds; no credentials for anonymous access."""

    def __init__(self, session: Callable[[], Any] | None, uri: str) -> None:
        """Asks boto3 for credentials.

        Args:
            session: Creates a boto3 session; None for anonymous access.
            uri: The bucket, for messages.

        Raises:
            CredentialsError: If boto3 finds no credentials.
        """
        self._found: Any = None
        if session is None:
            return
        self._found = session().get_credentials()
        if self._found is None:
            raise CredentialsError(
                "no AWS credentials were found in the environment "
                "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE), "
                "in a profile of ~/.aws/config and ~/.aws/credentials (AWS_PROFILE), or from "
                "the container's or instance's role",
                uri=uri,
                certain=True,
            )

    def secrets(self) -> tuple[str, ...]:
        """Returns access key, secret key and session token (may be empty)."""
        if self._found is None:
            return ()
        frozen = self._found.get_frozen_credentials()
        return frozen.access_key, frozen.secret_key, frozen.token or ""

    def origin(self) -> Origin:
        if self._found is None:
            return Origin(source="none are sent: anonymous=True")
        key = self.secrets()[0]
        ends = getattr(self._found, "_expiry_time", None)  # botocore has no public name for it
        return Origin(
            source=f"boto3's {self._found.method}",
            identity=f"access key …{key[-4:]}" if len(key) >= _LEAST_ID else "",
            ends=ends.timestamp() if ends else None,
        )


_SILENT = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.CapacityNotAvailableError,
    botocore.exceptions.MetadataRetrievalError,
)


def _is_passing(exc: Exception) -> bool:
    """Returns whether a credentials service did not respond, or asked to retry later."""
    for inner in causes(exc):
        if isinstance(inner, botocore.exceptions.ClientError):  # of STS, Identity Center or sign-in
            error, meta = inner.response["Error"], inner.response.get("ResponseMetadata", {})
            code, status = str(error.get("Code", "")), int(meta.get("HTTPStatusCode", 0))
            return isinstance(from_code(Refusal(code), status, {}), TransientStoreError)
        # HTTPClientError itself also wraps invalid requests, such as a token with a line break
        if isinstance(inner, _SILENT) and type(inner) is not botocore.exceptions.HTTPClientError:
            return True
    return False


fetching_keys = partial(fetching, "AWS", is_passing=_is_passing)
"""Converts boto3's errors while it finds or refreshes credentials, see :func:`fetching`."""


class Sessions:
    """The sessions of a directory bucket (S3 Express One Zone), and their credentials.

    Requests are signed with keys that CreateSession issues for five minutes. boto3 requests them
    and botocore renews them, as for its own clients; this class keeps them.
    """

    def __init__(self, session: Any, client: Any, bucket: str, uri: str, errors: Errors) -> None:
        """Stores the session's client; a session begins with the first `secrets`.

        Args:
            session: The boto3 session that finds the credentials.
            client: An S3 client of that session, which requests the bucket's keys.
            bucket: The bucket's name.
            uri: The bucket, for messages.
            errors: Converts boto3's exceptions.

        Raises:
            StoreError: If there are no credentials, as in :class:`Keys`.
        """
        self._bucket, self._uri = bucket, uri
        self.identity = Credentials(lambda: Keys(lambda: session, uri), errors)
        """The credentials that sign copies, which may read buckets that no session covers."""
        self._client = client
        self._keys: Any = None
        self._start = SharedCall(self._started, errors)

    def secrets(self) -> tuple[str, ...]:
        """Returns access key, secret key and token of a valid session.

        Raises:
            CredentialsError: If the AWS credentials can't be used.
            AccessDeniedError: If they may not begin a session.
            BucketNotFoundError: If the bucket does not exist.
            ConnectionLostError: If S3 does not respond or is overloaded.
        """
        if self._keys is None:
            self._keys = self._start()
        frozen = self._keys.get_frozen_credentials()
        return frozen.access_key, frozen.secret_key, frozen.token

    def _started(self) -> Any:
        """Begins the first session; returns its keys, which botocore renews."""
        return RefreshableCredentials.create_from_metadata(
            metadata=self._begin(),
            refresh_using=self._begin,
            method="s3express",
            advisory_timeout=_RENEWED,
            mandatory_timeout=_AWAITED,
        )

    def _begin(self) -> dict[str, str]:
        """Begins a session; returns its keys in the form in which botocore keeps credentials."""
        self.identity.get()  # raises the error of the credentials themselves first
        try:
            keys = self._client.create_session(Bucket=self._bucket)["Credentials"]
        except botocore.exceptions.ClientError as exc:
            if _is_passing(exc):
                raise
            told, meta = exc.response["Error"], exc.response["ResponseMetadata"]
            code, words = str(told.get("Code", "")), [str(told.get("Message", ""))]
            said = Refusal(code, words, is_foreign=True)  # no object was requested
            status, headers = int(meta.get("HTTPStatusCode", 0)), meta.get("HTTPHeaders") or {}
            error = from_code(said, status, headers, "CreateSession", self._uri)
            if isinstance(error, AccessDeniedError):
                error.message += "; a directory bucket needs s3express:CreateSession"
            raise_alone(error)
        return {
            "access_key": keys["AccessKeyId"],
            "secret_key": keys["SecretAccessKey"],
            "token": keys["SessionToken"],
            # botocore's client returns times as text
            "expiry_time": str(keys["Expiration"]),
        }

    def origin(self) -> Origin:
        return self.identity.current.origin()
