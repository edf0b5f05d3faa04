"""Access to an S3 bucket: credentials, endpoint and signatures, which boto3 determines.

boto3's errors are converted to those of :mod:`cloudckpt.errors`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlencode

import botocore.exceptions
from botocore.auth import S3ExpressAuth, S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials, RefreshableCredentials

from cloudckpt.config import Config, S3Options
from cloudckpt.config.options import check_endpoint
from cloudckpt.errors import (
    AccessDeniedError,
    CloudCheckpointError,
    ConfigError,
    CredentialsError,
    TransientStoreError,
)
from cloudckpt.stores.base import Body
from cloudckpt.stores.credentials import (
    Access,
    Credentials,
    Errors,
    Issued,
    NoCredentials,
    Origin,
    SharedCall,
    fetch_error,
)
from cloudckpt.stores.http.failures import causes
from cloudckpt.stores.redaction import raise_without_context
from cloudckpt.stores.refusals import Refusal
from cloudckpt.stores.s3.dialects import DIALECTS, S3Dialect, dialect_of
from cloudckpt.stores.s3.endpoint import (
    amazon_suffix,
    http_options,
    new_client,
    new_session,
    resolve,
    session_client,
    signed_for,
    translated,
)
from cloudckpt.stores.s3.errors import REGION, from_code

__all__ = ["BucketAccess", "Keys", "object_headers"]

_SMALL = 1024 * 1024  # bytes, for which SHA-256 takes one to three milliseconds

logger = logging.getLogger("cloudckpt")


class _Endpoint(NamedTuple):
    """The URL of the bucket, and the region that requests are signed for."""

    bucket_url: str
    region: str


class BucketAccess(Access):
    """The endpoint and credentials of a bucket, as boto3 determines them.

    Attributes:
        bucket: The bucket's name, or the ARN of an access point.
        base: The URL that keys are appended to, ending in a slash.
        bucket_url: The URL of the bucket, to which a query can be appended. ``bucket_url`` and
            ``base`` never change. After the store has named another region, ``url`` and ``region``
            are those of that region, and `authorize` changes each request accordingly.
        dialect: How the store differs from others with S3's API.
        is_at_vendor: Whether the dialect's documentation applies to the endpoint.
    """

    def __init__(self, bucket: str, config: Config, uri: str) -> None:
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            check_endpoint(os.environ.get(variable) or None, variable)
        options = config.s3
        self.bucket, self._uri = bucket, uri
        try:
            session = new_session(options)
        except Exception as exc:  # noqa: BLE001 - botocore raises whatever its sources do
            raise_without_context(keys_error(exc, uri=uri))
        unused = [] if options.anonymous else [session]  # creating one takes as long as a client
        with translated(uri):
            core = session._session
            profile = core.get_scoped_config().get("s3") or {}
            client = new_client(session, options)
            self.base, region = resolve(client, bucket)
            host = self.base.split("/")[2].partition(":")[0]
            suffix = amazon_suffix(core, host)
            self.dialect = _dialect(options, bucket, host, uri, is_amazon=suffix is not None)
            self.is_at_vendor = self.dialect.is_at_vendor(host, is_amazon=suffix is not None)
            given = options.addressing_style or profile.get("addressing_style")
            style = None if given else self.dialect.addressing_style
            if style is not None:
                options = replace(options, addressing_style=style)
                client.close()
                client = new_client(session, options)
                self.base, region = resolve(client, bucket)
        self._options = options
        # path style: http://host/bucket; virtual style: https://bucket.host/
        path_style = self.base.count("/") > 3
        self.bucket_url = self.base.removesuffix("/") if path_style else self.base
        self.url, self.region = self._endpoint = _Endpoint(self.bucket_url, region)
        self._errors = partial(keys_error, uri=uri)
        self.credentials = Credentials(lambda: self._find(config, unused), self._errors)
        self._moving = threading.Lock()
        # whether the profile wants all bodies signed, or none; None if it has no such setting
        self._signs: bool | None = (client.meta.config.s3 or {}).get("payload_signing_enabled")
        # objects can't be copied between the zones of directory buckets
        zone = bucket.removesuffix("--x-s3").rpartition("--")[2] if self.dialect.sessions else ""
        endpoint = suffix or client.meta.endpoint_url
        self._realm = (endpoint, zone, options.profile, options.anonymous)
        self.http_options = http_options(client, core.get_config_variable("ca_bundle"), config)
        if self.dialect.redirects:  # the hosts that reads are redirected to must not see it
            self.http_options = replace(self.http_options, client_cert=None)

    def _find(self, config: Config, unused: list[Any]) -> Keys | Sessions | NoCredentials:
        """Returns a new source of credentials, with a boto3 session from `unused` if it has one."""
        options = self._options
        if options.anonymous:
            return NoCredentials()

        def next_session() -> Any:
            return unused.pop() if unused else new_session(options)

        if not self.dialect.sessions:
            return Keys(next_session(), self._uri, self._errors)
        session = next_session()
        client = session_client(session, config, self.region)
        return Sessions(session, client, self.bucket, self._uri, self._errors)

    def shares_realm(self, other: BucketAccess) -> bool:
        """Returns whether the store copies between both buckets, see `ObjectStore.copies_from`."""
        return self._realm == other._realm

    def follow(self, region: str, url: str, headers: Mapping[str, str]) -> bool:
        """Switches to the bucket's region after a request to another region was refused.

        Args:
            region: The region that the refusal names.
            url: The URL of the refused request.
            headers: The headers of the refused request.

        Returns:
            Whether the same request would now have another URL or signature.
        """
        used = signed_for(headers.get("Authorization", ""))
        with self._moving:
            if not used and url.startswith(self._endpoint.bucket_url):
                used = self._endpoint.region
            if region == used or not REGION.fullmatch(region):
                return False
            if self._endpoint.region == region:
                return True  # another thread has switched already
            try:
                with translated(self._uri):
                    client = new_client(new_session(self._options), self._options, region)
                    base, signs_for = resolve(client, self.bucket)
                    client.close()
            except CloudCheckpointError:  # boto3 does not know the region
                return False
            is_path = self.bucket_url != self.base
            endpoint = _Endpoint(base.removesuffix("/") if is_path else base, signs_for)
            if endpoint == self._endpoint:
                return False
            given = "S3Options(region=)" if self._options.region else "AWS_REGION"
            logger.warning(
                "%s is in %s, not %s: set %s to %s to avoid redirected requests",
                self._uri, region, used or "the default region", given, region,
            )  # fmt: skip
            self.url, self.region = self._endpoint = endpoint
            return True

    def authorize(
        self, method: str, url: str, headers: dict[str, str], body: Body, issued: Issued
    ) -> tuple[str, Mapping[str, str]]:
        """Implements :meth:`cloudckpt.stores.credentials.Access.authorize`.

        Integrity rests on CRC32C and TLS, so the bodies of uploads above 1 MiB are not hashed for
        the signature. All other bodies are, as policies may deny unsigned requests. The profile's
        ``payload_signing_enabled`` overrides this for all bodies. Content-Length is not signed:
        gateways drop it if it is zero, and HTTP/2 does not need it.
        """
        endpoint, (source, secrets) = self._endpoint, issued
        url = endpoint.bucket_url + url.removeprefix(self.bucket_url)
        if self._options.requester_pays:
            headers["x-amz-request-payer"] = "requester"
        if not secrets:
            return url, headers
        copies = "x-amz-copy-source" in headers
        if isinstance(source, Sessions) and copies:
            _, secrets = source.identity.get()
        length = headers.pop("Content-Length", "")
        signed = AWSRequest(method, url, headers=headers)
        signs = self._signs
        if signs is None:
            signs = method != "PUT" or sum(map(len, body)) <= _SMALL
        digest = hashlib.sha256()
        for view in body if signs else ():
            digest.update(view)  # releases the GIL for all but tiny views
        signed.context["digest"] = digest.hexdigest() if signs else "UNSIGNED-PAYLOAD"
        keys = ReadOnlyCredentials(*secrets[:2], secrets[2] or None)
        if not isinstance(source, Sessions):
            signer: S3SigV4Auth = _Signer(keys, "s3", endpoint.region)
        elif copies:  # https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
            signer = _Signer(keys, "s3express", endpoint.region)
        else:
            signer = _SessionSigner(keys, "s3express", endpoint.region, identity_cache=None)
        signer.add_auth(signed)
        if length:
            signed.headers["Content-Length"] = length
        return url, dict(signed.headers.items())


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Signs requests with a digest computed before: botocore can't digest a list of buffers."""

    def payload(self, request: AWSRequest) -> str:
        digest: str = request.context["digest"]
        return digest


