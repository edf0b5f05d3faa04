"""What the stores ask of a cloud is what the roles of its Terraform module allow: no more, no less.

All requests pass a proxy and are named by the operation that the cloud's documentation has for
them. Each store gets a function beside :func:`s3_operation`, in ``OPERATIONS``.
"""

import dataclasses
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
import torch

import cloudckpt
from cloudckpt import Config, RetryPolicy, S3Options
from cloudckpt.checksum import crc32c
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing.proxy import FaultyProxy
from cloudckpt.testing.wire_faults import Reset, s3_error

TERRAFORM = Path(__file__).parents[2] / "terraform"
MIB = 1024 * 1024

_S3 = {
    # method, whether it is about a key, and what the query must hold
    ("GET", False, frozenset({"list-type"})): "ListObjectsV2",
    ("GET", False, frozenset({"uploads"})): "ListMultipartUploads",
    ("POST", False, frozenset({"delete"})): "DeleteObjects",
    ("GET", True, frozenset()): "GetObject",
    ("HEAD", True, frozenset()): "HeadObject",
    ("PUT", True, frozenset()): "PutObject",
    ("POST", True, frozenset({"uploads"})): "CreateMultipartUpload",
    ("PUT", True, frozenset({"partNumber", "uploadId"})): "UploadPart",
    ("POST", True, frozenset({"uploadId"})): "CompleteMultipartUpload",
    ("DELETE", True, frozenset({"uploadId"})): "AbortMultipartUpload",
}
_S3_PAGING = {
    "continuation-token",
    "encoding-type",
    "key-marker",
    "max-keys",
    "max-uploads",
    "prefix",
    "upload-id-marker",
}


def s3_operation(method: str, target: str) -> str:
    """The operation of a path-style request; what is not known to need no more is described."""
    parts = urlsplit(target)
    query = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    keyed = "/" in parts.path.strip("/")
    asked = frozenset(query if keyed else query - _S3_PAGING)
    return _S3.get((method, keyed, asked), f"{method} {target}")


OPERATIONS: dict[str, Callable[[str, str], str]] = {"aws": s3_operation}
"""By module: what names a request, from its method and its path with the query."""


class Recorder:
    """A way to a server, and the operations that were asked for on it."""

    def __init__(self, proxy: FaultyProxy, cloud: str) -> None:
        self.proxy = proxy
        self._name = OPERATIONS[cloud]

    @property
    def operations(self) -> set[str]:
        return self.operations_with(None)

    def operations_with(self, header: str | None) -> set[str]:
        """Those that were asked for with a header."""
        return {
            self._name(request.method, request.target)
            for request in self.proxy.requests()
            if header is None or request.header(header) is not None
        }


def permissions(cloud: str) -> dict:
    return json.loads((TERRAFORM / cloud / "permissions.json").read_text())


def allowed(cloud: str, role: str) -> set[str]:
    """The operations that a role is made for."""
    return set(permissions(cloud)[role])


@pytest.fixture(scope="module")
def _proxy(s3_url):
    with FaultyProxy(s3_url) as proxy:
        yield proxy


@pytest.fixture
def s3(_proxy):
    _proxy.clear()
    return Recorder(_proxy, "aws")


@pytest.fixture(scope="module")
def config(_proxy):
    return Config(
        connections=4,
        part_size=5 * MIB,
        retry=RetryPolicy(attempts=4, base=0.01, cap=0.05, deadline=20.0),
        s3=S3Options(endpoint_url=_proxy.url, addressing_style="path"),
    )


@pytest.fixture
def store(bucket, config):
    store = S3Store(bucket, config)
    yield store
    store.close()


# each verb of a store, for good and for bad


def _put(store: ObjectStore, key: str) -> None:
    data = b"data"
    info = store.put(key, [memoryview(data)], crc32c=crc32c(data), if_absent=True)
    store.put(key, [memoryview(data)], crc32c=crc32c(data), if_version=info.version)


def _upload(store: ObjectStore, key: str) -> None:
    data = bytes(5 * MIB)
    upload = store.create_upload(key, len(data))
    part = store.put_part(upload, 1, [memoryview(data)], crc32c=crc32c(data))
    store.complete_upload(upload, [part])


