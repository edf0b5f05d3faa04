"""Access to an S3 bucket: credentials, endpoint and signatures by boto3, with its errors
converted.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode, urlsplit

import urllib3

from cloudckpt._version import __version__
from cloudckpt.config import Config, S3Options
from cloudckpt.config.options import check_endpoint
from cloudckpt.errors import (
    CloudCheckpointError,
    ConfigError,
    MissingDependencyError,
)
from cloudckpt.stores.base import Body, nbytes
from cloudckpt.stores.credentials import Credentials
from cloudckpt.stores.http.options import HttpOptions, Route, first_set, named_by
from cloudckpt.stores.redaction import raise_alone, reason
from cloudckpt.stores.rest import Access, Request
from cloudckpt.stores.s3.dialects import DIALECTS, S3Dialect, dialect_of
from cloudckpt.stores.s3.errors import REGION

try:
    import boto3
    import botocore.exceptions
    import botocore.session
    from botocore import UNSIGNED
    from botocore.auth import S3ExpressAuth, S3SigV4Auth
    from botocore.awsrequest import AWSRequest, AWSResponse
    from botocore.config import Config as BotoConfig
    from botocore.credentials import ReadOnlyCredentials
    from botocore.httpsession import get_cert_path
    from botocore.utils import get_environ_proxies

    from cloudckpt.stores.s3.credentials import Keys, Sessions, fetching_keys
except ImportError as exc:
    raise MissingDependencyError(
        "s3:// needs boto3; install it with: pip install 'cloudckpt[s3]'", cause=exc
    ) from exc

__all__ = ["PAYLOAD_DIGEST", "UNSIGNED_PAYLOAD", "BucketAccess", "object_headers"]

PAYLOAD_DIGEST = "x-amz-content-sha256"
"""The header with the digest of the body that is signed."""

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
"""The value of that header for a body that is not signed."""

_SMALL = 1024 * 1024  # bytes, for which SHA-256 takes one to three milliseconds

logger = logging.getLogger("cloudckpt")


class _Place(NamedTuple):
    """The URL of the bucket, and the region that requests are signed for."""

    bucket_url: str
    region: str


class BucketAccess(Access):
    """The endpoint and credentials of a bucket, as boto3 determines them.

    Attributes:
        bucket: The bucket's name, or the ARN of an access point.
        base: The URL that keys are appended to, ending in a slash.
        bucket_url: The URL of the bucket, to which a query can be appended. This and ``base`` are
            the initial URLs; after a redirect to another region, `authorize` replaces them.
        credentials: The credentials that requests are signed with.
        is_aws: Whether the endpoint is Amazon's own.
        dialect: How the store differs from others with S3's API.
        is_at_vendor: Whether the dialect's documentation applies to the endpoint.
        http_options: The options of connections to it.
    """

    def __init__(self, bucket: str, config: Config, uri: str) -> None:
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            check_endpoint(os.environ.get(variable) or None, variable)
        options = config.s3
        self.bucket, self._uri = bucket, uri
        with _translated(uri) if options.anonymous else fetching_keys(uri):
            session = _session(options)
        unused = [] if options.anonymous else [session]  # creating one takes as long as a client
        with _translated(uri):
            core = session._session
            self._scoped = core.get_scoped_config()
            client = _client(session, options)
            self.base, region = _resolve(client, bucket)
            host = self.base.split("/")[2].partition(":")[0]
            suffix = _amazon_suffix(core, host)
            self.is_aws = suffix is not None
            self.dialect = _dialect(options, bucket, host, is_amazon=self.is_aws)
            self.is_at_vendor = self.dialect.is_at_vendor(host, is_amazon=self.is_aws)
            style = self._addressing_style(options)
            if style is not None:
                options = replace(options, addressing_style=style)
                client.close()
                client = _client(session, options)
                self.base, region = _resolve(client, bucket)
        self._options = options
        # path style: http://host/bucket; virtual style: https://bucket.host/
        path_style = self.base.count("/") > 3
        self.bucket_url = self.base.removesuffix("/") if path_style else self.base
        self._place = _Place(self.bucket_url, region)
        self._errors = partial(fetching_keys, uri)
        self.credentials = Credentials(lambda: self._look(config, unused), self._errors)
        self._has_moved = False
        self._moving = threading.Lock()
        # whether the profile wants all bodies signed, or none; None if it has no such setting
        self._signs: bool | None = (client.meta.config.s3 or {}).get("payload_signing_enabled")
        # objects can't be copied between the zones of directory buckets
        zone = bucket.removesuffix("--x-s3").rpartition("--")[2] if self.dialect.sessions else ""
        endpoint = suffix or client.meta.endpoint_url
        self._realm = (endpoint, zone, options.profile, options.anonymous)
        self.http_options = _http_options(client, core.get_config_variable("ca_bundle"), config)
        if self.dialect.redirects:  # the hosts that reads are redirected to must not see it
            self.http_options = replace(self.http_options, client_cert=None)

    def _addressing_style(self, options: S3Options) -> Literal["path", "virtual"] | None:
        """Returns the vendor's addressing style, unless the options or the profile set one."""
        said = options.addressing_style or (self._scoped.get("s3") or {}).get("addressing_style")
        return None if said else self.dialect.addressing_style

    def _look(self, config: Config, unused: list[Any]) -> Keys | Sessions:
        """Looks credentials up; `unused` holds a boto3 session to use first, if any is left."""
        options = self._options
        if options.anonymous:
            return Keys(None, self._uri)

        def made() -> Any:
            return unused.pop() if unused else _session(options)

        if not self.dialect.sessions:
            return Keys(made, self._uri)
        session = made()
        client = _session_client(session, config, self.region)
        return Sessions(session, client, self.bucket, self._uri, self._errors)

    @property
    def region(self) -> str:
        """The region that requests are signed for at the moment."""
        return self._place.region

    def route(self) -> Route:
        """Returns the bucket's URL and region, and the settings that they come from."""
        options = self._options
        endpoint = named_by(options, "endpoint_url") or first_set(
            "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"
        )
        if self._uri.startswith("hf://"):
            endpoint = "the scheme hf://"
        region = named_by(options, "region") or first_set("AWS_REGION", "AWS_DEFAULT_REGION")
        profile = "the profile" if self._scoped.get("region") else "the default, that of boto3"
        return Route(
            url=self._place.bucket_url,
            endpoint_from=endpoint
            or ("the default, that of boto3" if self.is_aws else "the profile"),
            region=self.region,
            region_from=region or profile,
            http=self.http_options,
        )

    def shares_realm(self, other: BucketAccess) -> bool:
        """Returns whether one request may involve both buckets: same S3 endpoint, zone and user."""
        return self._realm == other._realm

    def follow(self, region: str, url: str, headers: Mapping[str, str]) -> bool:
        """Switches to the bucket's region after a request to another region was refused.

        Args:
            region: The region of the bucket.
            url: The URL of the request.
            headers: The headers of the request.

        Returns:
            Whether the same request would now have another URL or signature.
        """
        used = _signed_for(headers.get("Authorization", ""))
        with self._moving:
            if not used and url.startswith(self._place.bucket_url):
                used = self._place.region
            if region == used or not REGION.fullmatch(region):
                return False
            if self._place.region == region:
                return True  # another thread has switched already
            try:
                with _translated(self._uri):
                    client = _client(_session(self._options), self._options, region)
                    base, signed_for = _resolve(client, self.bucket)
                    client.close()
            except CloudCheckpointError:  # boto3 does not know the region
                return False
            is_path = self.bucket_url != self.base
            place = _Place(base.removesuffix("/") if is_path else base, signed_for)
            if place == self._place:
                return False
            logger.warning(
                "%s is in %s, not %s: set AWS_REGION=%s to save redirected requests",
                self._uri, region, used or "the default region", region,
            )  # fmt: skip
            self._place = place
            self._has_moved = True
            return True

    def _payload_digest(self, method: str, body: Body) -> str:
        """Returns a body's SHA-256 for the signature, or the marker of an unsigned body.

        Integrity rests on CRC32C and TLS, so tensor data are not hashed again unless the profile
        demands it. All other bodies are small, and signed, as policies may deny unsigned requests.
        """
        signs = self._signs
        if signs is None:
            signs = method != "PUT" or nbytes(body) <= _SMALL
        if not signs:
            return UNSIGNED_PAYLOAD
        digest = hashlib.sha256()
        for view in body:
            digest.update(view)  # releases the GIL for all but tiny views
        return digest.hexdigest()

    def authorize(
        self, request: Request, headers: dict[str, str], source: Any, secrets: tuple[str, ...]
    ) -> tuple[str, Mapping[str, str]]:
        """Implements :meth:`cloudckpt.stores.rest.Access.authorize`.

        Content-Length is not signed: gateways drop it if it is zero, and HTTP/2 does not need it.
        """
        place, url = self._place, request.url
        if self._has_moved:
            url = place.bucket_url + url.removeprefix(self.bucket_url)
        if self._options.requester_pays:
            headers["x-amz-request-payer"] = "requester"
        if not secrets:
            return url, headers
        copies = "x-amz-copy-source" in headers
        if isinstance(source, Sessions) and copies:
            _, secrets = source.identity.get()
        length = {name: headers.pop(name) for name in ("Content-Length",) if name in headers}
        signed = AWSRequest(request.method, url, headers=headers)
        signed.context[PAYLOAD_DIGEST] = self._payload_digest(request.method, request.body)
        access_key, secret_key, token = secrets
        keys = ReadOnlyCredentials(access_key, secret_key, token or None)
        if not isinstance(source, Sessions):
            signer: S3SigV4Auth = _Signer(keys, "s3", place.region)
        elif copies:  # https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
            signer = _Signer(keys, "s3express", place.region)
        else:
            signer = _SessionSigner(keys, "s3express", place.region, identity_cache=None)
        signer.add_auth(signed)
        return url, length | dict(signed.headers.items())


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Signs a digest in place of the body, as botocore does not accept a list of buffers."""

    def payload(self, request: AWSRequest) -> str:
        digest: str = request.context[PAYLOAD_DIGEST]
        return digest


class _SessionSigner(S3ExpressAuth):  # type: ignore[misc]
    """Signs like `_Signer`, with the keys of a session."""

    payload = _Signer.payload


def _session(options: S3Options) -> Any:
    """Returns a boto3 session from the current environment and files.

    The region is taken from the options; else from AWS_REGION, which all other AWS SDKs use; else
    from AWS_DEFAULT_REGION, which boto3 uses; else from the profile. AWS documents this order for
    its command line: https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-envvars.html
    """
    core = botocore.session.Session(session_vars=_SETTINGS, profile=options.profile)
    core.user_agent_extra = f"cloudckpt/{__version__}"
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return boto3.session.Session(botocore_session=core, region_name=_region(options))


def _region(options: S3Options) -> str | None:
    variables = (os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION"))
    return options.region or next(filter(None, variables), None)


def _dialect(options: S3Options, bucket: str, host: str, *, is_amazon: bool) -> S3Dialect:
    """Returns the bucket's dialect: the user's option, else determined by bucket name and host.

    Raises:
        ConfigError: If a set option is not supported there.
    """
    row = dialect_of(bucket, host, is_amazon=is_amazon)
    if options.dialect != "auto":
        row = DIALECTS[options.dialect]
    given = [name for name in sorted(row.useless) if getattr(options, name)]
    if given:
        options_given = ", ".join(f"{name}=" for name in given)
        raise ConfigError(
            f"S3Options({options_given}): {row.title} does not support this; leave it out"
        )
    return row


_SETTINGS = {
    "region": ("region", None, None, None),
    # botocore itself asks the instance's metadata service once: a busy one would end the job
    "metadata_service_num_attempts": (
        "metadata_service_num_attempts",
        "AWS_METADATA_SERVICE_NUM_ATTEMPTS",
        3,
        int,
    ),
}


def _client(session: Any, options: S3Options, region: str | None = None) -> Any:
    """Returns a boto3 client that resolves endpoints and builds requests, but sends none."""
    return session.client(
        "s3",
        region_name=region,
        endpoint_url=options.endpoint_url,
        config=_boto_config(options),
        **_NO_CREDENTIALS,
    )


def _session_client(session: Any, config: Config, region: str) -> Any:
    """Returns a boto3 client that requests sessions: with credentials and without retries."""
    return session.client(
        "s3",
        region_name=region,
        endpoint_url=config.s3.endpoint_url,
        config=BotoConfig(
            retries={"total_max_attempts": 1},
            connect_timeout=config.connect_timeout,
            read_timeout=config.read_timeout,
        ),
    )


# for clients that send nothing: without keys they would look for credentials and log the result
_NO_CREDENTIALS = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}


_OF_S3 = re.compile(
    r"(?:.+\.)?"
    r"s3(?:-fips|-accelerate|-global|-accesspoint(?:-fips)?|-external-1|express-[a-z0-9-]+)?"
    r"(?:\.dualstack)?(?:[.-][a-z]+(?:-[a-z]+)+-\d+)?(?:\.vpce)?"
)
"""The host names of Amazon's S3, without the domain that other services share."""


