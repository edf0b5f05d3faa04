"""Tokens of Azure: azure-identity itself, before servers that answer as the real ones document it.

- The metadata service (IMDS) of a virtual machine, its answers and errors:
  https://learn.microsoft.com/entra/identity/managed-identities-azure-resources/how-to-use-vm-token
- Microsoft Entra ID's token endpoint, for the workload identity of a Kubernetes pod:
  https://learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow
- The 401 of Azure Storage that names a tenant:
  https://learn.microsoft.com/rest/api/storageservices/authorize-with-azure-active-directory
"""

import json
import os
import ssl
import time
from urllib.parse import parse_qs, urlsplit

import certifi
import pytest

pytest.importorskip("azure.storage.blob")
pytest.importorskip("azure.identity")

import cloudckpt
from cloudckpt import AzureOptions, Config, RetryPolicy
from cloudckpt.errors import (
    ConnectionLostError,
    CredentialsError,
    ServerError,
    ThrottledError,
    TLSError,
    TransientStoreError,
)
from cloudckpt.stores import azure_tokens
from cloudckpt.stores.azure import AzureStore
from emulators import free_port

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
    monkeypatch.setattr(azure_tokens, "_CHASSIS", tmp_path / "chassis")


@pytest.fixture
def storage(tls_server, tls_files, monkeypatch):
    """Azure Storage: lets everybody in, unless a test wants it otherwise."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls_files[0])
    tls_server.respond(lambda request: found(tls_server))
    return tls_server


@pytest.fixture
def store(storage):
    options = AzureOptions(endpoint_url=storage.url, account="account")
    store = AzureStore("container", Config(azure=options, connect_timeout=5.0))
    yield store
    store.close()


def found(storage):
    return storage.Answer(headers={"ETag": '"0x1"'}, size=9)


def refused(storage, challenge="Bearer", status=401, code="InvalidAuthenticationInfo"):
    """The detail is one that Azure gives to a token of another tenant."""
    body = (
        f"<Error><Code>{code}</Code><Message>Server failed to authenticate the request. Please "
        "refer to the information in the www-authenticate header.</Message>"
        "<AuthenticationErrorDetail>Issuer validation failed. Issuer did not match."
        "</AuthenticationErrorDetail></Error>"
    )
    headers = {"WWW-Authenticate": challenge, "x-ms-error-code": code, "x-ms-request-id": "the-id"}
    return storage.Answer(status, headers, body.encode())


def challenge_of(
    tenant, authority="https://login.microsoftonline.com", resource="https://storage.azure.com"
):
    return f"Bearer authorization_uri={authority}/{tenant}/oauth2/authorize resource_id={resource}"


def bearers(storage):
    return [request.headers["Authorization"] for request in storage.requests]


@pytest.fixture
def metadata(stub_server, monkeypatch):
    """The metadata service; its tokens are numbered."""
    with stub_server() as server:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", server.url)
        server.respond(lambda request: metadata_token(server, f"TOKEN{len(server.requests)}"))
        yield server


def metadata_token(server, token, life=86399):
    """Numbers are strings here, and nothing says when to renew."""
    fields = {
        "access_token": token,
        "client_id": TENANT,
        "expires_in": f"{life}",
        "expires_on": f"{int(time.time()) + life}",
        "ext_expires_in": f"{life}",
        "resource": "https://storage.azure.com",
        "token_type": "Bearer",
    }
    return server.Answer(
        headers={"Content-Type": "application/json"}, body=json.dumps(fields).encode()
    )


def json_error(server, status, error, description="words of the vendor", **headers):
    body = json.dumps({"error": error, "error_description": description}).encode()
    return server.Answer(status, {"Content-Type": "application/json", **headers}, body)


@pytest.fixture
def entra(stub_server, tls_files, tmp_path, monkeypatch):
    """Microsoft Entra ID, which the pod of a Kubernetes service has a workload identity of."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls_files)
    (tmp_path / "federated").write_text("token-of-the-pod")
    with stub_server(context) as server:
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", server.url)
        monkeypatch.setenv("AZURE_TENANT_ID", TENANT)
        monkeypatch.setenv("AZURE_CLIENT_ID", "client")
        monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "federated"))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls_files[0])
        server.respond(lambda request: entra_token(server, f"TOKEN{len(server.requests)}"))
        yield server


def entra_token(server, token):
    fields = {"token_type": "Bearer", "expires_in": 3599, "access_token": token}
    return server.Answer(
        headers={"Content-Type": "application/json"}, body=json.dumps(fields).encode()
    )


