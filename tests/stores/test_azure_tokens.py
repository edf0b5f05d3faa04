"""Tokens of Azure: azure-identity itself, before servers that answer as the real ones document it.

- The metadata service (IMDS) of a virtual machine, its answers and errors:
  https://learn.microsoft.com/entra/identity/managed-identities-azure-resources/how-to-use-vm-token
- Microsoft Entra ID's token endpoint, for the workload identity of a Kubernetes pod:
  https://learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow
"""

import json
import os
import time
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("azure.storage.blob")
pytest.importorskip("azure.identity")

from cloudckpt import AzureOptions, Config
from cloudckpt.errors import (
    CredentialsError,
)
from cloudckpt.stores.azure.store import AzureStore

TENANT = "11111111-2222-3333-4444-555555555555"
OTHER_TENANT = "66666666-7777-8888-9999-000000000000"
SCOPE = "https://storage.azure.com/.default"


@pytest.fixture(autouse=True)
def _no_other_credentials(monkeypatch, tmp_path):
    """No `az` is found either."""
    prefixes = ("AZURE_", "IDENTITY_", "MSI_", "IMDS_", "REQUESTS_CA_", "CURL_CA_", "CLOUDCKPT_")
    for name in list(os.environ):
        if name.startswith(prefixes) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("azure.core.pipeline.policies.RetryPolicy.sleep", lambda *_, **__: None)