def _abort(store: ObjectStore, key: str) -> None:
    store.abort_upload(store.create_upload(key, 5 * MIB))


def _head(store: ObjectStore, key: str) -> None:
    store.head(key)
    with pytest.raises(cloudckpt.CloudCheckpointError):
        store.head(key + "-missing")


READING = {
    "get": lambda store, key: store.get(key),
    "get_range": lambda store, key: store.get_range(key, 1, [memoryview(bytearray(2))]),
    "head": _head,
    "list": lambda store, key: list(store.list(key)),
}
WRITING = {
    "put": _put,
    "create_upload": _upload,
    "put_part": _upload,
    "complete_upload": _upload,
    "abort_upload": _abort,
    "list_uploads": lambda store, key: list(store.list_uploads(key)),
    "delete": lambda store, key: store.delete([key, key + "-missing"]),
}


def test_every_verb_is_driven_here():
    assert {*READING, *WRITING} == ObjectStore.__abstractmethods__ - {"close"}


@pytest.mark.parametrize("role", ["reader", "writer"])
def test_the_verbs_ask_for_exactly_what_the_role_allows(s3, store, role):
    _put(store, "run/old")
    s3.proxy.clear()
    verbs = {**READING, **WRITING} if role == "writer" else READING
    for name, verb in verbs.items():
        verb(store, "run/old" if name in READING else f"run/{name}")
    assert s3.operations == allowed("aws", role)


def test_options_that_need_more_concern_the_operations_that_are_listed(s3, bucket, config):
    options = S3Options(
        endpoint_url=s3.proxy.url,
        addressing_style="path",
        acl="bucket-owner-full-control",
        tags={"team": "nlp"},
    )
    store = S3Store(bucket, dataclasses.replace(config, s3=options))
    for name, verb in WRITING.items():
        verb(store, f"run/{name}")
    store.close()
    for option, header in {"acl": "x-amz-acl", "tags": "x-amz-tagging"}.items():
        assert s3.operations_with(header) == set(permissions("aws")["options"][option]["writer"])


def _state(step: int) -> dict:
    return {"weight": torch.full((6 * MIB // 4,), float(step)), "step": step}


def test_saving_asks_for_nothing_that_a_writer_may_not_do(s3, bucket, config):
    uri = f"s3://{bucket}/run-{uuid.uuid4().hex}"
    for step in (1, 2):
        cloudckpt.save(_state(step), checkpoint_id=uri, config=config)
    assert {"UploadPart", "DeleteObjects", "HeadObject", "PutObject"} <= s3.operations

    s3.proxy.inject(Reset("answer"), operation="CreateMultipartUpload", times=1)
    cloudckpt.save(_state(3), checkpoint_id=uri, config=config)
    assert "ListMultipartUploads" in s3.operations

    s3.proxy.inject(s3_error(403, "AccessDenied"), operation="UploadPart")
    with pytest.raises(cloudckpt.AccessDeniedError):
        cloudckpt.save(_state(4), checkpoint_id=uri, config=config)
    assert "AbortMultipartUpload" in s3.operations

    assert s3.operations <= allowed("aws", "writer")


def test_loading_asks_for_nothing_that_a_reader_may_not_do(s3, bucket, config):
    uri = f"s3://{bucket}/run"
    cloudckpt.save(_state(1), checkpoint_id=uri, config=config)
    s3.proxy.clear()
    state = _state(0)
    cloudckpt.load(state, checkpoint_id=uri, config=config)
    assert state["step"] == 1
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.load(state, checkpoint_id=f"{uri}/missing", config=config)
    assert "GetObject" in s3.operations
    assert s3.operations <= allowed("aws", "reader")


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("PUT", "/bucket/key?acl"),
        ("PUT", "/bucket/key?tagging"),
        ("GET", "/bucket?location"),
        ("GET", "/bucket/key?versionId=1"),
        ("DELETE", "/bucket/key"),
        ("HEAD", "/bucket"),
    ],
)
def test_an_operation_that_nobody_may_do_is_not_mistaken_for_another(method, target):
    assert s3_operation(method, target) not in allowed("aws", "writer")