@pytest.fixture
def az(tmp_path, monkeypatch):
    """An `az` that gives tokens of the tenant it is asked for; else of its default one, `home`."""
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    script = tmp_path / "bin" / "az"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {tmp_path}/asked\n'
        "tenant=home\n"
        'while [ $# -gt 0 ]; do [ "$1" = --tenant ] && tenant=$2; shift; done\n'
        'echo "{\\"accessToken\\": \\"token-of-$tenant\\", \\"expires_on\\": 9999999999}"\n'
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


@pytest.mark.parametrize("source", ["metadata", "entra"])
def test_requests_for_tokens_say_whose_they_are(store, request, source):
    server = request.getfixturevalue(source)
    store.head("run/object")
    assert all(r.headers["User-Agent"].startswith("cloudckpt/") for r in server.requests)


# the network and the services for the moment


@pytest.mark.parametrize(
    ("status", "expected", "body"),
    [
        (429, ThrottledError, "json"),
        (503, ThrottledError, "page"),
        (410, ThrottledError, "json"),  # "IMDS is going through updates", for up to 70 seconds
        (404, ThrottledError, "json"),  # "IMDS endpoint is updating"
        (404, ThrottledError, "page"),
        (500, ServerError, "json"),
        (504, ServerError, "page"),
    ],
)
def test_a_metadata_service_that_fails_is_asked_again(
    store, storage, metadata, status, expected, body
):
    page = metadata.Answer(status, {"Retry-After": "7"}, b"<html>busy</html>")
    error = json_error(metadata, status, "unavailable", **{"Retry-After": "7"})
    metadata.answer(page if body == "page" else error)
    with pytest.raises(TransientStoreError) as caught:
        store.head("run/object")
    assert type(caught.value) is expected
    assert caught.value.retry_after == 7.0
    assert f"HTTP {status}" in str(caught.value)
    assert storage.requests == []
    store.head("run/object")  # at once: nothing remembers the refusal
    assert bearers(storage) == ["Bearer TOKEN2"]


def test_a_job_waits_for_the_first_token(storage, metadata):
    """Whatever is in its way on a machine that has just been started."""
    metadata.answer(mute=True)
    metadata.answer(status=404)
    for status in (410, 503, 500):
        metadata.answer(json_error(metadata, status, "unavailable"))
    metadata.respond(lambda request: metadata_token(metadata, "TOKEN"))
    storage.respond(lambda request: storage.Answer(404, {"x-ms-error-code": "BlobNotFound"}))
    config = Config(
        azure=AzureOptions(endpoint_url=storage.url, account="account"),
        retry=RetryPolicy(base=0.001, cap=0.01),
    )
    assert not cloudckpt.exists("az://container/run", config=config)
    assert len(metadata.requests) == 6
    assert set(bearers(storage)) == {"Bearer TOKEN"}


@pytest.mark.parametrize("status", [408, 429, 503])
def test_an_entra_id_that_fails_is_asked_again(store, storage, entra, status):
    entra.answer(json_error(entra, status, "temporarily_unavailable", **{"Retry-After": "3"}))
    with pytest.raises(TransientStoreError) as caught:
        store.head("run/object")
    assert caught.value.retry_after == 3.0
    assert caught.value.certain
    store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN2"]


@pytest.mark.parametrize("source", ["metadata", "entra"])
def test_a_service_that_hangs_up_is_asked_again(store, storage, request, source):
    server = request.getfixturevalue(source)
    server.answer(mute=True)
    with pytest.raises(ConnectionLostError, match=r"no access token came from 127\.0\.0\.1"):
        store.head("run/object")
    store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN2"]


@pytest.mark.parametrize("host", ["nobody.invalid", "127.0.0.1:{port}"], ids=["dns", "refused"])
@pytest.mark.parametrize("source", ["metadata", "entra"])
def test_a_service_that_can_not_be_reached_is_asked_again(
    store, request, monkeypatch, source, host
):
    request.getfixturevalue(source)
    host = host.format(port=free_port())
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"http://{host}")
    if source == "entra":
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", f"https://{host}")
    for _ in range(2):
        with pytest.raises(ConnectionLostError, match=host):
            store.head("run/object")


def test_an_endpoint_of_an_app_service_that_fails_is_asked_again(
    store, storage, stub_server, monkeypatch
):
    """As container apps and machine learning have them."""
    with stub_server() as server:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{server.url}/msi/token")
        monkeypatch.setenv("IDENTITY_HEADER", "header")
        server.answer(status=503)
        with pytest.raises(ThrottledError):
            store.head("run/object")
        server.respond(lambda request: metadata_token(server, "TOKEN"))
        store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN"]


