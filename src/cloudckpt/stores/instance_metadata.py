"""The metadata of an EC2 instance, which give out the credentials of its role.

The answers are those of the user guide of EC2, "Retrieve security credentials from instance
metadata" and "Use the Instance Metadata Service".
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import botocore.exceptions
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session
from botocore.utils import IMDSFetcher, get_environ_proxies, resolve_imds_endpoint_mode

from cloudckpt.errors import ConnectionLostError, CredentialsError, ServerError, StoreError
from cloudckpt.stores.credentials import masked, reason

__all__ = ["METADATA_SETTINGS", "trouble_with_metadata"]


def _seconds(value: Any) -> Any:
    """What botocore's sessions time a connection and an answer by; a user gives one number."""
    return value if isinstance(value, tuple) else int(value)


METADATA_SETTINGS = {
    "metadata_service_timeout": (
        "metadata_service_timeout",
        "AWS_METADATA_SERVICE_TIMEOUT",
        (1, 5),  # to connect, which takes no time where there is one; to answer
        _seconds,
    ),
    "metadata_service_num_attempts": (
        "metadata_service_num_attempts",
        "AWS_METADATA_SERVICE_NUM_ATTEMPTS",
        3,
        int,
    ),
}
"""How patient boto3 is with the metadata of its instance, unless the user says it: by itself it
asks once, for a second. In the form of botocore's session variables."""

_ABSENT = (
    botocore.exceptions.EndpointConnectionError,
    botocore.exceptions.ConnectTimeoutError,
)
_ROLES = "latest/meta-data/iam/security-credentials/"


def trouble_with_metadata(core: Any, uri: str) -> StoreError | None:
    """What keeps the instance's metadata from giving credentials; None if the instance has none.

    botocore says the same of metadata that it could not read and of an instance without a role, so
    they are asked once more.

    Args:
        core: A session of botocore, with :data:`METADATA_SETTINGS`.
        uri: What the credentials are for.
    """
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    named = core.get_config_variable("ec2_metadata_service_endpoint")
    config = {
        "ec2_metadata_service_endpoint": named,
        "ec2_metadata_service_endpoint_mode": resolve_imds_endpoint_mode(core),
    }
    base = IMDSFetcher(config=config).get_base_url().rstrip("/")
    if get_environ_proxies(base).get("http"):
        return None  # a proxy answers, and for everything that is not there
    what = f"the credentials of the instance's role can't be fetched for now from {base}"
    http = URLLib3Session(timeout=core.get_config_variable("metadata_service_timeout"))

    def ask(method: str, path: str, **headers: str) -> Any:
        fields = {f"x-aws-ec2-metadata-{name}": value for name, value in headers.items()}
        fields["User-Agent"] = core.user_agent()
        return http.send(AWSRequest(method, f"{base}/{path}", headers=fields).prepare())

    try:
        answer = ask("PUT", "latest/api/token", **{"token-ttl-seconds": "60"})
        if not _is_busy(answer.status_code):
            token = {"token": answer.text} if answer.status_code == 200 else {}
            answer = ask("GET", _ROLES, **token)
            if answer.status_code == 200 and answer.text:
                answer = ask("GET", _ROLES + answer.text.split()[0], **token)
                if answer.status_code == 200:
                    return _said_of_role(answer.text, what, uri)
    except _ABSENT as exc:
        if not named and not _is_ec2():
            return None  # no metadata are to be expected here
        return ConnectionLostError(what, uri=uri, cause=reason(exc))
    except (botocore.exceptions.ConnectionError, botocore.exceptions.HTTPClientError) as exc:
        return ConnectionLostError(
            f"{what} (in a container, the instance's hop limit may be too low)",
            uri=uri,
            cause=reason(exc),
        )
    finally:
        http.close()
    if _is_busy(answer.status_code):
        return ServerError(what, uri=uri, cause=f"HTTP {answer.status_code}")
    return None


def _is_busy(status: int) -> bool:
    return status >= 500 or status == 429


def _said_of_role(document: str, what: str, uri: str) -> StoreError:
    """The error for the credentials of a role, which boto3 has not got all the same."""
    try:
        fields = json.loads(document)
        code, message = str(fields.get("Code", "Success")), str(fields.get("Message", ""))
    except (ValueError, AttributeError):
        return ServerError(what, uri=uri, cause="the answer is not the JSON that it should be")
    if code == "Success":
        return ServerError(what, uri=uri, cause="the first answers came too late, or not at all")
    return CredentialsError(
        "the instance's role gives no credentials; check its trust policy",
        uri=uri,
        cause=masked(f"{code}: {message}"),
    )


def _is_ec2() -> bool:
    """Whether the firmware says that this machine is one of EC2's."""
    for path, vendor in (
        ("/sys/class/dmi/id/sys_vendor", "Amazon EC2"),
        ("/sys/hypervisor/uuid", "ec2"),
    ):
        with contextlib.suppress(OSError):
            if Path(path).read_text(encoding="utf-8").startswith(vendor):
                return True
    return False
