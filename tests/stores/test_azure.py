"""The Azure store: what it sends, and what it makes of the answers.

All of it against the scripted stub of ``conftest.py``; the contract of the seam is tested against
Azurite, in ``integration/``.
"""

import base64
import dataclasses
import time
from urllib.parse import urlsplit

import pytest
from azure.core.credentials import AccessTokenInfo
from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError
from azure.core.pipeline import PipelineContext, PipelineRequest
from azure.core.pipeline.transport import HttpRequest
from azure.storage.blob._shared.authentication import SharedKeyCredentialPolicy

from cloudckpt import AzureOptions, Config, errors
from cloudckpt.checksum import CRC64NVME
from cloudckpt.stores.azure import access as azure_tokens
from cloudckpt.stores.azure import names as azure_names
from cloudckpt.stores.azure.store import AzureStore
from cloudckpt.stores.base import Upload
from cloudckpt.uri import CheckpointURI
from support.dialects import AZURE, AZURE_KEY, CREATED, error_xml, get_range, page, put, query_of

pytestmark = pytest.mark.usefixtures("azure_key")

UPLOAD, VERBS, call = AZURE.upload, AZURE.verbs, AZURE.call
ACCOUNT, KEY = "account", AZURE_KEY


@pytest.fixture
def store(open_azure):
    return open_azure()


@pytest.fixture
def set_signature(azure_key, monkeypatch):
    """Sets a shared access signature, in place of the key."""

    def set_one(text):
        monkeypatch.delenv("AZURE_STORAGE_KEY", raising=False)
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", text)

    return set_one


def put_part(store, upload=UPLOAD, number=3, data=b"data"):
    return store.put_part(upload, number, [memoryview(data)], checksum=CRC64NVME.of(data))


def blob(name, size=0, etag="0x1", attributes="", more=""):
    return (
        f"<Blob><Name{attributes}>{name}</Name><Properties><Etag>{etag}</Etag>"
        f"<Content-Length>{size}</Content-Length>{more}</Properties></Blob>"
    )


def signed_by_microsoft(method, target, headers, account=ACCOUNT):
    """The Authorization that azure-storage-blob gives to a request."""
    given = dict(headers.items())
    given.pop("Authorization", None)
    if "Range" in given:
        given["byte_range"] = given["Range"]  # the name that this client looks for it under
    request = HttpRequest(method, f"https://host{target}", headers=given)
    SharedKeyCredentialPolicy(account, KEY).on_request(
        PipelineRequest(request, PipelineContext(None))
    )
    return request.headers["Authorization"]


def assert_signed(request, **account):
    expected = signed_by_microsoft(request.method, request.target, request.headers, **account)
    assert request.headers["Authorization"] == expected


# where credentials are found

CONNECTION = f"DefaultEndpointsProtocol=https;AccountName={ACCOUNT};AccountKey={KEY};"


