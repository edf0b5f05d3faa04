"""Credentials: never shown, named when they can't be right, looked for anew when refused."""

import gc
import html
import json
import logging
import pickle
import sys
import threading
import traceback
import urllib.parse
import urllib.request
import uuid
from unittest.mock import Mock

import pytest
import torch

import cloudckpt
from cloudckpt import AzureOptions, Config, GCSOptions, RetryPolicy, S3Options
from cloudckpt.errors import (
    CloudCheckpointError,
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    InvalidRequestError,
)
from cloudckpt.stores.azure.store import AzureStore
from cloudckpt.stores.credentials import Credentials
from cloudckpt.stores.gcs.store import GCSStore
from cloudckpt.stores.redaction import masked
from cloudckpt.stores.s3.store import S3Store
from cloudckpt.transfer.retry import Retrier
from support.dialects import AZURE_KEY, at_once, error_xml
from support.logs import warnings_of_ours

SECRET = "S3cr3t+Value/of=this-Test"
ONE_TRY = RetryPolicy(attempts=1, base=0.0, cap=0.0)


@pytest.fixture(autouse=True)
def _no_other_credentials(monkeypatch, tmp_path):
    for name in ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


# never shown


def texts_of(error, caplog):
    """All that can be read of an error, of what is beneath it, and in the log."""
    texts = [record.getMessage() for record in caplog.records if not record.name.startswith("boto")]
    seen, waiting = set(), [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        texts += [str(one), repr(one), repr(one.args), repr(vars(one))]
        texts += traceback.format_exception_only(one)  # the rest is source code
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, cloudckpt.errors.RanksFailedError):
            texts.append(repr(one.failures))
    for copy in (pickle.dumps(error), pickle.dumps(pickle.loads(pickle.dumps(error)))):
        texts.append(copy.decode("latin-1"))
    return texts


def spellings(secret):
    """A secret as it may stand in a text."""
    forms = {secret, secret.strip(), repr(secret)[1:-1], ascii(secret)[1:-1]}
    forms |= {line.strip() for line in secret.splitlines()}
    for safe in ("/", ""):
        forms |= {urllib.parse.quote(form, safe, errors="surrogatepass") for form in set(forms)}
    return {form for form in forms if len(form) > 7}


def assert_hidden(texts, *secrets):
    for secret in secrets:
        for form in spellings(secret):
            for text in texts:
                assert form not in text, f"{form!r} in {text!r}"


CONFIGS = {
    "s3://bucket": lambda url, **more: Config(
        s3=S3Options(endpoint_url=url, addressing_style="path"), **more
    ),
    "gs://bucket": lambda url, **more: Config(gcs=GCSOptions(endpoint_url=url), **more),
    "az://container": lambda url, **more: Config(azure=AzureOptions(endpoint_url=url), **more),
}


@pytest.fixture
def attempt(caplog):
    """Saves and loads, which fail; returns the texts of both failures."""

    def run(root, url=None, retry=ONE_TRY):
        texts, state = [], {"w": torch.arange(8.0)}
        config = CONFIGS[root](url, retry=retry)
        for function in (cloudckpt.save, cloudckpt.load):
            with caplog.at_level(logging.DEBUG), pytest.raises(CloudCheckpointError) as caught:
                function(state, checkpoint_id=f"{root}/run", config=config)
            texts += texts_of(caught.value, caplog)
        return texts

    return run


def refuse_all(server, code):
    """Answers as a server that is too talkative: with all that it was sent."""

    def respond(request):
        sent = html.escape(json.dumps([request.target, *request.headers.items()]), quote=False)
        return server.Answer(403, {"x-ms-error-code": code}, error_xml(code, sent))

    server.respond(respond)


