"""Google's store: endpoints, credentials, and the renewal of tokens."""

import datetime
import json
import logging
import ssl
import sys
import threading
import time

import google.auth.credentials
import google.auth.exceptions
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from test_gcs import VERBS, call, error_json

from cloudckpt import CheckpointURI, Config, GCSOptions
from cloudckpt.errors import (
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    MissingDependencyError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.registry import open_store


@pytest.fixture(autouse=True)
def _no_google_surroundings(tmp_path, monkeypatch):
    """No test finds the user's credentials, or looks for a metadata server."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture(scope="module")
def secure_stub(stub_server, tls_files):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls_files)
    with stub_server(context) as server:
        yield server


@pytest.fixture
def secure(secure_stub, tls_files, monkeypatch):
    """The store's endpoint, which is given credentials as it speaks TLS."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls_files[0])
    secure_stub.reset_script()
    return secure_stub


class FakeCredentials(google.auth.credentials.Credentials):
    """Tokens ``token-1``, ``token-2``…; each refresh takes the next step of a script."""

    def __init__(self, *script, seconds=3600.0, takes=0.0):
        super().__init__()
        self.script, self.seconds, self.takes = list(script), seconds, takes
        self.refreshes = 0

    def refresh(self, request):
        self.refreshes += 1
        time.sleep(self.takes)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Exception):
            raise step
        self.token = f"token-{self.refreshes}"
        self.expires_in(self.seconds if step is None else step)

    def expires_in(self, seconds):
        now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
        self.expiry = now + datetime.timedelta(seconds=seconds)