@pytest.mark.parametrize(
    "environment",
    [
        {"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_KEY": KEY},
        {"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY},
        {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY},
        {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION},
        {
            "AZURE_STORAGE_CONNECTION_STRING": CONNECTION,
            "AZURE_STORAGE_ACCOUNT": "other",
            "AZURE_STORAGE_KEY": "b3RoZXI=",
        },
    ],
)
def test_a_key_is_found_where_azures_tools_find_it(open_azure, server, monkeypatch, environment):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert_signed(call(open_azure(), server, "put"))


@pytest.mark.parametrize(
    ("variable", "texts", "error"),
    [
        (
            "CONNECTION_STRING",
            ["garbage", "AccountKey=SECRET", "AccountName=a;SECRET"],
            errors.ConfigError,
        ),
        ("ACCOUNT", ["Big", "a/b", "evil.example", "ab"], errors.ConfigError),
        ("KEY", ["SECRET!"], errors.CredentialsError),
    ],
)
def test_what_can_not_be_right_is_refused_and_no_secret_shown(monkeypatch, variable, texts, error):
    for text in texts:
        monkeypatch.setenv(f"AZURE_STORAGE_{variable}", text)
        with pytest.raises(error) as caught:
            AzureStore("container", Config()).get("key")
        assert "SECRET" not in str(caught.value)
        assert caught.value.__cause__ is None


# tokens


class Identity:
    """Stands for DefaultAzureCredential: numbered tokens, due for renewal at half their time."""

    error: Exception | None = None

    def __init__(self, **settings):
        self.asked = []

    def get_token_info(self, *scopes, options=None):
        self.asked.append(scopes)
        if self.error is not None:
            raise self.error
        now = int(time.time())
        return AccessTokenInfo(f"SECRETTOKEN{len(self.asked)}", now + 3600, refresh_on=now + 1800)


class Nobody(Identity):
    error = ClientAuthenticationError("DefaultAzureCredential failed to retrieve a token")


@pytest.fixture
def identity(azure_key, monkeypatch):
    """The credential of the next stores."""
    one = Identity()
    monkeypatch.setattr(azure_tokens, "DefaultAzureCredential", lambda **settings: one)
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    return one


@pytest.mark.parametrize("kind", [ClientAuthenticationError, ServiceRequestError])
def test_a_valid_token_is_used_while_it_can_not_be_renewed(
    identity, open_azure, tls_server, authority, monkeypatch, kind
):
    def sent():
        return call(store, tls_server, "put").headers["Authorization"]

    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.bundle)
    store = open_azure(endpoint_url=tls_server.url)
    assert [sent(), sent()] == ["Bearer SECRETTOKEN1"] * 2
    identity.error, now = kind("late"), time.time()
    monkeypatch.setattr(azure_tokens.time, "time", lambda: now + 1900)
    assert [sent(), sent()] == ["Bearer SECRETTOKEN1"] * 2
    assert len(identity.asked) == 2  # not by every request
    monkeypatch.setattr(azure_tokens.time, "time", lambda: now + 3601)
    with pytest.raises(errors.ConnectionLostError, match="late"):
        sent()
    identity.error = None
    assert sent() == f"Bearer SECRETTOKEN{len(identity.asked)}"


def test_tokens_are_not_sent_in_the_clear(open_azure, identity):
    with pytest.raises(errors.CredentialsError, match="only over https"):
        open_azure()
    assert identity.asked == []


# where requests go

CHINA = "other.blob.core.chinacloudapi.cn"


@pytest.mark.parametrize(
    ("location", "options", "environment", "host"),
    [
        ("az://c/run", {}, {}, "account.blob.core.windows.net"),
        ("az://c/run", {"endpoint_url": f"https://{CHINA}/"}, {}, CHINA),
        (
            "az://c/run",
            {},
            {"AZURE_STORAGE_CONNECTION_STRING": f"{CONNECTION}EndpointSuffix=core.cloud.example"},
            "account.blob.core.cloud.example",
        ),
        ("abfss://c@third.dfs.core.windows.net/run", {}, {}, "third.blob.core.windows.net"),
        (
            "https://third.blob.core.windows.net/c/run",
            {"endpoint_url": "https://private.example"},
            {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION},
            "third.blob.core.windows.net",
        ),
    ],
)
def test_the_account_is_addressed(
    open_azure, server, monkeypatch, location, options, environment, host
):
    monkeypatch.setenv("HTTPS_PROXY", server.url)  # the stub sees whom to connect to
    monkeypatch.setattr(azure_tokens, "DefaultAzureCredential", Identity)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server.answer(status=502)
    with pytest.raises(errors.StoreError):
        open_azure(uri=location, **{"endpoint_url": None, **options}).head("run/object")
    assert [(r.method, r.target) for r in server.requests] == [("CONNECT", f"{host}:443")]


@pytest.mark.parametrize(
    "where",
    [
        {"uri": "https://other.blob.core.windows.net/container/run"},
        {"endpoint_url": "https://other.blob.core.windows.net"},
    ],
)
def test_credentials_of_another_account_are_not_sent(open_azure, monkeypatch, where):
    monkeypatch.setattr(azure_tokens, "DefaultAzureCredential", Nobody)
    with pytest.raises(errors.CredentialsError, match="'account'"):
        open_azure(**where).head("run/object")