WEIRD = {
    "plain": SECRET,
    "line break behind": f"{SECRET}\n",
    "space behind": f"{SECRET} ",
    "space before": f" {SECRET}",
    "a header injected": f"{SECRET}\r\nX-Injected: {SECRET}",
    "folded": f"{SECRET}\n {SECRET}",
    "not latin-1": f"{SECRET}\u2028{SECRET}",
    "latin-1": f"{SECRET}\xe9",
    "quotes": f"{SECRET}'\"{SECRET}",
    "encoded line break": f"{SECRET}%0a{SECRET}",
    "a control character": f"{SECRET}\x7f",
    "no text": f"{SECRET}\udcff",
}
weird = pytest.mark.parametrize("kind", WEIRD)


SHAPES = [
    ("AWS_ACCESS_KEY_ID", "{}"),
    ("AWS_SECRET_ACCESS_KEY", "{}"),
    ("AWS_SESSION_TOKEN", "{}"),
    ("AZURE_STORAGE_SAS_TOKEN", "sv=1&se=2030-01-01&sig={}"),
    ("AZURE_STORAGE_KEY", "{}"),
    ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=account;AccountKey={}"),
    (
        "AZURE_STORAGE_CONNECTION_STRING",
        "AccountName=account;SharedAccessSignature=sv=1&sig={}",
    ),
    ("AZURE_STORAGE_CONNECTION_STRING", "AccountName={};{}"),
]


@weird
@pytest.mark.parametrize(("variable", "shape"), SHAPES)
def test_no_credential_of_the_environment_is_shown(
    server, attempt, monkeypatch, variable, shape, kind
):
    is_aws, secret = variable.startswith("AWS"), WEIRD[kind]
    if "Key={}" in shape or variable == "AZURE_STORAGE_KEY":
        secret = secret.replace(SECRET, AZURE_KEY)
    known = "InvalidAccessKeyId" if kind == "plain" else "AccessDenied"
    refuse_all(server, known if is_aws else "AuthenticationFailed")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv(variable, shape.replace("{}", secret))
    texts = attempt("s3://bucket" if is_aws else "az://container", server.url)
    assert_hidden(texts, secret)
    for request in server.requests:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(request.target).query)
        _, _, signature = (request.headers["Authorization"] or "").partition("Signature=")
        assert_hidden(texts, *query.get("sig", []), *filter(None, [signature]))


