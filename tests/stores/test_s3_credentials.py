"""Credentials of AWS that can't be had for the moment, and those that never can."""

import datetime
import json
import re
import time

import botocore.credentials
import botocore.exceptions
import botocore.session
import botocore.utils
import pytest

from cloudckpt import Config, RetryPolicy, S3Options
from cloudckpt.errors import (
    ConnectionLostError,
    CredentialsError,
    StoreError,
    TLSError,
)
from cloudckpt.stores.s3 import access as s3_access
from cloudckpt.transfer.retry import open_store
from cloudckpt.uri import CheckpointURI
from support.dialects import error_xml, put
from support.emulators import free_port
from support.stubs.aws_services import AwsServices

PATIENT = RetryPolicy(attempts=10, base=0.0, cap=0.0, deadline=60.0)


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of the clients of STS and SSO
    monkeypatch.setattr(botocore.utils.ContainerMetadataFetcher, "SLEEP_TIME", 0)


@pytest.fixture
def services(server):
    return AwsServices(server)


@pytest.fixture
def instance(services, monkeypatch):
    """The metadata of an instance, whose role has credentials."""
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", services.url)
    return services


@pytest.fixture
def container(services, monkeypatch):
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{services.url}/container")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return services


@pytest.fixture
def sts(services, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("web-identity")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/r")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", services.url)
    return services


