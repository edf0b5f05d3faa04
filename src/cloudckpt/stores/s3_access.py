"""How a bucket is reached: credentials, endpoint, signatures, and boto3's errors in our words."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3

from cloudckpt.config import Config, S3Options
from cloudckpt.config.options import check_endpoint
from cloudckpt.errors import (
    CloudCheckpointError,
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    InvalidRequestError,
    MissingDependencyError,
)
from cloudckpt.stores.credentials import (
    Credentials,
    check_credential,
    raise_alone,
    reason,
)
from cloudckpt.stores.http import HttpOptions
from cloudckpt.stores.s3_errors import from_code

try:
    import boto3
    import botocore.exceptions
    import botocore.session
    from botocore import UNSIGNED
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest, AWSResponse
    from botocore.config import Config as BotoConfig
    from botocore.credentials import ReadOnlyCredentials
    from botocore.httpsession import get_cert_path
    from botocore.utils import get_environ_proxies
except ImportError as exc:
    raise MissingDependencyError(
        "s3:// needs boto3; install it with: pip install 'cloudckpt[s3]'", cause=exc
    ) from exc

__all__ = ["BucketAccess", "object_headers"]


class BucketAccess:
    """What boto3 knows about a bucket.

    Attributes:
        base: The URL that keys are appended to, ending in a slash.
        bucket_url: The URL of the bucket, for a query to be appended.
        credentials: What requests are signed with.
        is_aws: Whether the endpoint is Amazon's own.
        http_options: How to connect to it.
    """

    def __init__(self, bucket: str, config: Config, uri: str) -> None:
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            check_endpoint(os.environ.get(variable) or None, variable)
        self.credentials = Credentials(lambda: _Keys(config.s3, uri))
        with _translated("reach", uri):
            session = _session(config.s3)
            core = session._session
            client: Any = session.client(
                "s3",
                endpoint_url=config.s3.endpoint_url,
                config=_boto_config(config.s3),
                **_NO_CREDENTIALS,
            )
            self.base, self._region = _resolve(client, bucket)
            client.close()
        # path style: http://host/bucket; virtual style: https://bucket.host/
        path_style = self.base.count("/") > 3
        self.bucket_url = self.base.removesuffix("/") if path_style else self.base
        host = self.base.split("/")[2].partition(":")[0]
        self.is_aws = host.endswith(_suffixes(core))
        self.http_options = _http_options(client, core.get_config_variable("ca_bundle"), config)

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers with which a request may be sent; the payload is not part of the signature.

        Raises:
            CredentialsError: If the credentials can't be refreshed.
        """
        secrets = self.credentials.current.fetch()
        if not secrets:
            return dict(headers)
        request = AWSRequest(method, url, headers=dict(headers))
        request.context["client_config"] = _UNSIGNED_PAYLOAD
        access_key, secret_key, token = secrets
        keys = ReadOnlyCredentials(access_key, secret_key, token or None)
        S3SigV4Auth(keys, "s3", self._region).add_auth(request)
        return dict(request.headers.items())


def _session(options: S3Options) -> Any:
    """boto3, as it finds the environment and its files now."""
    core = botocore.session.Session(profile=options.profile)
    return boto3.session.Session(botocore_session=core, region_name=options.region)


class _Keys:
    """The credentials that boto3 finds; none if the options want none."""

    def __init__(self, options: S3Options, uri: str) -> None:
        self._uri = uri
        self._found: Any = None
        self._latest: tuple[str, ...] = ()
        if options.anonymous:
            return
        with _translated(_FIND, uri):
            self._found = _session(options).get_credentials()
        if self._found is None:
            raise CredentialsError(
                "no AWS credentials were found: neither in the environment "
                "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE), nor "
                "in a profile of ~/.aws/config and ~/.aws/credentials (AWS_PROFILE), nor from "
                "the container's or instance's role",
                uri=uri,
            )

    def secrets(self) -> tuple[str, ...]:
        return self._latest or self.fetch()

    def fetch(self) -> tuple[str, ...]:
        """Access key, secret key and session token, which may be empty; renews them if due."""
        if self._found is None:
            return ()
        with _translated(_FIND, self._uri):
            frozen = self._found.get_frozen_credentials()  # refreshes them when they are due
        found = (frozen.access_key, frozen.secret_key, frozen.token or "")
        for value, (variable, entry) in zip(found, _NAMES, strict=True):
            source = self._found.method
            name = variable if source == "env" else f"{entry} (which boto3 found by {source!r})"
            check_credential(value, name, self._uri, header=value is not frozen.secret_key)
        self._latest = found
        return found


_NAMES = (
    ("AWS_ACCESS_KEY_ID", "aws_access_key_id"),
    ("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key"),
    ("AWS_SESSION_TOKEN", "aws_session_token"),
)
# of the client that only tells endpoint and region: it would look for some and log what it finds
_NO_CREDENTIALS = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}