@pytest.fixture
def open_with(secure, monkeypatch):
    """Opens a store whose application default credentials are given."""
    opened = []

    def open_one(credentials, **options):
        monkeypatch.setattr("google.auth.default", lambda: (credentials, "project"))
        options = GCSOptions(endpoint_url=secure.url, **options)
        opened.append(GCSStore("bucket", Config(gcs=options)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def bearer(request):
    return request.headers["Authorization"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_request_has_a_token(open_with, secure, verb):
    assert bearer(call(open_with(FakeCredentials()), secure, verb)) == "Bearer token-1"


def test_a_token_is_fetched_once_and_used_until_it_is_stale(open_with, secure):
    credentials = FakeCredentials()
    store = open_with(credentials)
    assert credentials.refreshes == 0  # a store that is only opened asks nobody
    for verb in VERBS:
        call(store, secure, verb)
    assert credentials.refreshes == 1


@pytest.mark.parametrize("seconds_left", [-1, 60])
def test_a_token_is_renewed_ahead_of_its_end(open_with, secure, seconds_left):
    credentials = FakeCredentials(seconds_left)
    store = open_with(credentials)
    tokens = [bearer(call(store, secure, "head")) for _ in range(3)]
    assert tokens == ["Bearer token-1", "Bearer token-2", "Bearer token-2"]


def test_many_threads_renew_a_token_once(open_with, secure):
    credentials = FakeCredentials(takes=0.3)
    store = open_with(credentials)
    secure.respond(lambda request: secure.Answer(**VERBS["head"][1]))
    threads = [threading.Thread(target=store.head, args=("run/object",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {bearer(request) for request in secure.requests} == {"Bearer token-1"}
    assert (len(secure.requests), credentials.refreshes) == (8, 1)


def test_nobody_waits_while_the_old_token_holds(open_with, secure):
    credentials = FakeCredentials(60)
    store = open_with(credentials)
    call(store, secure, "head")
    may_go_on, is_at_it = threading.Event(), threading.Event()

    def refresh(request):
        is_at_it.set()
        may_go_on.wait(30)
        FakeCredentials.refresh(credentials, request)

    credentials.refresh = refresh
    secure.respond(lambda request: secure.Answer(**VERBS["head"][1]))
    slow = threading.Thread(target=store.head, args=("run/object",))
    slow.start()
    assert is_at_it.wait(30)
    assert bearer(call(store, secure, "put")) == "Bearer token-1"
    may_go_on.set()
    slow.join()
    assert bearer(call(store, secure, "put")) == "Bearer token-2"


NO_ANSWER = google.auth.exceptions.TransportError("connection refused")


REFUSED = google.auth.exceptions.RefreshError("invalid_grant: Bad Request", {})


@pytest.mark.parametrize("failure", [NO_ANSWER, REFUSED], ids=["no answer", "refused"])
def test_a_stale_token_outlives_a_failed_renewal(open_with, secure, caplog, failure):
    store = open_with(FakeCredentials(60, failure, failure))
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        tokens = [bearer(call(store, secure, "head")) for _ in range(4)]
    assert tokens == ["Bearer token-1", "Bearer token-1", "Bearer token-1", "Bearer token-4"]
    (record,) = caplog.records  # one for each token is enough
    assert "still valid, could not be renewed" in record.getMessage()
    assert "cause:" in record.getMessage()


@pytest.mark.parametrize("gone", ["expired", "rejected"])
def test_a_refused_renewal_counts_once_the_old_token_is_of_no_use(open_with, secure, gone):
    credentials = FakeCredentials(60, REFUSED, REFUSED)
    store = open_with(credentials)
    for _ in range(2):
        call(store, secure, "head")
    if gone == "expired":
        credentials.expires_in(-1)
    else:
        store._access.reject()
    with pytest.raises(CredentialsError, match="invalid_grant"):
        store.head("run/object")


class Answer:
    def __init__(self, status):
        self.status = status


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (NO_ANSWER, ConnectionLostError),
        (google.auth.exceptions.RefreshError(NO_ANSWER), ConnectionLostError),
        (
            google.auth.exceptions.RefreshError("internal_failure", retryable=True),
            ConnectionLostError,
        ),
        (google.auth.exceptions.TimeoutError("slow"), ConnectionLostError),
        (google.auth.exceptions.TransportError("no such account", Answer(404)), CredentialsError),
        (google.auth.exceptions.TransportError("unavailable", Answer(503)), ConnectionLostError),
        (REFUSED, CredentialsError),
    ],
)
def test_a_failed_renewal_is_passing_or_not(open_with, secure, failure, expected):
    store = open_with(FakeCredentials(failure))
    with pytest.raises(StoreError) as caught:
        store.head("run/object")
    assert type(caught.value) is expected
    assert caught.value.uri == "gs://bucket/run/object"
    assert secure.requests == []


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "invalid_grant", "error_description": "why it is", "refresh_token": "SECRET"},
        json.dumps({"error": {"message": "why it is", "status": "DENIED"}, "key": "SECRET"}),
    ],
)
def test_a_refusal_is_told_without_the_rest_of_the_answer(open_with, answer):
    failure = google.auth.exceptions.RefreshError("refused", answer)
    with pytest.raises(CredentialsError, match="why it is") as caught:
        open_with(FakeCredentials(failure)).head("run/object")
    error = caught.value
    assert error.__cause__ is None
    assert "SECRET" not in f"{error} {vars(error)}"


def test_a_token_that_the_store_rejects_is_replaced(open_with, secure):
    store = open_with(FakeCredentials())
    secure.answer(status=401, body=error_json(401, "authError", "Invalid Credentials"))
    call(store, secure, "head")
    assert [bearer(request) for request in secure.requests] == ["Bearer token-1", "Bearer token-2"]


def test_a_token_that_the_store_goes_on_to_reject_is_told_after_one_other(open_with, secure):
    store = open_with(FakeCredentials())
    refused = error_json(401, "authError", "Invalid Credentials")
    secure.respond(lambda request: secure.Answer(status=401, body=refused))
    with pytest.raises(CredentialsError, match="does not accept"):
        store.head("run/object")
    assert len(secure.requests) == 2


def test_the_project_of_the_option_wins_over_that_of_the_credentials(open_with, secure):
    credentials = FakeCredentials()
    credentials._quota_project_id = "theirs"
    store = open_with(credentials)
    assert call(store, secure, "head").headers["x-goog-user-project"] == "theirs"
    store = open_with(credentials, user_project="mine")
    assert call(store, secure, "head").headers["x-goog-user-project"] == "mine"


# where credentials are found


@pytest.fixture(scope="module")
def private_key():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


@pytest.fixture
def token_server(stub_server):
    with stub_server() as server:
        token = {"access_token": "the-token", "expires_in": 3600, "token_type": "Bearer"}
        server.respond(lambda request: server.Answer(body=json.dumps(token).encode()))
        yield server


@pytest.fixture
def account_file(tmp_path, private_key, token_server):
    info = {
        "type": "service_account",
        "client_email": "job@project.iam.gserviceaccount.com",
        "private_key_id": "1",
        "private_key": private_key,
        "token_uri": f"{token_server.url}/token",
    }
    (tmp_path / "account.json").write_text(json.dumps(info))
    return tmp_path / "account.json"


@pytest.fixture
def workload_file(tmp_path, token_server):
    (tmp_path / "subject").write_text("subject-token")
    info = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/"
        "providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{token_server.url}/sts",
        "credential_source": {"file": str(tmp_path / "subject")},
    }
    (tmp_path / "workload.json").write_text(json.dumps(info))
    return tmp_path / "workload.json"