def test_a_service_principal_behind_a_network_that_is_down_is_asked_again(
    store, entra, monkeypatch
):
    """MSAL, which serves those with a secret, looks at the authority first."""
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "secret-of-the-principal")
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(ConnectionLostError, match="no access token came from"):
        store.head("run/object")


def test_an_authority_that_is_not_trusted_is_told_at_once(store, entra, monkeypatch):
    """The store has read its own bundle before."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())
    with pytest.raises(TLSError, match=r"certificate of 127\.0\.0\.1"):
        store.head("run/object")


@pytest.fixture
def elsewhere(stub_server, monkeypatch):
    """What is at the address of the metadata service, seen through a proxy."""
    with stub_server() as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        yield server


@pytest.mark.parametrize("answer", [{"mute": True}, {"status": 404}], ids=["nobody", "other cloud"])
def test_off_azure_a_metadata_service_that_is_none_means_no_credentials(store, elsewhere, answer):
    elsewhere.respond(lambda request: elsewhere.Answer(**answer))
    with pytest.raises(CredentialsError, match="no Azure credentials were found"):
        store.head("run/object")
    assert elsewhere.requests[0].target.startswith("http://169.254.169.254/metadata/identity/")


@pytest.mark.parametrize("known_by", ["tag", "setting"])
@pytest.mark.parametrize("answer", [{"mute": True}, {"status": 404}], ids=["silent", "updated"])
def test_on_azure_a_metadata_service_that_is_none_is_asked_again(
    store, storage, elsewhere, tmp_path, monkeypatch, answer, known_by
):
    """The asset tag is that of all of Azure's machines, by which cloud-init knows them."""
    if known_by == "tag":
        (tmp_path / "chassis").write_text("7783-7084-3265-9085-8269-3286-77\n")
    else:
        monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
    elsewhere.respond(lambda request: elsewhere.Answer(**answer))
    with pytest.raises(TransientStoreError, match=r"169\.254\.169\.254"):
        store.head("run/object")
    elsewhere.respond(lambda request: metadata_token(elsewhere, "TOKEN"))
    store.head("run/object")
    assert bearers(storage) == ["Bearer TOKEN"]


# what no waiting mends


def test_a_machine_without_an_identity_has_no_credentials(store, metadata):
    metadata.respond(
        lambda request: json_error(metadata, 400, "invalid_request", "Identity not found")
    )
    with pytest.raises(CredentialsError, match="no Azure credentials were found") as caught:
        store.head("run/object")
    assert "ManagedIdentityCredential" in str(caught.value)


def test_credentials_that_entra_id_refuses_are_not_called_absent(store, entra):
    entra.respond(
        lambda request: json_error(
            entra, 401, "invalid_client", "AADSTS700213: No matching federated identity record"
        )
    )
    with pytest.raises(CredentialsError, match="Entra ID refuses") as caught:
        store.head("run/object")
    assert "AADSTS700213" in str(caught.value)
    assert "no Azure credentials" not in str(caught.value)


def test_a_machine_that_answers_in_the_end_has_answered(store, elsewhere, tmp_path):
    """The look whether somebody is there fails, the question itself does not."""
    (tmp_path / "chassis").write_text("7783-7084-3265-9085-8269-3286-77")
    elsewhere.answer(status=503)
    elsewhere.respond(lambda request: json_error(elsewhere, 400, "x", "Identity not found"))
    with pytest.raises(CredentialsError, match="no Azure credentials were found"):
        store.head("run/object")


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


def test_a_401_while_no_fresh_token_is_to_be_had_is_told(store, storage, metadata):
    storage.answer(refused(storage))
    metadata.answer(metadata_token(metadata, "OLD"))
    metadata.answer(status=503)
    with pytest.raises(CredentialsError):
        store.head("run/object")
    assert store.head("run/object").size == 9  # the old one serves on where it is accepted


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_no_matter_of_keys_and_clocks(store, storage, metadata, status):
    code = "InvalidAuthenticationInfo" if status == 401 else "AuthenticationFailed"
    storage.respond(lambda request: refused(storage, challenge_of(TENANT), status, code))
    with pytest.raises(CredentialsError) as caught:
        store.head("run/object")
    text = str(caught.value)
    assert "access token" in text
    assert "role 'Storage Blob Data Contributor'" in text
    assert TENANT in text
    assert "the-id" in text
    for word in ("key", "clock", "shared access"):
        assert word not in text


