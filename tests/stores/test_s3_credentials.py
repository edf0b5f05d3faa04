"""Credentials of AWS that can't be had for the moment, and those that never can."""

import datetime
import json
import re
import string
import threading
import time

import boto3
import botocore.credentials
import botocore.exceptions
import botocore.session
import botocore.utils
import pytest
import torch

import cloudckpt
from cloudckpt import Config, RetryPolicy, S3Options
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import (
    AccessDeniedError,
    CloudCheckpointError,
    ConnectionLostError,
    CredentialsError,
    ServerError,
    StoreError,
    ThrottledError,
    TLSError,
    TransientStoreError,
)
from cloudckpt.stores import s3_credentials
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3_credentials import Keys
from cloudckpt.transfer.retry import open_store
from cloudckpt.uri import CheckpointURI
from emulators import free_port
from stubs.aws_services import AwsServices

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


@pytest.fixture
def open_s3(services):
    """Opens a store on the stub."""
    opened = []

    def open_one(**options):
        values = {"endpoint_url": services.url, "addressing_style": "path", **options}
        opened.append(S3Store("bucket", Config(s3=S3Options(**values), connections=2)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def put(store):
    store.put("run/object", [memoryview(b"data")], checksum=CRC32C.of(b"data"))


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


@pytest.mark.parametrize("way", ["variable", "profile"])
def test_the_users_patience_with_the_metadata_counts(instance, open_s3, monkeypatch, tmp_path, way):
    if way == "variable":
        monkeypatch.setenv("AWS_METADATA_SERVICE_NUM_ATTEMPTS", "1")
    else:
        (tmp_path / "config").write_text("[default]\nmetadata_service_num_attempts = 1\n")
    instance.first("role", instance.Answer(503))
    with pytest.raises(TransientStoreError):
        open_s3()
    assert instance.asked == ["token", "role", "token", "role", "document"]  # botocore, and we


@pytest.mark.parametrize(
    ("way", "value"), [("variable", "1"), ("profile", "metadata_service_timeout = 1")]
)
def test_the_users_time_limit_for_the_metadata_counts(
    instance, open_s3, monkeypatch, tmp_path, way, value
):
    if way == "variable":
        monkeypatch.setenv("AWS_METADATA_SERVICE_TIMEOUT", value)
    else:
        (tmp_path / "config").write_text(f"[default]\n{value}\n")
    instance.slowly("role", 2.5)
    put(open_s3())
    assert instance.asked.count("role") == 2


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("step", STEPS)
def test_metadata_that_fail_longer_are_no_lack_of_credentials(instance, open_s3, step, status):
    instance.always(step, instance.Answer(status))
    if step == "token":  # a busy service is not asked in the old way
        instance.always("role", instance.Answer(401))
    with pytest.raises(TransientStoreError, match="instance's role"):
        open_s3()


def test_metadata_that_recover_meanwhile_are_no_lack_of_credentials(instance, open_s3):
    instance.first("role", *[instance.Answer(503)] * 3)
    with pytest.raises(TransientStoreError, match="instance's role"):
        open_s3()


@pytest.mark.parametrize("status", [404, 403, 400])
def test_an_instance_without_a_role_has_no_credentials(instance, open_s3, status):
    instance.always("role", instance.Answer(status))
    with pytest.raises(CredentialsError, match="no AWS credentials were found"):
        open_s3()


@pytest.mark.parametrize("status", [404, 403, 405])
def test_an_instance_without_tokens_is_asked_in_the_old_way(instance, open_s3, server, status):
    instance.always("token", instance.Answer(status))
    put(open_s3())
    assert key_of(server) == "INSTANCEKEY"


def test_a_role_that_nobody_may_take_is_named(instance, open_s3):
    refusal = {"Code": "AssumeRoleUnauthorizedAccess", "Message": "EC2 cannot assume the role r"}
    instance.always("document", instance.Answer(body=json.dumps(refusal).encode()))
    with pytest.raises(CredentialsError, match="AssumeRoleUnauthorizedAccess: EC2 cannot assume"):
        open_s3()


def test_metadata_that_are_no_json_are_no_lack_of_credentials(instance, open_s3):
    instance.always("document", instance.Answer(body=b"<html>"))
    with pytest.raises(ServerError):
        open_s3()


def test_metadata_that_can_not_be_reached_where_they_should_be_are_tried_again(
    open_s3, monkeypatch
):
    named = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", named)
    with pytest.raises(ConnectionLostError, match=re.escape(named)):
        open_s3()


@pytest.mark.parametrize("is_ec2", [False, True])
def test_where_no_metadata_are_to_be_expected_there_are_no_credentials(
    open_s3, monkeypatch, is_ec2
):
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(botocore.utils.IMDSFetcher, "_select_base_url", lambda *_: nowhere)
    monkeypatch.setattr(s3_credentials, "_is_ec2", lambda: is_ec2)
    with pytest.raises(ConnectionLostError if is_ec2 else CredentialsError):
        open_s3()


def test_metadata_behind_a_proxy_are_none(instance, open_s3, server, monkeypatch):
    """A proxy answers with a failure of its own for what is not there."""
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://metadata.example")
    monkeypatch.setenv("HTTP_PROXY", server.url)
    for step in STEPS:
        instance.always(step, instance.Answer(503))
    with pytest.raises(CredentialsError, match="no AWS credentials"):
        open_s3()


def test_metadata_that_are_switched_off_are_not_asked(instance, open_s3, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(CredentialsError, match="no AWS credentials"):
        open_s3()
    assert instance.asked == []


@pytest.mark.parametrize("step", STEPS)
def test_a_profile_that_takes_its_credentials_from_the_instance_waits_for_them_too(
    instance, open_s3, tmp_path, step
):
    (tmp_path / "config").write_text(
        "[default]\nrole_arn = arn:aws:iam::1:role/r\ncredential_source = Ec2InstanceMetadata\n"
    )
    instance.always(step, instance.Answer(503))
    if step == "token":
        instance.always("role", instance.Answer(401))
    with pytest.raises(TransientStoreError):
        put(open_s3())


def test_metadata_without_the_old_way_are_tried_again(instance, open_s3, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_V1_DISABLED", "true")
    instance.always("token", instance.Answer(503))
    with pytest.raises(TransientStoreError):
        open_s3()


# opening a store stands under the retries

HICCUPS = 7  # more than botocore's own attempts


def entries():
    """Each way in, and what it needs to be there before."""
    state = {"weight": torch.arange(4.0)}
    return {
        "save": lambda uri, config: cloudckpt.save(state, checkpoint_id=uri, config=config),
        "load": lambda uri, config: cloudckpt.load(dict(state), checkpoint_id=uri, config=config),
        "exists": lambda uri, config: cloudckpt.exists(uri, config=config),
        "open_store": lambda uri, config: open_store(CheckpointURI.parse(uri), config),
    }


@pytest.mark.parametrize("entry", entries())
def test_a_store_is_opened_again_if_its_credentials_come_late(
    instance, s3_url, bucket, monkeypatch, entry
):
    options = S3Options(endpoint_url=s3_url, addressing_style="path")
    uri, config = f"s3://{bucket}/run", Config(retry=PATIENT, s3=options)
    if entry == "load":
        with monkeypatch.context() as other:
            other.setenv("AWS_ACCESS_KEY_ID", "testing")
            other.setenv("AWS_SECRET_ACCESS_KEY", "testing")
            entries()["save"](uri, Config(retry=PATIENT, s3=options, connections=3))
    instance.first("role", *[instance.Answer(503)] * HICCUPS)
    entries()[entry](uri, config)
    assert instance.asked.count("role") > HICCUPS


def test_a_store_without_credentials_is_opened_once(instance, services):
    instance.always("role", instance.Answer(404))
    config = Config(retry=PATIENT, s3=S3Options(endpoint_url=services.url))
    with pytest.raises(CredentialsError, match="no AWS credentials"):
        open_store(CheckpointURI.parse("s3://without-credentials/run"), config)
    once = len(instance.asked)
    with pytest.raises(CredentialsError):
        open_store(CheckpointURI.parse("s3://without-credentials/run"), config)
    assert len(instance.asked) == 2 * once


def test_a_store_that_never_gets_its_credentials_says_so_at_the_end(instance, services):
    instance.always("role", instance.Answer(503))
    policy = RetryPolicy(attempts=2, base=0.0, cap=0.0, deadline=0.0)
    config = Config(retry=policy, s3=S3Options(endpoint_url=services.url))
    with pytest.raises(TransientStoreError, match=r"instance's role.*gave up"):
        open_store(CheckpointURI.parse("s3://never/run"), config)


# other services

CONTAINER = [
    ({"status": 500, "body": b"out of order"}, ServerError),
    ({"status": 503}, ThrottledError),
    ({"status": 429}, ThrottledError),
    ({"status": 400, "body": b"unknown task"}, CredentialsError),
    ({"status": 403, "body": b"the token is wrong"}, CredentialsError),
    ({"status": 404}, CredentialsError),
    ({"body": b"<html>"}, ServerError),
    ({"body": b'{"AccessKeyId": "KEY"}'}, CredentialsError),
    ({"mute": True}, ConnectionLostError),
]


@pytest.mark.parametrize(("answer", "kind"), CONTAINER)
def test_what_the_containers_service_answers_has_its_class(container, open_s3, answer, kind):
    container.always("container", container.Answer(**answer))
    with pytest.raises(StoreError) as caught:
        open_s3()
    assert type(caught.value) is kind


def test_a_containers_service_that_can_not_be_reached_is_tried_again(open_s3, monkeypatch):
    nowhere = f"http://127.0.0.1:{free_port()}/container"
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", nowhere)
    with pytest.raises(ConnectionLostError):
        open_s3()


def sts_error(code):
    return (
        f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>its words</Message>"
        "</Error><RequestId>1</RequestId></ErrorResponse>"
    ).encode()


STS = [
    (503, b"", ThrottledError),
    (500, sts_error("InternalFailure"), ServerError),
    (502, b"<html>", ServerError),
    (400, sts_error("Throttling"), ThrottledError),
    (400, sts_error("IDPCommunicationError"), ServerError),
    (400, sts_error("ExpiredTokenException"), CredentialsError),
    (400, sts_error("InvalidIdentityToken"), CredentialsError),
    (400, sts_error("RegionDisabledException"), CredentialsError),
    (404, sts_error("SomethingNew"), CredentialsError),
    (403, sts_error("AccessDenied"), AccessDeniedError),
    (200, b"<html>", CredentialsError),
]


@pytest.mark.parametrize(("status", "body", "kind"), STS)
def test_what_sts_answers_has_its_class(sts, open_s3, status, body, kind):
    sts.always("sts", sts.Answer(status, body=body))
    with pytest.raises(StoreError) as caught:
        put(open_s3())
    assert type(caught.value) is kind
    assert caught.value.certain  # nothing was sent to S3
    if b"its words" in body:
        assert "its words" in str(caught.value)


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
    ("status", "code", "kind"),
    [
        (200, None, None),
        (429, "TooManyRequestsException", ThrottledError),
        (500, "InternalServerException", ServerError),
        (401, "UnauthorizedException", CredentialsError),
        (404, "ResourceNotFoundException", CredentialsError),
        (403, "ForbiddenException", AccessDeniedError),
    ],
)
def test_what_the_identity_center_answers_has_its_class(sso, open_s3, server, status, code, kind):
    if kind is None:
        put(open_s3())
        assert key_of(server) == "SSOKEY"
        return
    error = sso.Answer(status, {"x-amzn-errortype": code}, b'{"message": "its words"}')
    sso.always("sso", error)
    with pytest.raises(StoreError) as caught:
        put(open_s3())
    assert type(caught.value) is kind


# what botocore raises


def made(kind):
    """An exception of botocore, with something in each place of its text."""
    if issubclass(kind, botocore.exceptions.ClientError):
        return kind({"Error": {"Code": "SomethingNew"}, "ResponseMetadata": {}}, "AssumeRole")
    names = {name for _, name, _, _ in string.Formatter().parse(kind.fmt) if name}
    if kind is botocore.exceptions.WaiterError:
        names.add("last_response")
    return kind(**dict.fromkeys(names, "x"))


RAISED = [
    made(kind)
    for kind in vars(botocore.exceptions).values()
    if isinstance(kind, type)
    and kind.__module__ == "botocore.exceptions"
    and issubclass(kind, (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError))
] + [
    RuntimeError("Credentials were refreshed, but the refreshed credentials are still expired."),
    KeyError("AccessKeyId"),
    TypeError("'NoneType' object is not subscriptable"),
    AttributeError("x"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"),
    EOFError("EOF when reading a line"),
    FileNotFoundError(2, "No such file", "aws-vault"),
]
PASSING = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.ConnectionClosedError,
    botocore.exceptions.ReadTimeoutError,
    botocore.exceptions.ResponseStreamingError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.MetadataRetrievalError,
    botocore.exceptions.CapacityNotAvailableError,
)


class _Raising:
    """Credentials whose renewal fails."""

    method = "test"

    def __init__(self, error):
        self.error = error

    def get_frozen_credentials(self):
        raise self.error


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("when", ["found", "renewed"])
def test_whatever_botocore_raises_about_credentials_has_a_class(monkeypatch, error, when):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def find(session):
        if when == "found":
            raise error
        return _Raising(error)

    monkeypatch.setattr(botocore.session.Session, "get_credentials", find)
    with pytest.raises(CloudCheckpointError) as caught:
        Keys(boto3.session.Session, "s3://bucket").fetch()
    assert isinstance(caught.value, TransientStoreError) == isinstance(error, PASSING)
    if not isinstance(error, PASSING):
        assert isinstance(caught.value, (CredentialsError, TLSError))
    assert caught.value.uri == "s3://bucket"


PROFILES = {
    "no source": ("[default]\nrole_arn = arn:aws:iam::1:role/r\n", "source_profile"),
    "a source that is not there": (
        "[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = nobody\n",
        "nobody",
    ),
    "a source without credentials": (
        "[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = empty\n"
        "[profile empty]\nregion = eu-west-1\n",
        "empty",
    ),
    "a circle": (
        "[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = b\n"
        "[profile b]\nrole_arn = arn:aws:iam::1:role/q\nsource_profile = default\n",
        "Infinite loop",
    ),
    "two sources": (
        "[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = b\n"
        "credential_source = Environment\n[profile b]\n",
        "both",
    ),
    "an unknown source": (
        "[default]\nrole_arn = arn:aws:iam::1:role/r\ncredential_source = Magic\n",
        "Magic",
    ),
    "half of a session": ("[default]\nsso_account_id = 1\nsso_role_name = r\n", "sso_start_url"),
    "a session that is not there": (
        "[default]\nsso_session = gone\nsso_account_id = 1\nsso_role_name = r\n",
        "gone",
    ),
    "no login": (
        "[default]\nsso_start_url = https://nobody.example/start\nsso_region = eu-west-1\n"
        "sso_account_id = 1\nsso_role_name = r\n",
        "SSO",
    ),
    "no file that can be read": ("[default\n", "pars"),
    "a process that is not there": ("[default]\ncredential_process = /nowhere/at-all\n", "nowhere"),
}


@pytest.mark.parametrize("trouble", PROFILES)
def test_a_profile_that_can_not_work_is_named(open_s3, monkeypatch, tmp_path, trouble):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    text, told = PROFILES[trouble]
    (tmp_path / "config").write_text(text)
    with pytest.raises(CredentialsError, match=f"(?i){told}"):
        put(open_s3())


# renewals that fail


@pytest.fixture
def ending(container):
    """The container gives credentials that end in five minutes: botocore insists on others."""
    container.lifetime = datetime.timedelta(minutes=5)
    return container


@pytest.mark.parametrize("status", [503, 403])
def test_credentials_are_used_as_long_as_they_live_if_their_renewal_fails(
    ending, open_s3, server, status
):
    store = open_s3()
    put(store)
    ending.always("container", ending.Answer(status))
    for _ in range(3):
        put(store)
        assert key_of(server) == "CONTAINERKEY"


def test_a_renewal_that_fails_is_not_repeated_with_every_request(ending, open_s3, monkeypatch):
    store = open_s3()
    put(store)
    ending.always("container", ending.Answer(503))
    put(store)
    asked = ending.asked.count("container")
    put(store)
    assert ending.asked.count("container") == asked
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31.0)
    put(store)
    assert ending.asked.count("container") > asked


def test_a_renewal_does_not_stop_the_requests_of_other_threads(ending, open_s3, server):
    store = open_s3()
    put(store)
    is_asked, may_answer = threading.Event(), threading.Event()
    answer = ending._container

    def wait(request):
        is_asked.set()
        may_answer.wait(60)
        return answer(request)

    ending._container = wait
    renewing = threading.Thread(target=put, args=(store,))
    renewing.start()
    assert is_asked.wait(60)
    put(store)  # ends although the other one waits
    may_answer.set()
    renewing.join()
    assert ending.asked.count("s3") == 3


def test_credentials_that_have_ended_and_can_not_be_renewed_for_now_are_transient(
    container, open_s3
):
    container.lifetime = datetime.timedelta(seconds=-60)
    store = open_s3()
    container.always("container", container.Answer(503))
    with pytest.raises(TransientStoreError):
        put(store)


def test_a_request_for_which_no_credentials_could_be_looked_up_was_not_sent(container, open_s3):
    """Else a commit would count as one that may yet take place."""
    container.lifetime = datetime.timedelta(seconds=-60)
    store = open_s3()
    container.always("container", container.Answer(403))
    with pytest.raises(CredentialsError):
        put(store)
    container.always("container", container.Answer(503))
    with pytest.raises(TransientStoreError) as caught:
        put(store)
    assert caught.value.certain
    assert "s3" not in container.asked


def test_credentials_that_end_before_they_are_given_are_named(container, open_s3):
    """The service's clock, or this machine's, is wrong."""
    container.lifetime = datetime.timedelta(seconds=-60)
    with pytest.raises(CredentialsError, match="still expired"):
        put(open_s3())


# what is told to people

SOURCES = {
    "instance": "its metadata (IMDS)",
    "container": "the container's role",
    "sts": "a web identity, as of IRSA",
    "sso": "aws sso login",
}


@pytest.mark.parametrize("place", SOURCES)
def test_a_store_tells_where_its_keys_come_from_and_when_they_end(request, open_s3, place):
    request.getfixturevalue(place)
    origin = open_s3().origin()
    assert SOURCES[place] in origin.source
    assert time.time() < origin.ends < time.time() + 7 * 3600
    assert "secret" not in repr(origin).lower()


def test_of_the_id_of_a_key_only_its_end_is_told(open_s3, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    origin = open_s3().origin()
    assert "AWS_ACCESS_KEY_ID" in origin.source
    assert (origin.identity, origin.ends) == ("access key …MPLE", None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "minioadmin")
    assert open_s3().origin().identity == ""


def test_what_names_endpoint_and_region_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(
        "[default]\nregion = eu-west-3\nendpoint_url = http://of-profile:9000\n"
    )
    by_profile = S3Store("bucket", Config()).route()
    assert (by_profile.endpoint_from, by_profile.region_from) == ("the profile", "the profile")
    assert by_profile.region == "eu-west-3"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://of-variable:9000")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    by_variable = S3Store("bucket", Config()).route()
    assert by_variable.endpoint_from == "AWS_ENDPOINT_URL"
    assert (by_variable.region, by_variable.region_from) == ("eu-west-1", "AWS_DEFAULT_REGION")
    monkeypatch.setenv("CLOUDCKPT_S3_REGION", "eu-west-2")
    by_options = S3Store("bucket", Config(s3=S3Options(endpoint_url="http://given:9000"))).route()
    assert by_options.endpoint_from == "S3Options(endpoint_url=…)"
    assert by_options.region_from == "CLOUDCKPT_S3_REGION"