class _SessionSigner(S3ExpressAuth):  # type: ignore[misc]
    """Signs requests like `_Signer`, with the keys of a session (CreateSession)."""

    payload = _Signer.payload


def _dialect(options: S3Options, bucket: str, host: str, uri: str, *, is_amazon: bool) -> S3Dialect:
    """Returns the bucket's dialect: the user's option, else determined by bucket name and host.

    Raises:
        ConfigError: If an option is set that the store does not support.
    """
    row = DIALECTS.get(options.dialect) or dialect_of(bucket, host, is_amazon=is_amazon)
    given = ", ".join(name for name in sorted(row.unsupported_options) if getattr(options, name))
    if given:
        why = f"{row.title} does not support all S3Options that are set: leave out {given}"
        raise ConfigError(why, uri=uri)
    return row


def object_headers(options: S3Options) -> dict[str, str]:
    """Returns the headers by which every new object gets the properties that the options set."""
    wanted = {
        "x-amz-server-side-encryption": options.sse,
        "x-amz-server-side-encryption-aws-kms-key-id": options.kms_key_id,
        "x-amz-storage-class": options.storage_class,
        "x-amz-tagging": urlencode(options.tags) or None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


# characters, the documented minimum; the end of a shorter id would reveal too much of it
_LEAST_ID = 16
# seconds before the keys' expiry, as in botocore.utils.IdentityCache: from then on one thread
# renews them while the others use them; from then on all threads wait
_RENEWED, _AWAITED = 45, 10
_KEYS_AWAITED = 600  # as the latter, for the credentials that botocore finds


def _current(found: Any, awaited: int, fetch: SharedCall[Any]) -> tuple[str, ...]:
    """Returns the access key, secret key and token of botocore's credentials `found`.

    They are renewed by `fetch` if they expire within `awaited` seconds, or `found` is None. `fetch`
    makes one request for all threads; botocore alone would make one for each, one after another.
    """
    is_due = getattr(found, "refresh_needed", lambda seconds: found is None)
    frozen = fetch() if is_due(awaited) else found.get_frozen_credentials()
    return frozen.access_key, frozen.secret_key, frozen.token or ""


class Keys:
    """The credentials that boto3 finds."""

    def __init__(self, session: Any, uri: str, errors: Errors) -> None:
        """Asks a boto3 session for credentials.

        Args:
            session: The session.
            uri: The bucket, for messages.
            errors: Converts boto3's exceptions.

        Raises:
            CredentialsError: If boto3 finds no credentials.
        """
        self._found = session.get_credentials()
        if self._found is None:
            raise CredentialsError(
                "no AWS credentials were found in the environment "
                "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE), "
                "in a profile of ~/.aws/config and ~/.aws/credentials (AWS_PROFILE), or from "
                "the container's or instance's role; set the variables, or run `aws configure`",
                uri=uri,
                certain=True,
            )
        self._fetch = SharedCall(self._found.get_frozen_credentials, errors)

    def secrets(self) -> tuple[str, ...]:
        """Returns the access key, the secret key and the session token, which may be empty."""
        return _current(self._found, _KEYS_AWAITED, self._fetch)

    def origin(self) -> Origin:
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


def _is_transient(exc: Exception) -> bool:
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


keys_error = partial(fetch_error, whose="AWS", is_transient=_is_transient)
"""Converts boto3's errors while it finds or refreshes credentials, see :func:`fetch_error`."""


class Sessions:
    """The keys of a directory bucket (S3 Express One Zone), and the credentials that obtain them.

    Requests to such a bucket are signed with keys of a session, which CreateSession issues for five
    minutes. boto3 requests them and botocore renews them, as for its own clients.
    """

    def __init__(self, session: Any, client: Any, bucket: str, uri: str, errors: Errors) -> None:
        """Keeps the client; the first call of `secrets` begins a session.

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
        self.identity = Credentials(lambda: Keys(session, uri, errors), errors)
        """The credentials for copy requests: a session does not cover the bucket of the source."""
        self._client = client
        self._keys: Any = None
        self._fetch = SharedCall(self._fetched, errors)

    def secrets(self) -> tuple[str, ...]:
        """Returns the access key, the secret key and the token of a valid session.

        Raises:
            CredentialsError: If the AWS credentials can't be used.
            AccessDeniedError: If they may not begin a session.
            BucketNotFoundError: If the bucket does not exist.
            ConnectionLostError: If S3 does not respond or is overloaded.
        """
        return _current(self._keys, _AWAITED, self._fetch)

    def _fetched(self) -> Any:
        """Returns the keys of a session that botocore renews; begins it if there is none."""
        if self._keys is None:
            self._keys = RefreshableCredentials.create_from_metadata(
                metadata=self._begin(),
                refresh_using=self._begin,
                method="s3express",
                advisory_timeout=_RENEWED,
                mandatory_timeout=_AWAITED,
            )
        return self._keys.get_frozen_credentials()

    def _begin(self) -> dict[str, str]:
        """Begins a session; returns its keys as the dict from which botocore makes credentials."""
        self.identity.get()  # raises the error of the credentials themselves first
        try:
            keys = self._client.create_session(Bucket=self._bucket)["Credentials"]
        except botocore.exceptions.ClientError as exc:
            if _is_transient(exc):
                raise
            details, meta = exc.response["Error"], exc.response["ResponseMetadata"]
            code, words = str(details.get("Code", "")), [str(details.get("Message", ""))]
            response = Refusal(code, words, is_foreign=True)  # no object was requested
            status, headers = int(meta.get("HTTPStatusCode", 0)), meta.get("HTTPHeaders") or {}
            error = from_code(response, status, headers, "CreateSession", self._uri)
            if isinstance(error, AccessDeniedError):
                error.message += "; a directory bucket needs s3express:CreateSession"
            raise_without_context(error)
        return {
            "access_key": keys["AccessKeyId"],
            "secret_key": keys["SecretAccessKey"],
            "token": keys["SessionToken"],
            # botocore's client returns times as text
            "expiry_time": str(keys["Expiration"]),
        }

    def origin(self) -> Origin:
        return self.identity.current.origin()
