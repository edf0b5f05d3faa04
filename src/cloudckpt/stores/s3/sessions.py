"""Sessions of S3's directory buckets (S3 Express One Zone).

Requests are signed with keys that CreateSession gives out for five minutes. boto3 asks for them and
botocore renews them, as for its own clients; here they are kept and used.
"""

from __future__ import annotations

import threading
from typing import Any

import botocore.exceptions
from botocore.credentials import RefreshableCredentials

from cloudckpt.errors import AccessDeniedError
from cloudckpt.stores.credentials import fetching
from cloudckpt.stores.origins import Origin
from cloudckpt.stores.redaction import raise_alone
from cloudckpt.stores.s3.credentials import Keys, is_passing
from cloudckpt.stores.s3.errors import from_code

__all__ = ["Sessions"]

# as botocore.utils.IdentityCache has them: seconds before the end from which one thread renews the
# keys while the others use them, and from which all wait
_RENEWED, _AWAITED = 45, 10


class Sessions:
    """The sessions of one bucket, and the AWS credentials that they are asked for with."""

    def __init__(self, session: Any, client: Any, bucket: str, uri: str) -> None:
        """
        Args:
            session: Of boto3: finds the credentials.
            client: Of that session: asks for the bucket's keys.
            bucket: Its name.
            uri: What it is for, for messages.

        Raises:
            StoreError: If there are no credentials, as of :class:`Keys`.
        """
        self._bucket, self._uri = bucket, uri
        self.identity = Keys(lambda: session, uri)
        """What copies are signed with: they may read other buckets, which no session covers."""
        self._client = client
        self._lock = threading.Lock()
        self._keys: Any = None

    def secrets(self) -> tuple[str, ...]:
        """Access key, secret key and token of a session that is valid now.

        Raises:
            CredentialsError: If the AWS credentials can't be used.
            AccessDeniedError: If they may not begin a session.
            BucketNotFoundError: If there is no such bucket.
            ConnectionLostError: If S3 is silent or overloaded.
        """
        with fetching("S3 Express session's", self._uri, is_passing=is_passing):
            with self._lock:
                if self._keys is None:
                    self._keys = RefreshableCredentials.create_from_metadata(
                        metadata=self._begin(),
                        refresh_using=self._begin,
                        method="s3express",
                        advisory_timeout=_RENEWED,
                        mandatory_timeout=_AWAITED,
                    )
            frozen = self._keys.get_frozen_credentials()
            return frozen.access_key, frozen.secret_key, frozen.token

    def _begin(self) -> dict[str, str]:
        """A new session, in the form that botocore keeps credentials in."""
        self.identity.secrets()  # whose own problem is told in its own words
        try:
            keys = self._client.create_session(Bucket=self._bucket)["Credentials"]
        except botocore.exceptions.ClientError as exc:
            if is_passing(exc):
                raise
            told, meta = exc.response["Error"], exc.response["ResponseMetadata"]
            error = from_code(
                str(told.get("Code", "")),
                int(meta.get("HTTPStatusCode", 0)),
                str(told.get("Message", "")),
                "CreateSession",
                self._uri,
                meta.get("HTTPHeaders"),
                is_foreign=True,  # nobody has asked for an object
            )
            if isinstance(error, AccessDeniedError):
                error.message += "; a directory bucket needs s3express:CreateSession"
            raise_alone(error)
        return {
            "access_key": keys["AccessKeyId"],
            "secret_key": keys["SecretAccessKey"],
            "token": keys["SessionToken"],
            # the client leaves times as they are written
            "expiry_time": str(keys["Expiration"]),
        }

    def origin(self) -> Origin:
        return self.identity.origin()