@pytest.mark.parametrize("kind", ["account_file", "workload_file"])
@pytest.mark.parametrize("source", ["option", "variable"])
def test_credentials_are_read_from_a_file(secure, token_server, request, kind, source, monkeypatch):
    path = str(request.getfixturevalue(kind))
    options = GCSOptions(endpoint_url=secure.url)
    if source == "option":
        options = GCSOptions(endpoint_url=secure.url, credentials_file=path)
    else:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
    store = GCSStore("bucket", Config(gcs=options))
    assert bearer(call(store, secure, "put")) == "Bearer the-token"
    store.close()
    assert [one.method for one in token_server.requests] == ["POST"]


def test_a_token_endpoint_that_is_silent_is_given_up(secure, account_file, token_server):
    token_server.respond(lambda request: token_server.Answer(silent=True))
    options = GCSOptions(endpoint_url=secure.url, credentials_file=str(account_file))
    store = GCSStore("bucket", Config(gcs=options, read_timeout=0.3))
    with pytest.raises(ConnectionLostError, match="token"):
        store.head("run/object")
    store.close()


def test_a_token_endpoint_that_refuses_is_believed(secure, account_file, token_server):
    body = {"error": "invalid_grant", "error_description": "Invalid JWT Signature."}
    token_server.respond(lambda request: token_server.Answer(400, body=json.dumps(body).encode()))
    options = GCSOptions(endpoint_url=secure.url, credentials_file=str(account_file))
    store = GCSStore("bucket", Config(gcs=options))
    with pytest.raises(CredentialsError, match="Invalid JWT Signature"):
        store.head("run/object")
    store.close()


def test_a_service_account_is_acted_as(secure, account_file, stub_server, monkeypatch):
    options = GCSOptions(
        endpoint_url=secure.url,
        credentials_file=str(account_file),
        impersonate="other@project.iam.gserviceaccount.com",
    )
    store = GCSStore("bucket", Config(gcs=options))
    with stub_server() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        proxy.answer(status=502)
        with pytest.raises(StoreError):
            store.head("run/object")
        asked = [(request.method, request.target) for request in proxy.requests]
    store.close()
    assert asked == [("CONNECT", "iamcredentials.googleapis.com:443")]


@pytest.mark.parametrize("verb", VERBS)
def test_an_anonymous_store_looks_for_no_credentials_and_sends_none(secure, verb):
    store = GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=secure.url, anonymous=True)))
    assert "Authorization" not in call(store, secure, verb).headers
    store.close()


def test_no_credentials_at_all_are_named_and_where_they_are_looked_for():
    with pytest.raises(CredentialsError) as caught:
        GCSStore("bucket", Config())
    for place in (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "application_default_credentials.json",
        "metadata server",
        "gcloud auth application-default login",
    ):
        assert place in str(caught.value)
    assert caught.value.uri == "gs://bucket"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "missing.json"),
        ("no JSON", "JSON"),
        ('{"type": "SECRET"}', "type"),
        ('{"type": "service_account", "private_key": "SECRET"}', "fields"),
        (
            '{"type": "service_account", "client_email": "a@b", "token_uri": "https://t", '
            '"private_key": "SECRET"}',
            "",
        ),
    ],
)
def test_a_file_that_holds_no_credentials_is_named(tmp_path, content, word):
    path = tmp_path / "missing.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CredentialsError) as caught:
        GCSStore("bucket", Config(gcs=GCSOptions(credentials_file=str(path))))
    assert word.lower() in str(caught.value).lower()
    assert '"private_key"' not in str(caught.value)
    assert caught.value.uri == "gs://bucket"


@pytest.mark.parametrize("option", ["credentials_file", "impersonate"])
def test_credentials_are_never_sent_in_the_clear(option):
    options = GCSOptions(endpoint_url="http://store.example", **{option: "x"})
    with pytest.raises(ConfigError, match="https"):
        GCSStore("bucket", Config(gcs=options))


