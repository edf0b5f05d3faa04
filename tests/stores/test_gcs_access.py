"""Google's store: endpoints, credentials, and the renewal of tokens."""

import datetime
import json

import google.auth.credentials
import google.auth.exceptions
import pytest

from cloudckpt import Config, GCSOptions
from cloudckpt.errors import ClockError, ConnectionLostError, CredentialsError
from cloudckpt.stores.gcs import access as gcs_access
from cloudckpt.stores.gcs.store import GCSStore
from support.dialects import GOOGLE

VERBS, call = GOOGLE.verbs, GOOGLE.call


@pytest.fixture(autouse=True)
def _no_google_surroundings(tmp_path, monkeypatch):
    """No test finds the user's credentials, or looks for a metadata server."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture
def secure(tls_server, authority, monkeypatch):
    """The store's endpoint, which is given credentials as it speaks TLS."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.bundle)
    return tls_server


class FakeCredentials(google.auth.credentials.Credentials):
    """Tokens ``token-1``, ``token-2``…; each refresh raises the next failure of a script."""

    def __init__(self, *script):
        super().__init__()
        self.script, self.refreshes = list(script), 0

    def refresh(self, request):
        self.refreshes += 1
        if self.script:
            raise self.script.pop(0)
        self.token = f"token-{self.refreshes}"
        self.expires_in(3600.0)

    def expires_in(self, seconds):
        now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
        self.expiry = now + datetime.timedelta(seconds=seconds)


@pytest.fixture
def open_gcs(secure, opened):
    """Opens stores on the stub, with options of Google's store."""

    def open_one(*, read_timeout=60.0, **options):
        options = GCSOptions(**{"endpoint_url": secure.url, **options})
        return opened(GCSStore("bucket", Config(gcs=options, read_timeout=read_timeout)))

    return open_one


@pytest.fixture
def open_with(open_gcs, monkeypatch):
    """Opens a store whose application default credentials are given."""

    def open_one(credentials, **options):
        monkeypatch.setattr("google.auth.default", lambda: (credentials, "project"))
        return open_gcs(**options)

    return open_one


REFUSED = google.auth.exceptions.RefreshError("invalid_grant: Bad Request", {})
SILENT = google.auth.exceptions.TransportError("the token service is down")


@pytest.mark.parametrize("failure", [REFUSED, SILENT])
def test_a_valid_token_is_used_while_it_can_not_be_refreshed(
    open_with, secure, monkeypatch, failure
):
    def sent():
        return call(store, secure, "head").headers["Authorization"]

    clock = [1000.0]
    monkeypatch.setattr(gcs_access.time, "monotonic", lambda: clock[0])
    credentials = FakeCredentials()
    store = open_with(credentials)
    assert sent() == "Bearer token-1"
    # as the background leaves it once it has failed: google-auth then refreshes in its place
    monkeypatch.setattr(credentials._refresh_worker, "start_refresh", lambda *given: False)
    credentials.expires_in(60)
    credentials.script = [failure] * 9
    assert [sent(), sent(), sent()] == ["Bearer token-1"] * 3
    assert credentials.refreshes == 2  # not by every request
    credentials.script, clock[0] = [], clock[0] + 60
    assert sent() == "Bearer token-3"


# where credentials are found


@pytest.fixture
def token_server(stub_server):
    with stub_server() as server:
        yield server


WRONG_CLOCK = {  # as Google's token endpoint words it
    "error": "invalid_grant",
    "error_description": "Invalid JWT: Token must be a short-lived token (60 minutes) and in a "
    "reasonable timeframe. Check your iat and exp values in the JWT claim.",
}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"silent": True}, ConnectionLostError),
        ({"status": 400, "body": json.dumps(WRONG_CLOCK).encode()}, ClockError),
    ],
)
def test_why_no_token_comes_is_told(open_gcs, google_account, token_server, answer, error):
    google_account("service_account", token_server.url)
    token_server.respond(lambda request: token_server.Answer(**answer))
    with pytest.raises(error) as caught:
        open_gcs(read_timeout=0.3).head("run/object")
    assert caught.value.certain
    assert caught.value.uri.startswith("gs://bucket")


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
def test_a_file_that_holds_no_credentials_is_named(tmp_path, monkeypatch, content, word):
    path = tmp_path / "missing.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(CredentialsError) as caught:
        GCSStore("bucket", Config())
    assert word.lower() in str(caught.value).lower()
    assert '"private_key"' not in str(caught.value)
    assert caught.value.uri == "gs://bucket"


# universes, and what else google-auth tells


@pytest.mark.parametrize("kind", ["service_account", "external_account"])
def test_credentials_for_another_universe_are_not_sent(
    open_gcs, google_account, secure, token_server, kind
):
    google_account(kind, token_server.url, universe_domain="cloud.example")
    with pytest.raises(CredentialsError, match=r"universe cloud\.example") as caught:
        open_gcs()
    assert "GOOGLE_CLOUD_UNIVERSE_DOMAIN=cloud.example" in str(caught.value)
    assert caught.value.uri == "gs://bucket"
    assert secure.requests == token_server.requests == []


# where requests go


@pytest.mark.parametrize(
    ("domain", "host"),
    [(None, "storage.googleapis.com"), ("cloud.example", "storage.cloud.example")],
)
def test_google_is_the_default(open_with, server, monkeypatch, domain, host):
    credentials = FakeCredentials()
    if domain is not None:
        monkeypatch.setenv("GOOGLE_CLOUD_UNIVERSE_DOMAIN", domain)
        credentials._universe_domain = domain
    monkeypatch.setenv("HTTPS_PROXY", server.url)
    store = open_with(credentials, endpoint_url=None)
    for verb in ("put", "create_upload"):
        server.answer(status=502)
        with pytest.raises(ConnectionLostError):
            VERBS[verb](store)
        request = server.requests[-1]
        assert (request.method, request.target) == ("CONNECT", f"{host}:443")
    assert store.capabilities.conditional_writes is True
    assert store.capabilities.verifies


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_an_emulator_is_found_by_the_variable_of_googles_tools(
    open_gcs, server, monkeypatch, scheme
):
    host = server.url.removeprefix("http://")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", scheme + host)
    store = open_gcs(endpoint_url=None)
    assert "Authorization" not in call(store, server, "put").headers
    assert store.capabilities.conditional_writes is None
