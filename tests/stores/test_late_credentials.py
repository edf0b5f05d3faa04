"""Credentials that come late are waited for; those that never worked are refused at once."""

import email.utils
import json
import logging
import time

import pytest

from cloudckpt import RetryPolicy
from cloudckpt.errors import ClockError, CredentialsError, ExpiredCredentialsError
from cloudckpt.transfer.retry import Retrier
from support.dialects import error_xml

PATIENT = RetryPolicy(base=0.01, cap=0.05, deadline=20.0)
LATE = 4  # refusals before the new credentials come


ROLE = "arn:aws:iam::123456789012:role/trainer"


def of_sts(action, key):
    """What STS answers."""
    return (
        f"<{action}Response><{action}Result><Credentials><AccessKeyId>{key}</AccessKeyId>"
        "<SecretAccessKey>secret-of-it</SecretAccessKey><SessionToken>token</SessionToken>"
        f"<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></{action}Result>"
        f"</{action}Response>"
    ).encode()


@pytest.fixture
def rotate_aws(monkeypatch, tmp_path, stub_server):
    """Gives AWS credentials out in one of several ways."""

    def of_service(answer):
        service.respond(lambda request: service.Answer(body=answer))

    def of_files(**texts):
        names = {"credentials": "AWS_SHARED_CREDENTIALS_FILE", "config": "AWS_CONFIG_FILE"}
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
            monkeypatch.setenv(names[name], str(tmp_path / name))

    def rotate(source, key):
        if source == "environment":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            return
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service.url)
        if source == "file":
            text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret-of-it\n"
            of_files(credentials=text)
        elif source == "process":
            said = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": "secret-of-it"}
            (tmp_path / "said").write_text(json.dumps(said))
            of_files(config=f"[default]\ncredential_process = cat {tmp_path / 'said'}\n")
        elif source == "role":
            of_files(
                config=f"[default]\nrole_arn = {ROLE}\nsource_profile = user\n",
                credentials="[user]\naws_access_key_id = USER\naws_secret_access_key = its\n",
            )
            of_service(of_sts("AssumeRole", key))
        elif source == "web identity":
            (tmp_path / "token").write_text("a-token")
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
            monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
            of_service(of_sts("AssumeRoleWithWebIdentity", key))
        else:
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.url}/of-the-task")
            given = {"AccessKeyId": key, "SecretAccessKey": "secret-of-it", "Token": "token"}
            of_service(json.dumps({**given, "Expiration": "2099-01-01T00:00:00Z"}).encode())

    with stub_server() as service:
        yield rotate


class Guard:
    """Answers who has the current credentials, which change after some refusals."""

    def __init__(self, server, credentials_of, refused, rotate, body=b"data"):
        self.valid, self.refusals = "FIRST", 0

        def respond(request):
            if self.valid in credentials_of(request):
                return server.Answer(headers={"ETag": '"tag"'}, body=body)
            self.refusals += 1
            if self.refusals == LATE:
                rotate(self.valid)
            return refused(request)

        server.respond(respond)


def read(store):
    return Retrier(PATIENT).call(lambda: store.get("run/object"))[0]


def check_late(store, guard, caplog):
    assert read(store) == b"data"
    guard.valid = "SECOND"
    with caplog.at_level(logging.INFO, logger="cloudckpt"):
        assert read(store) == b"data"
    assert guard.refusals >= LATE
    assert "trying again" in caplog.text


