"""The AWS credentials that boto3 finds, and what it means if it finds none for the moment.

"There are none" ends a job, so it is said only if every source says so. A source that can't be
asked, or that is busy, raises a transient error instead, and is asked again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import botocore.exceptions
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session
from botocore.utils import IMDSFetcher, get_environ_proxies, resolve_imds_endpoint_mode
from urllib3.exceptions import HTTPError, LocationValueError

from cloudckpt.errors import (
    AccessDeniedError,
    CloudCheckpointError,
    ConnectionLostError,
    CredentialsError,
    ServerError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores.credentials import (
    Renewal,
    Validity,
    check_credential,
    masked,
    raise_alone,
    reason,
)
from cloudckpt.stores.origins import Origin
from cloudckpt.stores.refusals import by_status
from cloudckpt.stores.s3_errors import from_code
from cloudckpt.stores.tls import lasting_failure

__all__ = ["METADATA_SETTINGS", "Keys"]

_FOR_NOW = "the AWS credentials can't be fetched for now"
_UNUSABLE = (
    "the AWS credentials can't be used; check AWS_PROFILE, the AWS_* variables and ~/.aws, "
    "or sign in again"
)
_NAMES = (
    ("AWS_ACCESS_KEY_ID", "aws_access_key_id"),
    ("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key"),
    ("AWS_SESSION_TOKEN", "aws_session_token"),
)


class Keys:
    """The credentials that boto3 finds; none if it is not asked.

    botocore renews them before they expire. If that fails, those that it has are used as long as
    they live: it would refuse them ten minutes before their end, and a save would end with them.
    """

    def __init__(self, session: Callable[[], Any] | None, uri: str) -> None:
        """``session`` makes a session of boto3; ``uri`` is for messages."""
        self._uri = uri
        self._found: Any = None
        self._latest: tuple[str, ...] = ()
        self._renewal = Renewal(self._validity, self._renew)
        if session is None:
            return
        with _translated(uri):
            asked = session()
            self._core = asked._session
        with self._explained():
            self._found = asked.get_credentials()
            if self._found is None:
                raise botocore.exceptions.NoCredentialsError

    def secrets(self) -> tuple[str, ...]:
        return self._latest or self.fetch()

    def fetch(self) -> tuple[str, ...]:
        """Access key, secret key and session token, which may be empty; renews them if due."""
        if self._found is not None:
            self._renewal.ensure()
        return self._latest

    def origin(self) -> Origin:
        if self._found is None:
            return Origin(source="none are sent: anonymous=True")
        method = str(self._found.method)
        key = self._latest[0] if self._latest else ""
        ends = getattr(self._found, "_expiry_time", None)
        return Origin(
            source=_SOURCES.get(method, f"what boto3 calls {method!r}"),
            identity=f"access key …{key[-4:]}" if len(key) >= _LEAST_ID else "",
            ends=ends.timestamp() if ends else None,
        )

    def _validity(self) -> Validity:
        is_due = getattr(self._found, "refresh_needed", None)
        has_ended = not self._latest or (is_due is not None and is_due(0))
        return Validity.ENDED if has_ended else Validity.DUE  # whether they are, botocore knows

    def _renew(self) -> None:
        self._latest = self._read()

    def _read(self) -> tuple[str, ...]:
        with self._explained():
            frozen = self._found.get_frozen_credentials()  # refreshes them when they are due
        found = (frozen.access_key, frozen.secret_key, frozen.token or "")
        for value, (variable, entry) in zip(found, _NAMES, strict=True):
            source = self._found.method
            name = variable if source == "env" else f"{entry} (which boto3 found by {source!r})"
            check_credential(value, name, self._uri, header=value is not frozen.secret_key)
        return found

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises what boto3 says, or where it says nothing, what the instance's metadata say."""
        trouble: StoreError | None = None
        with _translated(self._uri):
            try:
                yield
            except _SILENT as exc:
                if not _is_of_the_instance(exc):
                    raise
                trouble = _trouble_with_metadata(self._core, self._uri)
                if trouble is None:
                    raise
        if trouble is not None:
            raise trouble


_LEAST_ID = 16  # characters, which AWS documents: of a shorter one its end would be too much
_SOURCES = {  # by botocore's names for them
    "env": "the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)",
    "shared-credentials-file": "a profile of ~/.aws/credentials (AWS_PROFILE)",
    "config-file": "a profile of ~/.aws/config (AWS_PROFILE)",
    "boto-config": "the file of boto2",
    "assume-role": "a role that the profile assumes",
    "assume-role-with-web-identity": "a web identity, as of IRSA (AWS_WEB_IDENTITY_TOKEN_FILE)",
    "sso": "IAM Identity Center (aws sso login)",
    "login": "aws login",
    "custom-process": "credential_process of the profile",
    "container-role": "the container's role (ECS, EKS Pod Identity)",
    "iam-role": "the instance's role, from its metadata (IMDS)",
}

_SILENT = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.MetadataRetrievalError,
)
_OF_THE_INSTANCE = ("iam-role", "ec2instancemetadata")  # botocore's name, and that of profiles