def _amazon_suffix(core: botocore.session.Session, host: str) -> str | None:
    """Returns the domain suffix of a host of Amazon's S3; None for any other host.

    botocore knows the partitions; the client has loaded them. S3 on Outposts does not count.
    """
    for partition in core.get_data("partitions")["partitions"]:
        suffix = f".{partition['outputs']['dnsSuffix']}"
        if host.endswith(suffix) and _OF_S3.fullmatch(host.removesuffix(suffix)):
            return suffix
    return None


def _resolve(client: Any, bucket: str) -> tuple[str, str]:
    """Returns the URL of the bucket and the region to sign for, as botocore resolves them.

    botocore's rules (path or virtual style, access points, FIPS, dual stack, endpoints of other
    vendors) are not repeated here: a hook captures the request that botocore would send.
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
    return url.partition("?")[0].removesuffix("x"), region or client.meta.region_name


def _signed_for(signature: str | bytes) -> str:
    """Returns the region of an Authorization header; empty if it has none."""
    text = signature.decode("ascii") if isinstance(signature, bytes) else signature
    _, _, scope = text.partition("Credential=")  # key/date/region/service/aws4_request
    return scope.split(",")[0].split("/")[-3] if scope else ""


def _boto_config(options: S3Options) -> BotoConfig:
    s3 = {"us_east_1_regional_endpoint": "regional"}
    if options.addressing_style is not None:  # otherwise the profile's
        s3["addressing_style"] = options.addressing_style
    return BotoConfig(
        signature_version=UNSIGNED if options.anonymous else "s3v4",
        s3=s3,
        retries={"total_max_attempts": 1},
    )


def _http_options(client: Any, ca_bundle: str | None, config: Config) -> HttpOptions:
    """Returns the connection options, with the proxy and certificates that boto3 would use."""
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
    """Returns the headers of every new object."""
    wanted = {
        "x-amz-server-side-encryption": options.sse,
        "x-amz-server-side-encryption-aws-kms-key-id": options.kms_key_id,
        "x-amz-storage-class": options.storage_class,
        "x-amz-tagging": urlencode(options.tags) or None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


@contextlib.contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Converts boto3's errors about its settings and the bucket's name to cloudckpt's errors."""
    try:
        yield
    except (botocore.exceptions.BotoCoreError, ValueError, OSError) as exc:
        text = (
            "boto3 rejects the name of the bucket or its settings; see the cause, and correct the "
            "URI, ~/.aws/config or the AWS_* variables"
        )
        raise_alone(ConfigError(text, uri=uri, cause=reason(exc)))