@pytest.fixture
def sso(services, monkeypatch, tmp_path):
    (tmp_path / "config").write_text(
        "[default]\nsso_session = here\nsso_account_id = 1\nsso_role_name = r\n"
        "[sso-session here]\nsso_start_url = https://example.com/start\nsso_region = eu-west-1\n"
    )
    tomorrow = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=1)
    token = {"accessToken": "sso-login", "expiresAt": tomorrow.strftime("%Y-%m-%dT%H:%M:%SZ")}
    for owner in (botocore.credentials.SSOProvider, botocore.tokens.SSOTokenProvider):
        monkeypatch.setattr(owner, "_SSO_TOKEN_CACHE_DIR", str(tmp_path))
    name = botocore.utils.SSOTokenLoader()._generate_cache_key("https://example.com/start", "here")
    (tmp_path / f"{name}.json").write_text(json.dumps(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", services.url)
    return services


def key_of(server):
    return re.search(r"Credential=([^/]+)/", server.requests[-1].headers["Authorization"])[1]


# the instance's metadata

STEPS = ["token", "role", "document"]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("step", STEPS)
def test_a_hiccup_of_the_instances_metadata_is_not_noticed(
    instance, open_s3, server, step, status, times
):
    instance.first(step, *[instance.Answer(status)] * times)
    put(open_s3())
    assert key_of(server) == "INSTANCEKEY"


@pytest.mark.parametrize("step", STEPS)
def test_a_slow_answer_of_the_instances_metadata_is_awaited(instance, open_s3, server, step):
    instance.slowly(step, 1.5)  # botocore itself waits for a second
    put(open_s3())
    assert key_of(server) == "INSTANCEKEY"
    assert instance.asked.count(step) == 1


@pytest.mark.parametrize("status", [404, 403, 400])
def test_an_instance_without_a_role_has_no_credentials(instance, open_s3, status):
    instance.always("role", instance.Answer(status))
    with pytest.raises(CredentialsError, match="no AWS credentials were found"):
        open_s3()


def test_the_users_patience_with_the_metadata_counts(instance, open_s3, monkeypatch):
    monkeypatch.setenv("AWS_METADATA_SERVICE_NUM_ATTEMPTS", "1")
    instance.first("role", instance.Answer(503))
    with pytest.raises(CredentialsError, match="no AWS credentials were found"):
        open_s3()
    assert instance.asked == ["token", "role"]


def test_metadata_that_are_switched_off_are_not_asked(instance, open_s3, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(CredentialsError, match="no AWS credentials"):
        open_s3()
    assert instance.asked == []


# opening a store stands under the retries


HICCUPS = 7  # more than botocore's own attempts


def test_a_store_is_opened_again_if_a_service_that_has_its_credentials_fails(container):
    container.first("container", *[container.Answer(503)] * HICCUPS)
    config = Config(retry=PATIENT, s3=S3Options(endpoint_url=container.url))
    open_store(CheckpointURI.parse("s3://come-late/run"), config)
    assert container.asked.count("container") > HICCUPS


def test_a_store_without_credentials_is_opened_once(instance, services):
    instance.always("role", instance.Answer(404))
    config = Config(retry=PATIENT, s3=S3Options(endpoint_url=services.url))
    with pytest.raises(CredentialsError, match="no AWS credentials"):
        open_store(CheckpointURI.parse("s3://without-credentials/run"), config)
    once = len(instance.asked)
    with pytest.raises(CredentialsError):
        open_store(CheckpointURI.parse("s3://without-credentials/run"), config)
    assert len(instance.asked) == 2 * once


# other services


def sts_error(code):
    return (
        f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>its words</Message>"
        "</Error><RequestId>1</RequestId></ErrorResponse>"
    ).encode()


ANSWERS = [
    ("container", 503, b"out of order", ConnectionLostError),
    ("container", 200, b'{"AccessKeyId": "KEY"}', CredentialsError),
    ("sts", 503, b"", ConnectionLostError),
    ("sts", 502, b"<html>", ConnectionLostError),
    ("sts", 400, sts_error("Throttling"), ConnectionLostError),
    ("sts", 400, sts_error("IDPCommunicationError"), ConnectionLostError),
    ("sts", 400, sts_error("InvalidIdentityToken"), CredentialsError),
    ("sts", 403, sts_error("AccessDenied"), CredentialsError),
    ("sts", 200, b"<html>", CredentialsError),
    ("sso", 500, b'{"message": "its words"}', ConnectionLostError),
    ("sso", 401, b'{"message": "its words"}', CredentialsError),
]


@pytest.mark.parametrize(("place", "status", "body", "kind"), ANSWERS)
def test_a_service_that_is_overloaded_is_asked_again_and_one_that_refuses_is_believed(
    request, open_s3, place, status, body, kind
):
    service = request.getfixturevalue(place)
    service.always(place, service.Answer(status, body=body))
    with pytest.raises(StoreError) as caught:
        put(open_s3())
    assert type(caught.value) is kind
    assert caught.value.certain  # nothing was sent to S3
    if b"its words" in body and place == "sts":
        assert "its words" in str(caught.value)


def test_a_containers_service_that_can_not_be_reached_is_tried_again(open_s3, monkeypatch):
    nowhere = f"http://127.0.0.1:{free_port()}/container"
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", nowhere)
    with pytest.raises(ConnectionLostError):
        open_s3()


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_STS", "HTTP_PROXY"])
def test_sts_that_can_not_be_reached_is_tried_again(sts, open_s3, monkeypatch, variable):
    if variable == "HTTP_PROXY":
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://sts.example")
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConnectionLostError):
        put(open_s3())


def test_sts_that_is_not_trusted_is_named(sts, open_s3, tls_server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", tls_server.url)
    with pytest.raises(TLSError, match=re.escape(tls_server.url)):
        put(open_s3())


def test_a_token_that_is_not_there_is_no_matter_of_time(sts, open_s3, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(CredentialsError, match="none"):
        put(open_s3())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = nobody\n", "nobody"),
        ("[default\n", "pars"),
        ("[default]\ncredential_process = /nowhere/at-all\n", "nowhere"),
    ],
    ids=["a source that is not there", "no file that can be read", "no process"],
)
def test_a_profile_that_can_not_work_is_named(open_s3, monkeypatch, tmp_path, text, told):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "config").write_text(text)
    with pytest.raises(CredentialsError, match=f"(?i){told}"):
        put(open_s3())


# refreshes that fail


@pytest.mark.parametrize("status", [503, 403])
def test_a_refresh_that_fails_is_tried_again(container, open_s3, server, status):
    """botocore insists on other credentials ten minutes before the end of those it has."""
    container.lifetime = datetime.timedelta(minutes=5)
    store = open_s3()
    put(store)
    container.always("container", container.Answer(status))
    with pytest.raises(ConnectionLostError, match="for now") as caught:
        put(store)
    assert caught.value.certain  # else a commit would count as one that may yet take place
    assert container.asked.count("s3") == 1
    container.lifetime = datetime.timedelta(hours=6)
    container.always("container", None)
    put(store)
    assert key_of(server) == "CONTAINERKEY"


def test_credentials_that_end_before_they_are_given_are_named(container, open_s3):
    """The service's clock, or this machine's, is wrong."""
    container.lifetime = datetime.timedelta(seconds=-60)
    with pytest.raises(CredentialsError, match="still expired"):
        put(open_s3())


# what is told to people


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("instance", "iam-role"),
        ("container", "container-role"),
        ("sts", "assume-role-with-web-identity"),
        ("sso", "sso"),
    ],
)
def test_a_store_tells_where_its_keys_come_from_and_when_they_end(request, open_s3, place, source):
    request.getfixturevalue(place)
    origin = open_s3().origin()
    assert origin.source == f"boto3's {source}"
    assert time.time() < origin.ends < time.time() + 7 * 3600
    assert "secret" not in repr(origin).lower()


