"""What the stores ask of a cloud is what the roles of its Terraform module allow: no more, no less.

All requests pass a proxy and are named by the operation that the cloud's documentation has for
them. S3 is moto, Azure is Azurite, and Google the stub of its protocol.
"""

import dataclasses
import json
import re
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from azure.storage.blob import BlobServiceClient

import cloudckpt
from cloudckpt import AzureOptions, Config, GCSOptions, RetryPolicy, S3Options
from cloudckpt.errors import InvalidRequestError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from support.contract.data import put, put_part
from support.emulators import azurite_server
from support.stubs.gcs import GcsStub
from support.wire.proxy import FaultyProxy
from support.wire.request import Request

TERRAFORM = Path(__file__).parents[2] / "terraform"
MIB = 1024 * 1024

Known = dict[tuple[str, str, frozenset[str]], str]
"""Method, what the path is about, and what the query must hold, but for what changes nothing."""

_S3: Known = {
    ("GET", "bucket", frozenset({"list-type"})): "ListObjectsV2",
    ("GET", "bucket", frozenset({"uploads"})): "ListMultipartUploads",
    ("GET", "key", frozenset()): "GetObject",
    ("HEAD", "key", frozenset()): "HeadObject",
    ("PUT", "key", frozenset()): "PutObject",
    ("POST", "key", frozenset({"uploads"})): "CreateMultipartUpload",
    ("PUT", "key", frozenset({"partNumber", "uploadId"})): "UploadPart",
    ("POST", "key", frozenset({"uploadId"})): "CompleteMultipartUpload",
    ("DELETE", "key", frozenset({"uploadId"})): "AbortMultipartUpload",
    ("DELETE", "key", frozenset()): "DeleteObject",
}
_S3_PAGING = {
    "delimiter",
    "continuation-token",
    "encoding-type",
    "key-marker",
    "max-keys",
    "max-uploads",
    "prefix",
    "upload-id-marker",
}

_AZURE: Known = {
    ("GET", "container", frozenset({"restype", "comp=list"})): "List Blobs",
    ("GET", "blob", frozenset()): "Get Blob",
    ("HEAD", "blob", frozenset()): "Get Blob Properties",
    ("PUT", "blob", frozenset()): "Put Blob",
    ("DELETE", "blob", frozenset()): "Delete Blob",
    ("PUT", "blob", frozenset({"comp=block", "blockid"})): "Put Block",
    ("PUT", "blob", frozenset({"comp=blocklist"})): "Put Block List",
    ("GET", "blob", frozenset({"comp=blocklist", "blocklisttype"})): "Get Block List",
}
_AZURE_PAGING = {"delimiter", "include=uncommittedblobs", "marker", "maxresults", "prefix"}
_AZURE_SIGNATURE = {"se", "sig", "sp", "spr", "sr", "sv"}

_GCS: Known = {
    ("POST", "upload objects", frozenset({"uploadType=multipart", "name"})): "objects.insert",
    ("GET", "objects", frozenset()): "objects.list",
    ("GET", "object", frozenset()): "objects.get",
    ("DELETE", "object", frozenset()): "objects.delete",
    ("POST", "rewrite", frozenset()): "objects.rewrite",
    ("GET", "bucket", frozenset({"uploads"})): "multipartUploads.list",
    ("POST", "key", frozenset({"uploads"})): "multipartUploads.create",
    ("PUT", "key", frozenset({"partNumber", "uploadId"})): "multipartUploads.putPart",
    ("POST", "key", frozenset({"uploadId"})): "multipartUploads.complete",
    ("DELETE", "key", frozenset({"uploadId"})): "multipartUploads.abort",
}
_GCS_PAGING = _S3_PAGING | {
    "alt=media",
    "fields",
    "ifGenerationMatch",
    "ifMetagenerationNotMatch",
    "ifSourceGenerationMatch",
    "pageToken",
    "prettyPrint",
    "projection=noAcl",
}
_GCS_PATHS = {
    "upload objects": r"/upload/storage/v1/b/[^/]+/o",
    "objects": r"/storage/v1/b/[^/]+/o",
    "object": r"(/download)?/storage/v1/b/[^/]+/o/[^/]+",
    "rewrite": r"/storage/v1/b/[^/]+/o/[^/]+/rewriteTo/b/[^/]+/o/[^/]+",
    "json": r"/(upload/|download/)?storage/.*",
    "bucket": r"/[^/]+",
    "key": r"/[^/]+/.+",
}


def _asked(query: str, telling: set[str]) -> set[str]:
    """The names of a query, with the values of those that tell operations apart."""
    pairs = parse_qsl(query, keep_blank_values=True)
    return {f"{name}={value}" if name in telling else name for name, value in pairs}


def s3_operation(method: str, target: str) -> str:
    """The operation of a path-style request; what is not known to need no more is described."""
    parts = urlsplit(target)
    about = "key" if "/" in parts.path.strip("/") else "bucket"
    asked = _asked(parts.query, set()) - (_S3_PAGING if about == "bucket" else set())
    return _S3.get((method, about, frozenset(asked)), f"{method} {target}")