def _suffixes(core: botocore.session.Session) -> tuple[str, ...]:
    """What Amazon's hosts end in, as botocore knows its partitions; the client has loaded them."""
    partitions = core.get_data("partitions")["partitions"]
    return tuple({f".{partition['outputs']['dnsSuffix']}" for partition in partitions})


_UNSIGNED_PAYLOAD = BotoConfig(s3={"payload_signing_enabled": False})


def _resolve(client: Any, bucket: str) -> tuple[str, str]:
    """The URL of the bucket and the region to sign for, as botocore resolves them.

    botocore's rules (path or virtual style, access points, FIPS, dual stack, endpoints of other
    vendors) are left to botocore: the hook sees the request that it would send.
    """
    seen: list[tuple[str, str]] = []

    def capture(request: Any, **_: Any) -> AWSResponse:
        seen.append((request.url, _signed_for(request.headers.get("Authorization", ""))))
        answer = urllib3.HTTPResponse(io.BytesIO(), preload_content=False)
        return AWSResponse(request.url, 200, {}, answer)

    events = client.meta.events
    events.register("before-send.s3.HeadObject", capture)
    try:
        client.head_object(Bucket=bucket, Key="x")
    finally:
        events.unregister("before-send.s3.HeadObject", capture)
    url, region = seen[0]
    return url.partition("?")[0].removesuffix("x"), region


def _signed_for(signature: str | bytes) -> str:
    """The region of a signature; none if there is none."""
    text = signature.decode("ascii") if isinstance(signature, bytes) else signature
    _, _, scope = text.partition("Credential=")  # key/date/region/service/aws4_request
    return scope.split(",")[0].split("/")[-3] if scope else ""


def _boto_config(options: S3Options) -> BotoConfig:
    return BotoConfig(
        signature_version=UNSIGNED if options.anonymous else "s3v4",
        s3={
            "addressing_style": options.addressing_style,
            "us_east_1_regional_endpoint": "regional",
        },
    )


def _http_options(client: Any, ca_bundle: str | None, config: Config) -> HttpOptions:
    """Proxies and certificates as boto3 finds them."""
    meta = client.meta
    certificate = meta.config.client_cert
    proxies = meta.config.proxies or get_environ_proxies(meta.endpoint_url) or {}
    ca_bundle = ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE")
    return HttpOptions.of(
        config,
        proxy=proxies.get(urlsplit(meta.endpoint_url).scheme),
        ca_bundle=ca_bundle or get_cert_path(True),
        client_cert=certificate if isinstance(certificate, str) else None,
    )


def object_headers(options: S3Options) -> dict[str, str]:
    """What every new object gets."""
    wanted = {
        "x-amz-server-side-encryption": options.sse,
        "x-amz-server-side-encryption-aws-kms-key-id": options.kms_key_id,
        "x-amz-server-side-encryption-bucket-key-enabled": "true" if options.bucket_key else None,
        "x-amz-storage-class": options.storage_class,
        "x-amz-acl": options.acl,
        "x-amz-tagging": urlencode(options.tags) or None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


_FIND = "find credentials for"
_CREDENTIAL_ERRORS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.ProfileNotFound,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.UnauthorizedSSOTokenError,
    botocore.exceptions.SSOTokenLoadError,
)


@contextlib.contextmanager
def _translated(action: str, uri: str) -> Iterator[None]:
    """Raises boto3's errors as cloudckpt's, without the credentials that they may quote."""
    try:
        yield
    except botocore.exceptions.ClientError as exc:
        answer: Mapping[str, Any] = exc.response
        error, meta = answer.get("Error", {}), answer.get("ResponseMetadata", {})
        raise_alone(
            from_code(
                str(error.get("Code", "")),
                int(meta.get("HTTPStatusCode", 0)),
                str(error.get("Message", "")),
                action,
                uri,
                meta.get("HTTPHeaders", {}),
            )
        )
    except (botocore.exceptions.BotoCoreError, ValueError, OSError) as exc:
        raise_alone(_meaning(exc, action, uri))


def _meaning(exc: Exception, action: str, uri: str) -> CloudCheckpointError:
    cause = reason(exc)
    other = isinstance(exc, (ValueError, OSError))  # of a file, a token, a URL that can't be read
    if isinstance(exc, _CREDENTIAL_ERRORS) or (other and action == _FIND):
        return CredentialsError(
            "the AWS credentials can't be used; check AWS_PROFILE, the AWS_* variables and ~/.aws, "
            "or sign in again",
            uri=uri,
            cause=cause,
        )
    lost = (botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError)
    if isinstance(exc, lost):
        return ConnectionLostError(
            f"could not {action} the object: no answer from the endpoint", uri=uri, cause=cause
        )
    if other:
        return ConfigError("boto3 rejects its settings", uri=uri, cause=cause)
    return InvalidRequestError(f"boto3 can't {action} the object", uri=uri, cause=cause)