SOURCES = ["environment", "file", "process", "role", "web identity", "container"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
def test_keys_of_aws_that_are_rotated_late(open_s3, server, rotate_aws, caplog, source, code):
    rotate_aws(source, "FIRST")
    guard = Guard(
        server,
        lambda request: request.headers["Authorization"],
        lambda request: server.Answer(403, body=error_xml(code)),
        lambda key: rotate_aws(source, key),
    )
    check_late(open_s3(), guard, caplog)


def test_signatures_of_azure_that_are_rotated_late(open_azure, server, monkeypatch, caplog):
    def rotate(key):
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=1&sig={key}")

    monkeypatch.delenv("AZURE_STORAGE_KEY")
    rotate("FIRST")
    headers = {"x-ms-error-code": "AuthenticationFailed"}
    guard = Guard(
        server,
        lambda request: request.target,
        lambda request: server.Answer(403, headers),
        rotate,
    )
    check_late(open_azure(), guard, caplog)


def test_tokens_of_google_that_are_rotated_late(
    open_gcs, tls_server, stub_server, tls_files, monkeypatch, tmp_path, caplog
):
    with stub_server() as tokens:

        def rotate(key):
            grant = {"access_token": f"token-{key}", "expires_in": 3600, "token_type": "Bearer"}
            tokens.respond(lambda request: tokens.Answer(body=json.dumps(grant).encode()))

        rotate("FIRST")
        (tmp_path / "subject").write_text("subject-token")
        account = {
            "type": "external_account",
            "audience": "//iam.googleapis.com/projects/1/locations/global/"
            "workloadIdentityPools/p/providers/q",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": f"{tokens.url}/sts",
            "credential_source": {"file": str(tmp_path / "subject")},
        }
        (tmp_path / "account.json").write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls_files[0])
        guard = Guard(
            tls_server,
            lambda request: request.headers["Authorization"],
            lambda request: tls_server.Answer(401),
            rotate,
            b'{"size": "4", "generation": "1"}',
        )
        store = open_gcs(endpoint_url=tls_server.url)
        assert Retrier(PATIENT).call(lambda: store.head("run/object")).size == 4
        guard.valid = "SECOND"
        with caplog.at_level(logging.INFO, logger="cloudckpt"):
            assert Retrier(PATIENT).call(lambda: store.head("run/object")).size == 4
        assert guard.refusals >= LATE


def test_credentials_that_have_never_worked_are_refused_at_once(open_s3, server):
    server.respond(lambda request: server.Answer(403, body=error_xml("InvalidAccessKeyId")))
    began = time.monotonic()
    with pytest.raises(CredentialsError) as caught:
        read(open_s3())
    assert not isinstance(caught.value, ExpiredCredentialsError)
    assert len(server.requests) == 1
    assert time.monotonic() - began < PATIENT.deadline / 2


def test_credentials_that_do_not_come_are_given_up_at_the_deadline(open_s3, server):
    store = open_s3()
    server.answer(headers={"ETag": '"tag"'}, body=b"data")
    assert read(store) == b"data"
    server.respond(lambda request: server.Answer(403, body=error_xml("ExpiredToken")))
    policy = RetryPolicy(base=0.01, cap=0.05, deadline=0.5)
    began = time.monotonic()
    with pytest.raises(ExpiredCredentialsError, match="have expired") as caught:
        Retrier(policy).call(lambda: store.get("run/object"))
    assert isinstance(caught.value, CredentialsError)
    assert "gave up" in str(caught.value)
    assert 0.4 < time.monotonic() - began < 10


# the time of a signature


def skewed(server, dialect, date):
    headers = {"Date": email.utils.formatdate(date, usegmt=True)}
    if dialect == "s3":
        return server.Answer(403, headers, error_xml("RequestTimeTooSkewed"))
    detail = "Request date header too old: 'Fri, 27 Nov 2026 07:00:00 GMT'"
    body = f"<Error><AuthenticationErrorDetail>{detail}</AuthenticationErrorDetail></Error>"
    return server.Answer(403, {**headers, "x-ms-error-code": "AuthenticationFailed"}, body.encode())


@pytest.fixture(params=["s3", "azure"])
def clocked(request, open_s3, open_azure):
    """A store whose signatures have a time."""
    return request.param, (open_s3 if request.param == "s3" else open_azure)()


def test_a_request_that_arrived_late_is_signed_anew(clocked, server):
    dialect, store = clocked
    server.answer(skewed(server, dialect, time.time()))
    server.answer(headers={"ETag": '"tag"'}, body=b"data")
    assert store.get("run/object")[0] == b"data"
    assert len(server.requests) == 2


@pytest.mark.parametrize("minutes", [-30, 30])
@pytest.mark.parametrize("has_worked", [False, True])
def test_a_clock_that_is_wrong_by_minutes_is_named_at_once(clocked, server, minutes, has_worked):
    dialect, store = clocked
    if has_worked:
        server.answer(headers={"ETag": '"tag"'}, body=b"data")
        read(store)
    server.reset_script()
    server.respond(lambda request: skewed(server, dialect, time.time() + 60 * minutes))
    with pytest.raises(ClockError, match="30 minutes"):
        read(store)
    assert len(server.requests) == 1