def test_gs_without_google_auth_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("cloudckpt.stores.gcs")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'cloudckpt\[gcs\]'"):
        open_store(CheckpointURI.parse("gs://no-google/run"), Config())


# where requests go


@pytest.mark.parametrize(
    ("domain", "host"),
    [(None, "storage.googleapis.com"), ("cloud.example", "storage.cloud.example")],
)
@pytest.mark.parametrize("verb", ["put", "create_upload"])
def test_google_is_the_default(stub_server, monkeypatch, domain, host, verb):
    monkeypatch.setattr("google.auth.default", lambda: (FakeCredentials(), None))
    if domain is not None:
        monkeypatch.setenv("GOOGLE_CLOUD_UNIVERSE_DOMAIN", domain)
    with stub_server() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        store = GCSStore("bucket", Config())
        proxy.answer(status=502)
        with pytest.raises(ConnectionLostError):
            VERBS[verb][0](store)
        asked = [(request.method, request.target) for request in proxy.requests]
    store.close()
    assert asked == [("CONNECT", f"{host}:443")]
    assert store.capabilities.conditional_writes is True
    assert store._checksums is True


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_an_emulator_is_found_by_the_variable_of_googles_tools(server, monkeypatch, scheme):
    host = server.url.removeprefix("http://")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", scheme + host)
    store = GCSStore("bucket", Config())
    assert "Authorization" not in call(store, server, "put").headers
    assert store.capabilities.conditional_writes is None
    store.close()


def test_the_option_wins_over_the_variable(server, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://nobody.example")
    store = GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=f"{server.url}/")))
    assert call(store, server, "head").target.startswith("/storage/v1/b/bucket/o/")
    store.close()


@pytest.mark.parametrize(
    ("endpoint", "known"),
    [
        ("https://storage.googleapis.com", True),
        ("https://storage.europe-west3.rep.googleapis.com", True),
        ("https://googleapis.com.example", None),
        ("https://notgoogleapis.com", None),
        ("http://storage.googleapis.com", None),
    ],
)
def test_only_google_is_known_to_honour_conditions(monkeypatch, endpoint, known):
    monkeypatch.setattr("google.auth.default", lambda: (FakeCredentials(), None))
    store = GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=endpoint)))
    assert store.capabilities.conditional_writes is known
    store.close()


def test_no_proxy_is_respected(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    store = GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=server.url)))
    assert call(store, server, "put").method == "POST"
    store.close()


def test_no_proxy_may_name_other_hosts(server, monkeypatch):
    monkeypatch.setenv("NO_PROXY", ".internal,10.0.0.0/8")
    store = GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=server.url)))
    assert call(store, server, "put").method == "POST"
    store.close()


@pytest.mark.parametrize("variable", ["ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_for_all_is_asked(server, monkeypatch, variable, scheme):
    monkeypatch.setenv(variable, server.url.removeprefix("http://"))
    options = GCSOptions(endpoint_url=f"{scheme}://store.example", anonymous=True)
    store = GCSStore("bucket", Config(gcs=options))
    server.answer(status=502)
    with pytest.raises(TransientStoreError):
        store.head("run/object")
    store.close()
    expected = "store.example:443" if scheme == "https" else "http://store.example/storage/v1/b/"
    assert server.requests[0].target.startswith(expected)


def test_the_proxy_of_the_scheme_goes_before_that_for_all(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    store = GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url="http://store.example")))
    assert call(store, server, "put").target.startswith("http://store.example/")
    store.close()


def test_no_message_has_a_secret(open_with, secure):
    credentials = FakeCredentials()
    store = open_with(credentials)
    secret = b"token-"
    texts = []
    for answer in (
        secure.Answer(403, body=b"<Error><Code>X</Code><Signed>token-1</Signed></Error>"),
        secure.Answer(500, body=b"Authorization: Bearer token-1"),
        secure.Answer(401, body=b'{"error": {"sent": "Bearer token-1"}}'),
        secure.Answer(mute=True),
    ):
        for function, _ in VERBS.values():
            secure.reset_script()
            secure.respond(lambda request, answer=answer: answer)
            with pytest.raises(StoreError) as caught:
                function(store)
            error = caught.value
            texts.append(f"{error} {error.__cause__} {json.dumps(vars(error), default=str)}")
    assert len(texts) == 4 * len(VERBS)
    assert not [text for text in texts if secret.decode() in text]