def _is_of_the_instance(exc: botocore.exceptions.BotoCoreError) -> bool:
    """Whether the last thing that botocore asked were the metadata of the instance."""
    if isinstance(exc, botocore.exceptions.CredentialRetrievalError):
        return str(exc.kwargs.get("provider")).lower() in _OF_THE_INSTANCE
    return True


@contextlib.contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Raises what comes of looking for credentials as cloudckpt's errors, without credentials.

    boto3 raises whatever its sources do: a RuntimeError for renewed credentials that have expired,
    a KeyError for an answer that lacks one of them, what reading files and answers raises.
    """
    try:
        yield
    except CloudCheckpointError:
        raise
    except Exception as exc:  # noqa: BLE001 - any class of it would end a job without a name
        raise_alone(_meaning(exc, uri))


def _meaning(exc: Exception, uri: str) -> CloudCheckpointError:
    if isinstance(exc, botocore.exceptions.NoCredentialsError):
        return CredentialsError(
            "no AWS credentials were found: neither in the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE), nor "
            "in a profile of ~/.aws/config and ~/.aws/credentials (AWS_PROFILE), nor from "
            "the container's or instance's role",
            uri=uri,
        )
    failure: StoreError | None = None
    for inner in _behind(exc):
        if isinstance(inner, botocore.exceptions.ClientError):
            return _refused(inner.response, uri)
        if isinstance(inner, botocore.exceptions.MetadataRetrievalError):
            failure = _of_container(inner, uri)
        failure = _network_failure(inner, uri) or failure
    if failure is not None:
        return failure
    return CredentialsError(_UNUSABLE, uri=uri, cause=reason(exc))


def _behind(exc: BaseException) -> Iterator[BaseException]:
    """An error, and where it is one of a service that botocore could not ask, what it came of."""
    told: BaseException | None = exc
    while told is not None:
        yield told
        wraps = (
            botocore.exceptions.CredentialRetrievalError,
            botocore.exceptions.MetadataRetrievalError,
        )
        told = told.__context__ if isinstance(told, wraps) else None


def _network_failure(exc: BaseException, uri: str) -> StoreError | None:
    """The error for what botocore says of a connection; None if it is none of those."""
    if isinstance(exc, botocore.exceptions.CapacityNotAvailableError):
        return ThrottledError(f"{_FOR_NOW}: boto3 was slowed down", uri=uri, cause=reason(exc))
    lost = (
        botocore.exceptions.ConnectionError,
        botocore.exceptions.HTTPClientError,
        botocore.exceptions.IncompleteReadError,
    )
    if not isinstance(exc, lost):
        return None
    if type(exc) is botocore.exceptions.HTTPClientError:  # it wraps whatever was raised
        inner = exc.kwargs.get("error")
        if not isinstance(inner, (OSError, HTTPError)) or isinstance(inner, LocationValueError):
            return None
    where = exc.kwargs.get("endpoint_url") or exc.kwargs.get("proxy_url") or "their service"
    if lasting := lasting_failure(exc, masked(str(where))):
        lasting.uri, lasting.cause = uri, reason(exc)
        return lasting
    return ConnectionLostError(f"{_FOR_NOW}: their service is silent", uri=uri, cause=reason(exc))


def _refused(answer: Mapping[str, Any], uri: str) -> StoreError:
    """What STS, IAM Identity Center or the sign-in have answered."""
    error, meta = answer.get("Error", {}), answer.get("ResponseMetadata", {})
    code, status = str(error.get("Code", "")), int(meta.get("HTTPStatusCode", 0))
    message, headers = str(error.get("Message", "")), meta.get("HTTPHeaders", {})
    refusal = from_code(code, status, message, "get AWS credentials", uri, headers)
    if code == "IDPCommunicationError":  # documented to be worth another try
        text = f"{_FOR_NOW}: STS can't reach who vouches for the identity"
        return ServerError(text, uri=uri, cause=refusal.cause)
    if isinstance(refusal, (TransientStoreError, AccessDeniedError, CredentialsError)):
        return refusal
    return CredentialsError(_UNUSABLE, uri=uri, cause=refusal.cause)


def _of_container(exc: botocore.exceptions.MetadataRetrievalError, uri: str) -> StoreError | None:
    """The error of a container's credential service that is busy; None if it has refused.

    botocore keeps what it has answered in the text only.
    """
    text = str(exc.kwargs.get("error_msg", ""))
    status = re.search(r"non 200 response (\d{3})", text)
    if status is None:
        return ServerError(
            f"{_FOR_NOW}: the container's credential service answers something else",
            uri=uri,
            cause=reason(exc),
        )
    kind, _ = by_status(int(status[1]))
    if not issubclass(kind, TransientStoreError):
        return None
    text = f"{_FOR_NOW}: the container's credential service failed"
    return kind(text, uri=uri, cause=reason(exc))


# The metadata of an EC2 instance, which give out the credentials of its role. The answers are those
# of the user guide of EC2, "Retrieve security credentials from instance metadata" and "Use the
# Instance Metadata Service".


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


def _trouble_with_metadata(core: Any, uri: str) -> StoreError | None:
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
