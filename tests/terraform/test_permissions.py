"""What the stores ask of a cloud is what the roles of its Terraform module allow: no more, no less.

All requests pass a proxy and are named by the operation that the cloud's documentation has for
them. S3 is moto, Azure is Azurite, and Google the stub of its protocol.
"""

import dataclasses
import json
import re
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from azure.storage.blob import BlobServiceClient

import cloudckpt
from cloudckpt import AzureOptions, Config, GCSOptions, RetryPolicy, S3Options
from cloudckpt.errors import InvalidRequestError
from cloudckpt.stores.base import CopySource, ObjectStore
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from support.contract.data import put, put_part
from support.emulators import azurite_server
from support.stubs.gcs import GcsStub
from support.wire.naming import azure_naming, google_naming
from support.wire.proxy import FaultyProxy
from support.wire.request import Request

TERRAFORM = Path(__file__).parents[2] / "terraform"
MIB = 1024 * 1024

_S3_QUERY = {
    *("continuation-token", "delimiter", "encoding-type", "key-marker", "list-type", "max-keys"),
    *("max-uploads", "partNumber", "prefix", "upload-id-marker", "uploadId", "uploads"),
}
QUERIES = {
    "aws": _S3_QUERY,
    "azure": {
        *("blockid", "blocklisttype", "comp=block", "comp=blocklist", "comp=list", "delimiter"),
        *("include=uncommittedblobs", "marker", "maxresults", "prefix", "restype"),
        *("se", "sig", "sp", "spr", "sr", "sv"),  # a signature
    },
    "gcp": {
        *_S3_QUERY,
        *("alt=media", "fields", "ifGenerationMatch", "ifMetagenerationNotMatch"),
        *("ifSourceGenerationMatch", "name", "pageToken", "prettyPrint", "projection=noAcl"),
        "uploadType=multipart",
    },
}
"""What queries may hold without needing more; whatever else they hold is not known."""

_TELLING = {"alt", "comp", "include", "projection", "uploadType"}  # by their values
_COPIES = {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}
_NAMES = {
    "aws": {},
    "azure": {
        "ListObjectsV2": "List Blobs",
        "ListMultipartUploads": "List Blobs",
        "ListParts": "Get Block List",
        "GetObject": "Get Blob",
        "HeadObject": "Get Blob Properties",
        "PutObject": "Put Blob",
        "CopyObject": "Copy Blob From URL",
        "DeleteObject": "Delete Blob",
        "UploadPart": "Put Block",
        "UploadPartCopy": "Put Block From URL",
        "CompleteMultipartUpload": "Put Block List",
    },
    "gcp": {
        "ListObjectsV2": "objects.list",
        "GetObject": "objects.get",
        "HeadObject": "objects.get",
        "PutObject": "objects.insert",
        "CopyObject": "objects.rewrite",
        "DeleteObject": "objects.delete",
        "ListMultipartUploads": "multipartUploads.list",
        "CreateMultipartUpload": "multipartUploads.create",
        "UploadPart": "multipartUploads.putPart",
        "CompleteMultipartUpload": "multipartUploads.complete",
        "AbortMultipartUpload": "multipartUploads.abort",
    },
}


def named(cloud: str, request: Request) -> str:
    """A request by the name of its operation; what is not known to need no more is described."""
    asked = {f"{n}={v}" if n in _TELLING else n for n, v in request.query.items()}
    if asked - QUERIES[cloud]:
        return f"{request.method} {request.target}"
    copies = request.header("x-amz-copy-source") or request.header("x-ms-copy-source")
    name = _COPIES.get(request.operation) if copies else request.operation
    return _NAMES[cloud].get(name, name)


@dataclass
class Cloud:
    """A way to a server, the operations that were asked for on it, and stores that ask.

    Attributes:
        name: That of the module.
        proxy: On the way to the server.
        root: The bucket.
        config: Options that lead there.
    """

    name: str
    proxy: FaultyProxy
    root: str
    config: Config

    def operations(self, header: str | None = None) -> set[str]:
        """Those that were asked for, or those with a header."""
        return {
            named(self.name, request)
            for request in self.proxy.requests()
            if header is None or request.header(header) is not None
        }

    def store(self) -> ObjectStore:
        return open_store(CheckpointURI.parse(self.root), self.config)


def permissions(cloud: str) -> dict:
    return json.loads((TERRAFORM / cloud / "permissions.json").read_text())


def _config(**options) -> Config:
    retry = RetryPolicy(attempts=4, base=0.01, cap=0.05, deadline=20.0)
    return Config(connections=4, part_size=5 * MIB, retry=retry, **options)


def _aws(stack: ExitStack, request: pytest.FixtureRequest) -> Cloud:
    proxy = stack.enter_context(FaultyProxy(request.getfixturevalue("s3_url")))
    bucket = request.getfixturevalue("bucket")
    options = S3Options(endpoint_url=proxy.url, addressing_style="path")
    return Cloud("aws", proxy, f"s3://{bucket}", _config(s3=options))


def _azure(stack: ExitStack, request: pytest.FixtureRequest) -> Cloud:
    server = request.getfixturevalue("azurite")
    proxy = stack.enter_context(FaultyProxy(server.url, naming=azure_naming))
    container = f"container-{uuid.uuid4().hex[:12]}"
    with BlobServiceClient.from_connection_string(server.connection_string) as service:
        service.create_container(container)
    stack.enter_context(pytest.MonkeyPatch.context()).setenv("AZURE_STORAGE_KEY", server.key)
    options = AzureOptions(endpoint_url=f"{proxy.url}/{server.account}")
    return Cloud("azure", proxy, f"az://{container}", _config(azure=options))