def test_of_the_id_of_a_key_only_its_end_is_told(open_s3, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    origin = open_s3().origin()
    assert origin.source == "boto3's env"
    assert (origin.identity, origin.ends) == ("access key …MPLE", None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "minioadmin")
    assert open_s3().origin().identity == ""


def test_what_names_endpoint_and_region_is_told(open_s3, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(
        "[default]\nregion = eu-west-3\nendpoint_url = http://of-profile:9000\n"
    )
    by_profile = open_s3(endpoint_url=None).route()
    assert (by_profile.endpoint_from, by_profile.region_from) == ("the profile", "the profile")
    assert by_profile.region == "eu-west-3"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://of-variable:9000")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    by_variable = open_s3(endpoint_url=None).route()
    assert by_variable.endpoint_from == "AWS_ENDPOINT_URL"
    assert (by_variable.region, by_variable.region_from) == ("eu-west-1", "AWS_DEFAULT_REGION")
    monkeypatch.setenv("CLOUDCKPT_S3_REGION", "eu-west-2")
    by_options = open_s3(endpoint_url="http://given:9000").route()
    assert by_options.endpoint_from == "S3Options(endpoint_url=…)"
    assert by_options.region_from == "CLOUDCKPT_S3_REGION"


def test_credentials_of_another_profile_are_found_by_another_session(
    server, open_s3, monkeypatch, tmp_path
):
    """Only the first look may share a session, with whatever resolves the endpoint."""
    made = []
    session_of = s3_access._session

    def session(options):
        made.append(options.profile)
        return session_of(options)

    monkeypatch.setattr(s3_access, "_session", session)
    (tmp_path / "credentials").write_text(
        "".join(
            f"[{name}]\naws_access_key_id = {name.upper()}\naws_secret_access_key = s\n"
            for name in ("one", "other")
        )
    )
    refused = server.Answer(403, body=error_xml("InvalidAccessKeyId"))
    written = server.Answer(headers={"ETag": '"tag"'})
    server.respond(
        lambda request: refused if "=OTHER/" in request.headers["Authorization"] else written
    )
    put(open_s3(profile="one"))
    assert key_of(server) == "ONE"
    monkeypatch.setenv("AWS_PROFILE", "other")
    store = open_s3()
    assert made == ["one", None]
    monkeypatch.setenv("AWS_PROFILE", "one")
    put(store)
    assert [key_of(server), made] == ["ONE", ["one", None, None]]