def azure_operation(method: str, target: str) -> str:
    """The operation of a request to an account that is the first segment of the path."""
    parts = urlsplit(target)
    about = "blob" if parts.path.strip("/").count("/") > 1 else "container"
    asked = _asked(parts.query, {"comp", "include"}) - _AZURE_SIGNATURE
    asked -= _AZURE_PAGING if about == "container" else set()
    return _AZURE.get((method, about, frozenset(asked)), f"{method} {target}")


def gcs_operation(method: str, target: str) -> str:
    """The method of the JSON API, or the operation of the XML API by the name of its permission."""
    parts = urlsplit(target)
    about = next(kind for kind, form in _GCS_PATHS.items() if re.fullmatch(form, parts.path))
    asked = _asked(parts.query, {"alt", "projection", "uploadType"}) - _GCS_PAGING
    return _GCS.get((method, about, frozenset(asked)), f"{method} {target}")


OPERATIONS: dict[str, Callable[[str, str], str]] = {
    "aws": s3_operation,
    "azure": azure_operation,
    "gcp": gcs_operation,
}
"""By module: what names a request, from its method and its path with the query."""

_OF_COPIES = {
    "PutObject": "CopyObject",
    "UploadPart": "UploadPartCopy",
    "Put Blob": "Copy Blob From URL",
    "Put Block": "Put Block From URL",
}
"""What a request is that names a source instead of sending bytes."""


def named(cloud: str, request: Request) -> str:
    """The operation of a request."""
    name = OPERATIONS[cloud](request.method, request.target)
    sources = (request.header("x-amz-copy-source"), request.header("x-ms-copy-source"))
    return _OF_COPIES.get(name, name) if any(sources) else name


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
    proxy = stack.enter_context(FaultyProxy(server.url))
    container = f"container-{uuid.uuid4().hex[:12]}"
    with BlobServiceClient.from_connection_string(server.connection_string) as service:
        service.create_container(container)
    stack.enter_context(pytest.MonkeyPatch.context()).setenv("AZURE_STORAGE_KEY", server.key)
    options = AzureOptions(endpoint_url=f"{proxy.url}/{server.account}")
    return Cloud("azure", proxy, f"az://{container}", _config(azure=options))


def _gcp(stack: ExitStack, request: pytest.FixtureRequest) -> Cloud:
    stub = stack.enter_context(GcsStub("bucket"))
    proxy = stack.enter_context(FaultyProxy(stub.url))
    config = _config(gcs=GCSOptions(endpoint_url=proxy.url))
    return Cloud("gcp", proxy, "gs://bucket", config)


@pytest.fixture(scope="module")
def azurite(_own_surroundings):
    with azurite_server() as server:
        yield server


@pytest.fixture(params=["aws", pytest.param("azure", marks=pytest.mark.azurite), "gcp"])
def cloud(request):
    with ExitStack() as stack:
        yield {"aws": _aws, "azure": _azure, "gcp": _gcp}[request.param](stack, request)


# each verb of a store, for good and for bad


def _put(store: ObjectStore, key: str) -> None:
    data = b"data"
    info = put(store, key, data, if_absent=True)
    put(store, key, data, if_version=info.version)


def _upload(store: ObjectStore, key: str) -> None:
    data = bytes(5 * MIB)
    upload = store.create_upload(key, len(data))
    part = put_part(store, upload, 1, data)
    store.complete_upload(upload, [part])


def _copy(store: ObjectStore, key: str) -> None:
    store.copy(store, put(store, key, b"data"), f"{key}-copy")


def _copy_part(store: ObjectStore, key: str) -> None:
    source, upload = put(store, key, b"data"), store.create_upload(f"{key}-copy", 5 * MIB)
    with suppress(InvalidRequestError):  # Azurite does not do it, Google has no such request
        store.copy_part(store, source, upload, 1, 0, 4)
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


OPTIONS = {
    "aws tags": ("s3", {"tags": {"team": "nlp"}}, "tags", "x-amz-tagging"),
    "azure": ("azure", {"tags": {"team": "nlp"}}, "tags", "x-ms-tags"),
}


@pytest.mark.parametrize(
    ("cloud", "case"),
    [
        pytest.param(cloud, case, marks=[pytest.mark.azurite] if cloud == "azure" else [])
        for case in OPTIONS
        for cloud in case.split()[:1]
    ],
    indirect=["cloud"],
)
def test_options_that_need_more_concern_the_operations_that_are_listed(cloud, case):
    group, given, option, header = OPTIONS[case]
    options = dataclasses.replace(getattr(cloud.config, group), **given)
    cloud.config = dataclasses.replace(cloud.config, **{group: options})
    store = cloud.store()
    for name, verb in WRITING.items():
        verb(store, f"run/{name}")
    listed = permissions(cloud.name)["options"][option]["writer"]
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