def _gcp(stack: ExitStack, request: pytest.FixtureRequest) -> Cloud:
    stub = stack.enter_context(GcsStub("bucket"))
    proxy = stack.enter_context(FaultyProxy(stub.url, naming=google_naming))
    config = _config(gcs=GCSOptions(endpoint_url=proxy.url))
    return Cloud("gcp", proxy, "gs://bucket", config)


@pytest.fixture(scope="module")
def azurite(_own_surroundings):
    with azurite_server() as server:
        yield server


OF_AZURE = pytest.param("azure", marks=pytest.mark.azurite)


@pytest.fixture(params=["aws", OF_AZURE, "gcp"])
def cloud(request):
    with ExitStack() as stack:
        yield {"aws": _aws, "azure": _azure, "gcp": _gcp}[request.param](stack, request)


# each verb of a store, for good and for bad


def _put(store: ObjectStore, key: str) -> None:
    data = b"data"
    info = put(store, key, data, if_version="")
    put(store, key, data, if_version=info.version)


def _upload(store: ObjectStore, key: str) -> None:
    data = bytes(5 * MIB)
    upload = store.create_upload(key, len(data))
    part = put_part(store, upload, 1, data)
    store.complete_upload(upload, [part])


def _copy(store: ObjectStore, key: str) -> None:
    store.copy(CopySource(store, put(store, key, b"data")), f"{key}-copy")


def _copy_part(store: ObjectStore, key: str) -> None:
    source, upload = put(store, key, b"data"), store.create_upload(f"{key}-copy", 5 * MIB)
    # Azurite does not do it, Google has no such request
    with suppress(InvalidRequestError, NotImplementedError):
        store.copy_part(CopySource(store, source), upload, 1, 0, 4)
    store.abort_upload(upload)


def _abort(store: ObjectStore, key: str) -> None:
    store.abort_upload(store.create_upload(key, 5 * MIB))


def _list_uploads(store: ObjectStore, key: str) -> None:
    upload = store.create_upload(key, 5 * MIB)
    put_part(store, upload, 1, b"data")
    assert [found.id for found in store.list_uploads(key)] == [upload.id]


def _delete(store: ObjectStore, key: str) -> None:
    store.delete(key)
    store.delete(key + "-missing")


def _head(store: ObjectStore, key: str) -> None:
    store.head(key)
    with pytest.raises(cloudckpt.errors.CloudCheckpointError):
        store.head(key + "-missing")


READING = {
    "get": lambda store, key: store.get(key),
    "get_range": lambda store, key: store.get_range(key, 1, [memoryview(bytearray(2))]),
    "head": _head,
    "list": lambda store, key: list(store.list(key)),
    "list_level": lambda store, key: list(store.list_level(f"{key}/")),
}
WRITING = {
    "put": _put,
    "create_upload": _upload,
    "put_part": _upload,
    "complete_upload": _upload,
    "copy": _copy,
    "copy_part": _copy_part,
    "abort_upload": _abort,
    "list_uploads": _list_uploads,
    "delete": _delete,
}


def test_every_verb_is_driven_here():
    others = {"copy", "copy_part"}
    assert {*READING, *WRITING} == ObjectStore.__abstractmethods__ - {"close"} | others


@pytest.mark.parametrize("role", ["reader", "writer"])
def test_the_verbs_ask_for_exactly_what_the_role_allows(cloud, role):
    verbs = {**READING, **WRITING} if role == "writer" else READING
    store = cloud.store()
    _put(store, "run/0")
    cloud.proxy.clear()
    for name, verb in verbs.items():
        verb(store, "run/0" if name in READING else f"run/0/{name}")
    assert cloud.operations() == set(permissions(cloud.name)[role])


@pytest.mark.parametrize("cloud", ["aws", OF_AZURE], indirect=True)
def test_tags_need_more_for_the_operations_that_are_listed(cloud):
    group, header = {"aws": ("s3", "x-amz-tagging"), "azure": ("azure", "x-ms-tags")}[cloud.name]
    options = dataclasses.replace(getattr(cloud.config, group), tags={"team": "nlp"})
    cloud.config = dataclasses.replace(cloud.config, **{group: options})
    store = cloud.store()
    for name, verb in WRITING.items():
        verb(store, f"run/{name}")
    listed = permissions(cloud.name)["options"]["tags"]["writer"]
    assert cloud.operations(header) == set(listed)


FORMS = {
    "aws": r"(s3|kms):[A-Z]\w+",
    "azure": r"Microsoft\.Storage/storageAccounts/blobServices/containers/blobs/[a-z/]+",
    "gcp": r"storage\.(objects|multipartUploads)\.[a-z]+",
}


@pytest.mark.parametrize("name", FORMS)
def test_permissions_name_no_wildcard_and_a_readers_are_a_part_of_a_writers(name):
    listed = permissions(name)
    for roles in (listed, *listed.get("options", {}).values()):
        assert roles["reader"].items() <= roles["writer"].items()
        needed = [entry for entries in roles["writer"].values() for entry in entries]
        assert all(re.fullmatch(FORMS[name], permission) for permission in needed)
    changing = re.compile(r"put|write|delete|create|abort|add|action", re.IGNORECASE)
    read = [entry for entries in listed["reader"].values() for entry in entries]
    assert not [entry for entry in read if changing.search(entry)]