@pytest.fixture
def storage(tls_server, tls_files, monkeypatch):
    """Azure Storage: lets everybody in, unless a test wants it otherwise."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls_files[0])
    tls_server.respond(lambda request: found(tls_server))
    return tls_server


@pytest.fixture
def store(storage, opened):
    options = AzureOptions(endpoint_url=storage.url, account="account")
    return opened(AzureStore("container", Config(azure=options, connect_timeout=5.0)))


def found(storage):
    return storage.Answer(headers={"ETag": '"0x1"'}, size=9)


def refused(storage, status=401, code="InvalidAuthenticationInfo"):
    """The detail is one that Azure gives to a token of another tenant."""
    body = (
        f"<Error><Code>{code}</Code><Message>Server failed to authenticate the request. Please "
        "refer to the information in the www-authenticate header.</Message>"
        "<AuthenticationErrorDetail>Issuer validation failed. Issuer did not match."
        "</AuthenticationErrorDetail></Error>"
    )
    headers = {"WWW-Authenticate": "Bearer", "x-ms-error-code": code, "x-ms-request-id": "the-id"}
    return storage.Answer(status, headers, body.encode())


def bearers(storage):
    return [request.headers["Authorization"] for request in storage.requests]


@pytest.fixture
def metadata(stub_server, monkeypatch):
    """The metadata service; its tokens are numbered."""
    with stub_server() as server:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", server.url)
        server.respond(lambda request: metadata_token(server, f"TOKEN{len(server.requests)}"))
        yield server


def as_json(server, status=200, **fields):
    headers = {"Content-Type": "application/json"}
    return server.Answer(status, headers, json.dumps(fields).encode())


def metadata_token(server, token, life=86399):
    """Numbers are strings here, and nothing says when to renew."""
    return as_json(
        server,
        access_token=token,
        client_id=TENANT,
        expires_in=f"{life}",
        expires_on=f"{int(time.time()) + life}",
        ext_expires_in=f"{life}",
        resource="https://storage.azure.com",
        token_type="Bearer",
    )


def json_error(server, status, error, description="words of the vendor"):
    return as_json(server, status, error=error, error_description=description)


@pytest.fixture
def entra(stub_server, tls_context, tls_files, tmp_path, monkeypatch):
    """Microsoft Entra ID, which the pod of a Kubernetes service has a workload identity of."""
    (tmp_path / "federated").write_text("token-of-the-pod")
    with stub_server(tls_context) as server:
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", server.url)
        monkeypatch.setenv("AZURE_TENANT_ID", TENANT)
        monkeypatch.setenv("AZURE_CLIENT_ID", "client")
        monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "federated"))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls_files[0])
        server.respond(lambda request: entra_token(server, f"TOKEN{len(server.requests)}"))
        yield server


def entra_token(server, token):
    return as_json(server, token_type="Bearer", expires_in=3599, access_token=token)


@pytest.fixture
def az(tmp_path, monkeypatch):
    """An `az` that notes each run."""
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    script = tmp_path / "bin" / "az"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {tmp_path}/asked\n'
        'echo "{\\"accessToken\\": \\"TOKEN1\\", \\"expires_on\\": 9999999999}"\n'
    )
    script.chmod(0o755)
    return tmp_path / "asked"


# where tokens come from


def test_a_managed_identity_gives_the_token(store, storage, metadata):
    store.head("run/object")
    store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN1"] * 2
    (request,) = metadata.requests
    assert parse_qs(urlsplit(request.target).query)["resource"] == ["https://storage.azure.com"]


def test_a_workload_identity_gives_the_token(store, storage, entra):
    store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN1"]
    (request,) = entra.requests
    assert parse_qs(request.body.decode())["scope"] == [SCOPE]


def test_az_is_run_once(store, storage, az):
    for _ in range(3):
        store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN1"] * 3
    assert len(az.read_text().splitlines()) == 1


@pytest.mark.parametrize("source", ["metadata", "entra"])
def test_requests_for_tokens_say_whose_they_are(store, request, source):
    server = request.getfixturevalue(source)
    store.head("run/object")
    assert all(r.headers["User-Agent"].startswith("cloudckpt/") for r in server.requests)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("metadata", "ManagedIdentityCredential"),
        ("entra", "WorkloadIdentityCredential"),
        ("az", "AzureCliCredential"),
    ],
)
def test_a_store_tells_where_its_token_comes_from_and_when_it_ends(request, store, source, told):
    request.getfixturevalue(source)
    origin = store.origin()
    assert origin.source == f"azure-identity's {told}"
    assert origin.ends > time.time()


# what keeps a token away


@pytest.mark.parametrize("source", ["metadata", "entra"])
def test_a_service_that_fails_for_the_moment_is_asked_again_by_azure_identity(
    store, storage, request, source
):
    server = request.getfixturevalue(source)
    server.answer(json_error(server, 503, "temporarily_unavailable"))
    store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN2"]


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [("metadata", 400, "Identity not found"), ("entra", 401, "AADSTS700213: No matching identity")],
)
def test_where_nothing_is_found_each_source_says_why(
    store, storage, request, source, status, words
):
    server = request.getfixturevalue(source)
    server.respond(lambda asked: json_error(server, status, "invalid_request", words))
    with pytest.raises(CredentialsError, match="no Azure credentials were found") as caught:
        store.head("run/object")
    assert words in str(caught.value)
    assert caught.value.certain
    assert storage.requests == []


def test_credentials_that_come_later_are_found_by_the_next_request(store, storage, metadata):
    metadata.respond(lambda request: json_error(metadata, 400, "x", "Identity not found"))
    with pytest.raises(CredentialsError):
        store.head("run/object")
    metadata.respond(lambda request: metadata_token(metadata, "TOKEN"))
    store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN"]


# a token that the store does not accept


@pytest.mark.parametrize("source", ["metadata", "entra"])
def test_a_401_asks_for_a_fresh_token_once(store, storage, request, source):
    request.getfixturevalue(source)
    storage.answer(refused(storage))
    assert store.head("run/object").size == 9
    assert bearers(storage) == ["Bearer TOKEN1", "Bearer TOKEN2"]
    store.head("run/object")
    assert bearers(storage)[-1] == "Bearer TOKEN2"


def test_a_fresh_token_that_is_refused_too_is_told(store, storage, entra):
    storage.respond(lambda request: refused(storage))
    with pytest.raises(CredentialsError):
        store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN1", "Bearer TOKEN2"]


def test_the_same_token_is_not_sent_again(store, storage, metadata):
    """The metadata service keeps tokens, and gives the same one until it nearly ends."""
    metadata.respond(lambda request: metadata_token(metadata, "SAME"))
    storage.respond(lambda request: refused(storage))
    with pytest.raises(CredentialsError):
        store.head("run/object")
    assert bearers(storage) == ["Bearer SAME"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_no_matter_of_keys_and_clocks(store, storage, metadata, status):
    code = "InvalidAuthenticationInfo" if status == 401 else "AuthenticationFailed"
    storage.respond(lambda request: refused(storage, status, code))
    with pytest.raises(CredentialsError) as caught:
        store.head("run/object")
    text = str(caught.value)
    assert "access token" in text
    assert "role 'Storage Blob Data Contributor'" in text
    assert "AZURE_TENANT_ID" in text
    assert "the-id" in text
    for word in ("key", "clock", "shared access"):
        assert word not in text