VARIANTS = [
    "account-ipv6.blob.core.windows.net",
    "account-dualstack.blob.core.windows.net",
    "account-secondary.blob.core.windows.net",
    "account-secondary-dualstack.blob.core.windows.net",
    "account.privatelink.blob.core.windows.net",
    "account.z12.blob.storage.azure.net",
    "account-ipv6.z12.blob.storage.azure.net",
]


@pytest.mark.parametrize("host", VARIANTS)
def test_every_endpoint_of_an_account_is_given_its_key(open_azure, server, monkeypatch, host):
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setattr(azure_tokens, "DefaultAzureCredential", Nobody)
    request = call(open_azure(endpoint_url=f"http://{host}"), server, "get_range")
    target = request.target.removeprefix(f"http://{host}")
    signed = signed_by_microsoft("GET", target, request.headers, account="account")
    assert request.headers["Authorization"] == signed
    monkeypatch.setenv("HTTPS_PROXY", server.url)
    server.answer(status=502)
    with pytest.raises(errors.ConnectionLostError):  # of the proxy: there are credentials
        open_azure(uri=f"https://{host}/container/run").head("run/object")
    assert server.requests[-1].target == f"{host}:443"


@pytest.mark.parametrize(
    ("suffix", "host"),
    [
        ("EndpointSuffix=core.usgovcloudapi.net", "account.blob.core.windows.net"),
        ("EndpointSuffix=core.chinacloudapi.cn", "account-ipv6.blob.core.windows.net"),
        ("EndpointSuffix=core.windows.net", "account.blob.core.usgovcloudapi.net"),
        ("", "account.blob.core.chinacloudapi.cn"),
        ("EndpointSuffix=core.stack.example", "account.blob.core.windows.net"),
        (
            "BlobEndpoint=https://account.z12.blob.storage.azure.net",
            "account.z13.blob.storage.azure.net",
        ),
    ],
)
@pytest.mark.parametrize("by", ["uri", "options"])
def test_a_connection_string_of_another_cloud_is_not_used(monkeypatch, suffix, host, by):
    monkeypatch.setattr(azure_tokens, "DefaultAzureCredential", Nobody)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{CONNECTION}{suffix}")
    options = AzureOptions(endpoint_url=f"https://{host}" if by == "options" else None)
    store = AzureStore("container", Config(azure=options), host if by == "uri" else "")
    with pytest.raises(
        errors.CredentialsError, match="another account, 'account' at https://"
    ) as caught:
        store.get("key")
    assert KEY not in str(caught.value)
    store.close()


