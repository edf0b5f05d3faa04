"""Asks boto3 for its settings, and for the endpoint and region of a bucket."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.exceptions
import botocore.session
import urllib3
from botocore import UNSIGNED
from botocore.awsrequest import AWSResponse
from botocore.config import Config as BotoConfig
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from cloudckpt._version import __version__
from cloudckpt.config import Config, S3Options
from cloudckpt.errors import CloudCheckpointError, ConfigError
from cloudckpt.stores.http.options import HttpOptions
from cloudckpt.stores.redaction import raise_without_context, reason

__all__ = [
    "amazon_suffix",
    "http_options",
    "new_client",
    "new_session",
    "resolve",
    "session_client",
    "signed_for",
    "translated",
]


def new_session(options: S3Options) -> Any:
    """Returns a boto3 session from the current environment and files.

    The region is taken from the options; else from AWS_REGION, which all other AWS SDKs use; else
    from AWS_DEFAULT_REGION, which boto3 uses; else from the profile. AWS documents this order for
    its command line: https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-envvars.html
    """
    core = botocore.session.Session(session_vars=_SETTINGS, profile=options.profile)
    core.user_agent_extra = f"cloudckpt/{__version__}"
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    variables = map(os.environ.get, ("AWS_REGION", "AWS_DEFAULT_REGION"))
    region = options.region or next(filter(None, variables), None)
    return boto3.session.Session(botocore_session=core, region_name=region)


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


def new_client(session: Any, options: S3Options, region: str | None = None) -> Any:
    """Returns a boto3 client, without real keys, to resolve endpoints and build requests.

    `region` is the region of the client; None for that of the session.
    """
    return session.client(
        "s3",
        region_name=region,
        endpoint_url=options.endpoint_url,
        config=_boto_config(options),
        **_NO_CREDENTIALS,
    )


def session_client(session: Any, config: Config, region: str) -> Any:
    """Returns a boto3 client for CreateSession requests, which it signs and does not retry."""
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


def amazon_suffix(core: botocore.session.Session, host: str) -> str | None:
    """Returns the domain suffix of a host of Amazon's S3; None for any other host.

    The suffixes, such as ``.amazonaws.com``, come from botocore's table of AWS partitions. S3 on
    Outposts does not count.
    """
    for partition in core.get_data("partitions")["partitions"]:
        suffix = f".{partition['outputs']['dnsSuffix']}"
        if host.endswith(suffix) and _OF_S3.fullmatch(host.removesuffix(suffix)):
            return suffix
    return None


def resolve(client: Any, bucket: str) -> tuple[str, str]:
    """Returns the URL to which keys are appended and the region to sign for, by botocore's rules.

    These rules (path or virtual style, access points, FIPS, dual stack, endpoints of other
    vendors) are not repeated here: a hook captures the request that botocore would send.
    """
    seen: list[tuple[str, str]] = []

    def capture(request: Any, **_: Any) -> AWSResponse:
        seen.append((request.url, signed_for(request.headers.get("Authorization", ""))))
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


def signed_for(signature: str | bytes) -> str:
    """Returns the region in an Authorization header's value; empty if it names none."""
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


def http_options(client: Any, ca_bundle: str | None, config: Config) -> HttpOptions:
    """Returns the connection options, with the proxy and certificates that boto3 would use.

    `ca_bundle` is the file that boto3's settings name; None if they name none.
    """
    meta = client.meta
    certificate = meta.config.client_cert
    proxies = meta.config.proxies or get_environ_proxies(meta.endpoint_url) or {}
    ca_bundle = ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE")
    return HttpOptions(
        config=config,
        proxy=proxies.get(urlsplit(meta.endpoint_url).scheme),
        ca_bundle=ca_bundle or get_cert_path(True),
        client_cert=certificate if isinstance(certificate, str) else None,
    )


@contextlib.contextmanager
def translated(uri: str) -> Iterator[None]:
    """Converts boto3's errors about its settings and the bucket's name to cloudckpt's errors."""
    try:
        yield
    except CloudCheckpointError:
        raise
    except (botocore.exceptions.BotoCoreError, ValueError, OSError) as exc:
        text = (
            "boto3 rejects the bucket's name or a setting: see the cause, and correct the URI, "
            "~/.aws/config or the AWS_* variables"
        )
        raise_without_context(ConfigError(text, uri=uri, cause=reason(exc)))