@pytest.fixture
def google_files(google_account, monkeypatch, authority, stub_server):
    """Writes credentials whose tokens come from a server; returns that server."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.bundle)
    with stub_server() as server:

        def write(token=SECRET, kind="external_account", subject=None, **more):
            grant = {"access_token": token, "expires_in": 3600, "token_type": "Bearer"}
            server.respond(lambda request: server.Answer(body=json.dumps(grant).encode()))
            file = google_account(kind, server.url, **more)
            if subject is not None:
                file.write_bytes(subject.encode(errors="surrogateescape"))
            return server

        yield write


@weird
@pytest.mark.parametrize("where", ["token", "subject", "private key"])
def test_no_credential_of_google_is_shown(
    tls_server, google_files, attempt, monkeypatch, tmp_path, where, kind
):
    secret = WEIRD[kind]
    refuse_all(tls_server, "AccessDenied")
    if where == "token":
        google_files(secret)
    elif where == "subject":  # which the token endpoint repeats
        server = google_files(subject=secret)
        told = {"error": "invalid_grant", "error_description": f"subject_token={SECRET}"}
        server.respond(lambda request: server.Answer(400, body=json.dumps(told).encode()))
    else:
        key = f"-----BEGIN PRIVATE KEY-----\n{secret}\n-----END PRIVATE KEY-----"
        google_files(kind="service_account", private_key=key)
        monkeypatch.chdir(tmp_path)  # a short name: a text ends after some hundred characters
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "account.json")
        gc.collect()  # a session of google-auth can't be closed amid the recursion on a bad key
    assert_hidden(attempt("gs://bucket", tls_server.url), secret, "subject-token-of-this-test")
    assert where == "token" or tls_server.requests == []


@pytest.mark.parametrize(
    "proxy",
    [
        "http://user:{}@127.0.0.1:9",
        "http://user:{}@:nonsense",
        "http://user:{}@[broken",
        "socks5://user:{}@127.0.0.1:9",
        "user:{}@127.0.0.1:9",
        "https://user:{}@127.0.0.1:9",
    ],
)
@pytest.mark.parametrize(
    ("root", "password"),
    [
        ("s3://bucket", "S3cr3tOfTheProxy"),
        ("s3://bucket", "S3cr3t%20Of%E2%80%A8Proxy"),
        ("s3://bucket", "pw1"),
        ("gs://bucket", "S3cr3t%20Of%E2%80%A8Proxy"),
        ("az://container", "S3cr3t%20Of%E2%80%A8Proxy"),
    ],
)
def test_no_password_of_a_proxy_is_shown(
    azure_key, google_files, attempt, monkeypatch, root, proxy, password
):
    google_files()
    scheme = "https" if root.startswith("gs") else "http"
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, proxy.format(password))
    texts = attempt(root, f"{scheme}://{uuid.uuid4().hex}.example")  # of no other test
    assert_hidden(texts, password, urllib.parse.unquote(password))
    assert not any(f"{password}@" in text for text in texts)


@pytest.mark.parametrize("options", [S3Options, GCSOptions, AzureOptions])
@pytest.mark.parametrize(
    "url",
    [
        f"https://user:{SECRET}@host",
        f"https://host/?sig={SECRET}",
        f"https://host/#{SECRET}",
        f"ftp://user:{SECRET}@host",
        f"user:{SECRET}@host",
        f"https://user:{SECRET}@host\n",
    ],
)
def test_no_endpoint_holds_a_credential(options, url):
    with pytest.raises(ConfigError) as caught:
        options(endpoint_url=url)
    assert_hidden([str(caught.value), repr(caught.value)], SECRET)


@pytest.mark.parametrize(
    ("variable", "root"),
    [
        ("AWS_ENDPOINT_URL", "s3://bucket"),
        ("AWS_ENDPOINT_URL_S3", "s3://bucket"),
        ("STORAGE_EMULATOR_HOST", "gs://bucket"),
        ("CLOUDCKPT_AZURE_ENDPOINT_URL", "az://container"),
    ],
)
@pytest.mark.parametrize("user", [f"user:{SECRET}@", ""])
def test_an_endpoint_of_the_environment_that_can_not_be_used_is_named(
    azure_key, monkeypatch, caplog, variable, root, user
):
    monkeypatch.setenv(variable, f"http://{user}127.0.0.1:9{'' if user else ' '}")
    with pytest.raises(ConfigError, match=r"endpoint|STORAGE_EMULATOR_HOST|AWS_ENDPOINT") as caught:
        cloudckpt.save({"w": torch.ones(2)}, checkpoint_id=f"{root}/run")
    assert_hidden(texts_of(caught.value, caplog), SECRET)


@pytest.mark.parametrize(
    "program",
    [
        f"import sys; sys.exit('aws_secret_access_key={SECRET}')",
        f'print(\'{{"SecretAccessKey": "{SECRET}"\')',
        f'print(\'{{"Version": 1, "SecretAccessKey": "{SECRET}"}}\')',
    ],
)
def test_what_a_failing_credential_process_says_is_not_shown(
    attempt, monkeypatch, tmp_path, program
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    script = tmp_path / "process.py"
    script.write_text(program)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert_hidden(attempt("s3://bucket"), SECRET)


@pytest.mark.parametrize("root", CONFIGS)
def test_no_store_shows_what_it_holds(azure_key, google_files, tls_server, opened, root):
    google_files()
    config = CONFIGS[root](tls_server.url)
    kinds = {"s3://bucket": S3Store, "gs://bucket": GCSStore, "az://container": AzureStore}
    store = opened(kinds[root](root.rpartition("/")[2], config))
    texts = [repr(store), repr(vars(store)), repr(store.access), repr(vars(store.access))]
    texts += [repr(store.access.credentials), repr(vars(store.access.credentials)), repr(config)]
    texts += [repr(store.access.credentials.current)]
    writer = cloudckpt.CloudStorageWriter(f"{root}/run", config=config)
    texts.append(pickle.dumps(writer).decode("latin-1"))
    assert_hidden(texts, AZURE_KEY, SECRET)


@pytest.mark.parametrize("value", [SECRET + "\nX: y", SECRET + "\u2028", f"{SECRET}\r\n {SECRET}"])
def test_a_header_that_can_not_be_sent_is_named_without_its_value(open_client, server, value):
    refused = pytest.raises(InvalidRequestError, match="x-token")
    with refused as caught, open_client().send("GET", server.url, {"x-token": value}):
        pass
    assert_hidden([repr(caught.value), repr(caught.value.__context__)], SECRET)
    assert server.requests == []


@pytest.mark.parametrize(
    "text",
    [
        f"Invalid header value b'{SECRET}\\n'",
        f"reserved character(s), or return character(s) in header value: '{SECRET}'",
        f"GET https://host/key?sv=1&sig={SECRET}&se=2 failed",
        f"http://user:{SECRET}@proxy:3128",
        f"AWS4-HMAC-SHA256 Credential=AKID/x, SignedHeaders=host, Signature={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"X-Amz-Security-Token={SECRET}",
        f'{{"access_token": "{SECRET}"}}',
        f"AccountKey={SECRET};EndpointSuffix=x",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n",
        f'Unable to load PEM file. InvalidHeader("{SECRET}")\')',
        f"the token was {SECRET}",
        f"the token was {urllib.parse.quote(SECRET, safe='')}",
    ],
)
def test_a_text_of_others_is_masked(text):
    assert_hidden([masked(text, [SECRET])], SECRET)
    if "was" not in text:
        assert_hidden([masked(text)], SECRET)


@pytest.mark.parametrize(
    "text",
    [
        "HTTP 403: serviceAccount:job@project.iam.gserviceaccount.com has no storage.objects.get",
        "NewConnectionError: [Errno 111] Connection refused",
        "the certificate of host is not trusted: Basic Constraints of CA cert not marked critical",
        "gs://bucket/user@example.com/run/.metadata",
        "SignatureDoesNotMatch HTTP 403: the secret key does not fit the access key",
    ],
)
def test_a_text_without_credentials_stays_as_it_is(text):
    assert masked(text) == text


# looked for anew


class Key:
    """A source of one secret, until it fails."""

    failure = None

    def secrets(self):
        if self.failure is not None:
            raise self.failure
        return ("one",)


def test_issued_credentials_that_fail_before_a_first_success_are_tried_again(monkeypatch):
    """Also while the interpreter shuts down, when no thread starts."""
    stopped = Mock(side_effect=RuntimeError("can't create new thread at interpreter shutdown"))
    monkeypatch.setattr(threading.Thread, "start", stopped)
    key = Key()
    credentials = Credentials(lambda: key, lambda error: error)
    key.failure = CredentialsError("the service refuses")
    with pytest.raises(CredentialsError):  # none were ever issued: the job is misconfigured
        credentials.get()
    key.failure = None
    credentials.get()
    key.failure = CredentialsError("the service refuses")
    with pytest.raises(ConnectionLostError) as caught:
        credentials.get()
    assert caught.value.certain
    key.failure = None
    assert credentials.get() == (key, ("one",))


def test_many_threads_whose_credentials_failed_look_once_and_say_that_they_wait(monkeypatch):
    """One after the other, they would wait far beyond the deadline of their requests."""
    looks, key, told = [], Key(), threading.Event()
    monkeypatch.setattr("cloudckpt.waiting.FIRST_LINE", 1.0)

    def look():
        looks.append(key)
        if len(looks) > 1:
            assert told.wait(60)
            raise CredentialsError("the service is silent")
        return key

    credentials = Credentials(look, lambda error: error)
    credentials.get()
    key.failure = CredentialsError("expired")
    with pytest.raises(ConnectionLostError):
        credentials.get()

    with warnings_of_ours(lambda line: "the credentials" in line and told.set()):
        refused = at_once(8, lambda: Retrier(ONE_TRY).call(credentials.get))
    assert len(looks) < 8
    assert len({id(error) for error in refused if error.certain}) == 8