def test_an_emulators_account_is_in_the_path(open_azure, server, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    request = call(open_azure(endpoint_url=f"{server.url}/devstoreaccount1/"), server, "put")
    assert urlsplit(request.target).path == "/devstoreaccount1/container/run/object"
    assert_signed(request, account="devstoreaccount1")


NAMES = [
    *("run/object.", "run/object..", "run./object", "run/.../object", "run/object ."),
    *("run/object./", "run\\object", "run/object\\", "run/a\ud83db"),
]


BY_NAME = {
    "put": put,
    "create_upload": lambda store, key: store.create_upload(key, 1024),
    "put_part": lambda store, key: put_part(store, dataclasses.replace(UPLOAD, key=key)),
    "get": lambda store, key: store.get(key),
    "get_range": get_range,
    "head": lambda store, key: store.head(key),
    "delete": lambda store, key: store.delete(key),
}


@pytest.mark.parametrize("verb", BY_NAME)
def test_a_name_that_azure_changes_is_refused_before_anything_is_sent(store, server, verb):
    for key in NAMES:
        with pytest.raises(errors.InvalidRequestError) as caught:
            BY_NAME[verb](store, key)
        assert caught.value.certain
        str(caught.value).encode()  # it can be printed
    assert server.requests == []


@pytest.mark.parametrize(
    "location",
    [
        "az://container/run/step-1.",
        "az://container/run./step-1",
        "az://container/run\\step-1",
        "https://account.blob.core.windows.net/container/run%5Cstep-1",
        "https://account.blob.core.windows.net/container/run%2E",
    ],
)
def test_a_location_that_azure_changes_is_refused(location):
    with pytest.raises(errors.InvalidURIError):
        azure_names.check_location(CheckpointURI.parse(location))


# what is sent along


def test_blocks_of_an_upload_have_names_of_one_length(store, server):
    upload = store.create_upload("run/object", 1024)
    for number in (1, 50_000):
        server.answer(status=201)
        put_part(store, upload, number)
    sent = [query_of(request)["blockid"] for request in server.requests]
    first, last = (base64.b64decode(name, validate=True) for name in sent)
    assert len(first) == len(last) <= 64
    assert first != last
    assert first.startswith(upload.id.encode())


@pytest.mark.parametrize("send", [put, put_part])
def test_checksums_are_sent_when_they_are_on(open_azure, server, send):
    """The value is what Azure itself has answered to these bytes."""
    server.answer(**CREATED)
    send(open_azure(checksum="on"), data=b"Hello World")
    assert server.requests[-1].headers["x-ms-content-crc64"] == "YeJLfssylmU="


NO_BLOB = {"status": 404, "headers": {"x-ms-error-code": "BlobNotFound"}}


# aborting and finding uploads


def blocks(*names):
    """The answer for a blob that has blocks of these names, none of them committed."""
    encoded = (base64.b64encode(name.encode()).decode() for name in names)
    rows = "".join(f"<Block><Name>{name}</Name><Size>1</Size></Block>" for name in encoded)
    body = f"<BlockList><CommittedBlocks/><UncommittedBlocks>{rows}</UncommittedBlocks></BlockList>"
    return {"body": body.encode()}


OWN_BLOCK = f"{UPLOAD.id}00001"
ABORTS = {
    "unfinished": ([blocks(OWN_BLOCK), NO_BLOB, {"status": 202}], ["GET", "HEAD", "DELETE"]),
    "a blob is there": ([blocks(OWN_BLOCK), AZURE.answers["head"]], ["GET", "HEAD"]),
    "nothing": ([NO_BLOB], ["GET"]),
    "no blocks": ([blocks()], ["GET"]),
    # others may be on their way to a blob whose name a user has chosen
    "blocks of others": ([blocks(OWN_BLOCK, "1" * 16 + "00001")], ["GET"]),
    "blocks of another program": ([blocks(OWN_BLOCK, "of another program")], ["GET"]),
}


@pytest.mark.parametrize("case", ABORTS)
def test_an_abort_deletes_only_what_is_nobody_elses(store, server, case):
    answers, methods = ABORTS[case]
    for answer in answers:
        server.answer(**answer)
    store.abort_upload(UPLOAD)
    assert [request.method for request in server.requests] == methods
    assert query_of(server.requests[0])["blocklisttype"] == "uncommitted"


@pytest.mark.parametrize("version", ["", '"old"'])
def test_an_upload_is_completed_on_its_condition(store, server, version):
    server.answer(**CREATED)
    store.complete_upload(UPLOAD, [], if_version=version)
    headers = server.requests[0].headers
    sent = (headers["If-None-Match"], headers["If-Match"])
    assert sent == ((None, version) if version else ("*", None))


def test_the_last_abort_of_several_deletes_the_blocks_of_all(store, server):
    uploads = [store.create_upload("run/object", 1024) for _ in range(2)]
    left = blocks(*(f"{upload.id}00001" for upload in uploads))
    for answer in (left, left, NO_BLOB, {"status": 202}):
        server.answer(**answer)
    for upload in uploads:
        store.abort_upload(upload)
    assert [request.method for request in server.requests] == ["GET", "GET", "HEAD", "DELETE"]


@pytest.mark.parametrize("verb", ["put_part", "complete_upload"])
def test_nothing_late_brings_an_aborted_upload_back(store, server, verb):
    server.respond(lambda request: server.Answer(**NO_BLOB))
    store.abort_upload(UPLOAD)
    sent = len(server.requests)
    with pytest.raises(errors.ObjectNotFoundError):
        VERBS[verb](store)
    assert len(server.requests) == sent


def test_uploads_are_found_by_the_blocks_that_azure_keeps(store, server):
    first, second = "0" * 16, "1" * 16
    names = [blob(f"run/{name}", size=7 * (name == "done")) for name in ("a", "done", "b", "c")]
    server.answer(body=page(*names, blob("run/of-another-program")))
    ours = blocks(f"{second}00001", f"{first}00001", f"{first}00002")
    for answer in (ours, NO_BLOB, blocks(), blocks("theirs")):
        server.answer(**answer)
    *found, theirs = store.list_uploads("run/")
    assert found == [Upload("run/a", first, 0), Upload("run/a", second, 0)]
    assert theirs.key == "run/of-another-program"
    listing, *others = server.requests
    assert query_of(listing)["include"] == "uncommittedblobs"
    assert [query_of(request)["blocklisttype"] for request in others] == ["uncommitted"] * 4


# listing and deleting


def test_names_are_decoded_if_they_are_encoded(store, server):
    server.answer(
        body=page(blob("100%25"), blob("a%EF%BF%BEb+c", attributes=' Encoded="true"'), blob(" s "))
    )
    assert [info.key for info in store.list("")] == ["100%25", "a\ufffeb+c", " s "]


def test_directories_of_a_hierarchical_namespace_are_no_objects(store, server):
    folder = blob("run", more="<ResourceType>directory</ResourceType>")
    file = blob("run/a", more="<ResourceType>file</ResourceType>")
    server.answer(body=page(folder, file))
    assert [info.key for info in store.list("run")] == ["run/a"]
    server.answer(headers={"ETag": '"0x1"', "x-ms-meta-hdi_isfolder": "true"})
    with pytest.raises(errors.ObjectNotFoundError, match="directory"):
        store.head("run")


def test_blocks_are_not_missing_because_a_page_has_none(store, server):
    server.answer(body=b"<html><p>sign in</p></html>")
    with pytest.raises(errors.ServerError, match="<html> instead of <BlockList>"):
        store.abort_upload(UPLOAD)


def test_one_blob_is_deleted_with_its_snapshots(store, server):
    request = call(store, server, "delete")
    assert request.method == "DELETE"
    assert request.headers["x-ms-delete-snapshots"] == "include"


def test_a_blob_of_a_container_that_is_gone_is_not_deleted(store, server):
    server.answer(status=404, body=error_xml("ContainerNotFound"))
    with pytest.raises(errors.BucketNotFoundError, match="the endpoint: http"):
        store.delete("run/b")


# what the answers mean


def test_a_blob_that_was_to_be_replaced_and_is_gone_is_a_failed_condition(store, server):
    server.answer(**NO_BLOB)
    with pytest.raises(errors.PreconditionFailedError):
        put(store, if_version='"0x1"')


# what is told to people


def test_a_store_tells_which_variable_has_its_key_or_signature(open_azure, set_signature):
    origin = open_azure().origin()
    assert (origin.source, origin.identity) == ("an account key (AZURE_STORAGE_KEY)", ACCOUNT)
    set_signature("se=2030-01-02T03:04:05Z&sp=rl&sig=SECRET")
    origin = open_azure().origin()
    assert origin.source == "a shared access signature (AZURE_STORAGE_SAS_TOKEN)"
    assert origin.ends == 1893553445
    assert "SECRET" not in repr(origin)
    for text, ends in (("se=2030-01-02&sig=SECRET", 1893542400), ("si=policy&sig=SECRET", None)):
        set_signature(text)
        assert open_azure().origin().ends == ends