# tenants


def of_tenant(storage, tenant, **challenge):
    """Azure Storage as an account of this tenant answers."""

    def respond(request):
        if request.headers["Authorization"] == f"Bearer token-of-{tenant}":
            return found(storage)
        return refused(storage, challenge_of(tenant, **challenge))

    return respond


@pytest.mark.parametrize(
    "authority",
    [
        "https://login.microsoftonline.com",
        "https://login.microsoftonline.us",
        "https://login.chinacloudapi.cn",
        "https://login.windows.net",
    ],
)
def test_a_tenant_that_the_account_asks_for_is_asked_for_a_token(store, storage, az, authority):
    storage.respond(of_tenant(storage, OTHER_TENANT, authority=authority))
    assert store.head("run/object").size == 9
    assert store.head("run/object").size == 9
    expected = ["Bearer token-of-home", *[f"Bearer token-of-{OTHER_TENANT}"] * 2]
    assert bearers(storage) == expected


def test_an_authority_of_ones_own_may_name_a_tenant(store, storage, az, monkeypatch):
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", "https://login.stack.example/")
    storage.respond(of_tenant(storage, OTHER_TENANT, authority="https://login.stack.example"))
    assert store.head("run/object").size == 9


def test_the_answer_to_a_deletion_may_name_the_tenant_too(store, storage, az):
    def respond(request):
        if request.headers["Authorization"] != f"Bearer token-of-{OTHER_TENANT}":
            return refused(storage, challenge_of(OTHER_TENANT))
        return storage.Answer(202)

    storage.respond(respond)
    store.delete("run/object")
    assert [request.method for request in storage.requests] == ["DELETE", "DELETE"]


@pytest.mark.parametrize(
    "challenge",
    [
        challenge_of(OTHER_TENANT, "https://login.evil.example"),
        challenge_of(OTHER_TENANT, "http://login.microsoftonline.com"),
        challenge_of(OTHER_TENANT, "https://login.microsoftonline.com.evil.example"),
        challenge_of(OTHER_TENANT, "https://login.microsoftonline.com@evil.example"),
        challenge_of("common"),
        challenge_of("a%20--subscription%20b"),
        challenge_of(""),
        f"Basic authorization_uri=https://login.microsoftonline.com/{OTHER_TENANT}",
        "Bearer",
        "",
    ],
)
def test_a_tenant_that_nobody_to_be_trusted_names_is_not_asked(store, storage, az, challenge):
    storage.respond(lambda request: refused(storage, challenge))
    with pytest.raises(CredentialsError):
        store.head("run/object")
    assert set(bearers(storage)) == {"Bearer token-of-home"}
    assert "--tenant" not in az.read_text()


def test_a_store_does_not_choose_what_a_token_is_for(store, storage, az):
    storage.respond(of_tenant(storage, OTHER_TENANT, resource="https://management.azure.com"))
    store.head("run/object")
    asked = az.read_text().splitlines()
    assert len(asked) == 2
    assert all("--resource https://storage.azure.com" in line for line in asked)


def test_a_service_principal_of_another_tenant_is_told_the_accounts_one(store, storage, entra):
    """azure-identity gives no token of a tenant other than AZURE_TENANT_ID."""
    storage.respond(lambda request: refused(storage, challenge_of(OTHER_TENANT)))
    with pytest.raises(CredentialsError, match=f"{OTHER_TENANT}.*AZURE_TENANT_ID"):
        store.head("run/object")
    assert {urlsplit(request.target).path.split("/")[1] for request in entra.requests} == {TENANT}


def test_a_tenant_that_is_known_by_its_domain_gets_a_fresh_token(
    store, storage, entra, monkeypatch
):
    """azure-identity takes the number that the account names for another tenant."""
    monkeypatch.setenv("AZURE_TENANT_ID", "ours.onmicrosoft.com")
    storage.answer(refused(storage, challenge_of(TENANT)))
    assert store.head("run/object").size == 9
    assert bearers(storage) == ["Bearer TOKEN1", "Bearer TOKEN2"]


# what is told to people


@pytest.mark.parametrize(
    ("source", "told"),
    [("metadata", "managed identity"), ("entra", "workload identity"), ("az", "az login")],
)
def test_a_store_tells_where_its_token_comes_from_and_when_it_ends(request, store, source, told):
    request.getfixturevalue(source)
    origin = store.origin()
    assert told in origin.source
    assert origin.ends > time.time()
    assert "TOKEN1" not in repr(origin)
