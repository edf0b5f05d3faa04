"""Each of many objects is tried to be deleted, whatever becomes of the others."""

import errno
import json
import logging
import pickle
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cloudckpt import AzureOptions, Config, GCSOptions, RetryPolicy, S3Options
from cloudckpt.errors import (
    AccessDeniedError,
    ConnectionLostError,
    ObjectNotFoundError,
    ServerError,
    StoreError,
    ThrottledError,
)
from cloudckpt.stores.azure import AzureStore
from cloudckpt.stores.deletions import delete_all, one_by_one
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.s3 import S3Store
from cloudckpt.transfer.upload import delete_quietly
from stubs.gcs import GcsStub

KEYS = [f"run/{number:04}" for number in range(10)]
LIMITS = {"s3": 1000, "gcs": 100, "azure": 256}


class Deletions:
    """What a store deletes that refuses some of it, and how often it is asked for each key."""

    def __init__(self, **refused):
        self.refused = {f"run/{key[1:]}": error for key, error in refused.items()}
        self.asked = []

    def __call__(self, keys):
        self.asked.append(list(keys))
        return [(key, self.refused[key]) for key in keys if key in self.refused]


def test_a_batch_that_fails_does_not_end_the_others():
    deletions = Deletions(_0002=AccessDeniedError("no"))
    with pytest.raises(AccessDeniedError, match=r"1 of 10 objects could not be deleted") as caught:
        delete_all([*KEYS, KEYS[0]], 3, deletions)
    assert deletions.asked == [KEYS[:3], KEYS[3:6], KEYS[6:9], KEYS[9:]]
    assert caught.value.left == (KEYS[2],)
    assert pickle.loads(pickle.dumps(caught.value)).left == (KEYS[2],)


def test_a_request_that_fails_leaves_its_own_batch_only():
    asked = []

    def delete(keys):
        asked.append(keys)
        if KEYS[4] in keys:
            raise ServerError("failed")
        return []

    with pytest.raises(ServerError, match="3 of 10") as caught:
        delete_all(KEYS, 3, delete)
    assert caught.value.left == tuple(KEYS[3:6])
    assert len(asked) == 4


def test_a_failure_that_may_pass_is_the_one_that_is_raised():
    refused = Deletions(_0001=AccessDeniedError("no"), _0007=ThrottledError("slow"))
    with pytest.raises(ThrottledError, match="2 of 10") as caught:
        delete_all(KEYS, 4, refused)
    assert caught.value.left == (KEYS[1], KEYS[7])


def test_a_store_that_can_not_be_reached_is_not_waited_for_again_and_again():
    asked = []

    def delete(keys):
        asked.append(keys)
        raise ConnectionLostError("gone")

    with pytest.raises(ConnectionLostError, match="10 of 10") as caught:
        delete_all(KEYS, 3, delete)
    assert len(asked) == 1
    assert sorted(caught.value.left) == KEYS
    assert caught.value.left[:7] == tuple(KEYS[3:])  # those that had no turn have it next


def test_one_object_keeps_its_error_as_it_is():
    with pytest.raises(AccessDeniedError) as caught:
        delete_all(KEYS[:1], 3, Deletions(_0000=AccessDeniedError("no")))
    assert caught.value.message == "no"


def test_one_by_one_what_is_gone_is_no_failure():
    errors = {KEYS[1]: ObjectNotFoundError("gone"), KEYS[2]: AccessDeniedError("no")}
    tried = []

    def delete(key):
        tried.append(key)
        if key in errors:
            raise errors[key]

    assert one_by_one(KEYS, delete) == [(KEYS[2], errors[KEYS[2]])]
    assert tried == KEYS


# each store, with a server that refuses some keys


class Bucket:
    """Answers to deletions in the words of each vendor; ``refused`` are statuses by key."""

    def __init__(self, kind):
        self.kind = kind
        self.refused = {}
        self.deleted = []

    def respond(self, request):
        from conftest import Answer

        if request.method == "DELETE":
            status = self._delete("run/" + request.target.partition("?")[0][-4:])
            return Answer(status, headers=self._code(status), body=self._body(status))
        return Answer(**getattr(self, f"_{self.kind}")(request))

    def _delete(self, key):
        if key not in self.refused:
            self.deleted.append(key)
            return {"s3": 204, "gcs": 204, "azure": 202}[self.kind]
        return self.refused[key]

    def _code(self, status):
        if self.kind != "azure" or status < 300:
            return {}
        return {"x-ms-error-code": {503: "ServerBusy", 403: "AuthorizationFailure"}[status]}

    def _body(self, status):
        if self.kind != "gcs" or status < 300:
            return b""
        reason = {503: "backendError", 403: "retentionPolicyNotMet"}[status]
        return json.dumps({"error": {"code": status, "errors": [{"reason": reason}]}}).encode()

    def _s3(self, request):
        entries = ""
        for entry in ElementTree.fromstring(request.body).iterfind("Object/Key"):
            status = self._delete(entry.text)
            if status > 300:
                code = {503: "SlowDown", 403: "AccessDenied"}[status]
                entries += f"<Error><Key>{entry.text}</Key><Code>{code}</Code></Error>"
        return {"body": f"<DeleteResult>{entries}</DeleteResult>".encode()}

    def _gcs(self, request):
        return self._batch(request, r"run%2F(\d{4})")

    def _azure(self, request):
        return self._batch(request, r"run/(\d{4})") | {"status": 202}

    def _batch(self, request, pattern):
        parts = ""
        for number, digits in enumerate(re.findall(pattern, request.body.decode())):
            status = self._delete(f"run/{digits}")
            lines = [f"{name}: {value}" for name, value in self._code(status).items()]
            head = "\r\n".join([f"HTTP/1.1 {status} Text", *lines])
            content_id = number if self.kind == "azure" else f"<response-{number}>"
            parts += f"--b\r\nContent-Type: application/http\r\nContent-ID: {content_id}\r\n\r\n"
            parts += f"{head}\r\n\r\n{self._body(status).decode()}\r\n"
        headers = {"Content-Type": "multipart/mixed; boundary=b"}
        return {"headers": headers, "body": f"{parts}--b--\r\n".encode()}


@pytest.fixture(params=["s3", "gcs", "azure"])
def bucket(request, server):
    bucket = Bucket(request.param)
    server.respond(bucket.respond)
    return bucket


@pytest.fixture
def store(bucket, server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=x")
    config = Config(
        s3=S3Options(endpoint_url=server.url, addressing_style="path"),
        gcs=GCSOptions(endpoint_url=server.url),
        azure=AzureOptions(endpoint_url=f"{server.url}/account"),
    )
    made = {"s3": S3Store, "gcs": GCSStore, "azure": AzureStore}[bucket.kind]("bucket", config)
    yield made
    made.close()


def keys_of(bucket):
    """Those of three batches, the last of which is not full."""
    return [f"run/{number:04}" for number in range(2 * LIMITS[bucket.kind] + 50)]


@pytest.mark.parametrize(("status", "expected"), [(503, ThrottledError), (403, AccessDeniedError)])
def test_what_is_refused_does_not_keep_the_others(store, bucket, status, expected):
    keys = keys_of(bucket)
    bucket.refused = {keys[49]: status, keys[-1]: status}
    with pytest.raises(expected, match=f"2 of {len(keys)} objects") as caught:
        store.delete(keys)
    assert caught.value.left == (keys[49], keys[-1])
    assert caught.value.uri == store.uri(keys[49])
    assert sorted(bucket.deleted) == [key for key in keys if key not in bucket.refused]


def test_what_is_left_is_tried_again_on_its_own(store, bucket, server, caplog):
    keys = keys_of(bucket)
    bucket.refused = {keys[3]: 503}
    policy = RetryPolicy(attempts=3, base=0.0, cap=0.0)
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        delete_quietly(store, keys, policy)
    assert len(bucket.deleted) == len(keys) - 1
    assert "1 unneeded objects were left behind" in caplog.text
    assert len(server.requests) == 3 + 2
    bucket.refused.clear()
    bucket.deleted.clear()
    delete_quietly(store, keys[:1], policy)
    assert bucket.deleted == keys[:1]


def test_a_file_that_can_not_be_deleted_does_not_keep_the_others(tmp_path, monkeypatch):
    store = LocalStore()
    keys = [str(tmp_path / name) for name in "abc"]
    for key in keys:
        store.put(key, [], checksum=0)
    unlink = Path.unlink

    def refusing(path, missing_ok=False):
        if path.name == "b":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    with pytest.raises(AccessDeniedError, match="1 of 3") as caught:
        store.delete(keys)
    assert caught.value.left == (keys[1],)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_of_250_objects_in_google_s_bucket_only_the_one_that_fails_is_left():
    with GcsStub("bucket") as stub:
        store = GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=stub.url)))
        keys = [f"run/{number:04}" for number in range(250)]
        for key in keys:
            store.put(key, [], checksum=0)
        stub.state.inject(
            lambda request: request.method == "DELETE" and request.path.endswith("0099"),
            503,
            times=1000,
        )
        with pytest.raises(StoreError, match="1 of 250"):
            store.delete(keys)
        assert stub.state.keys("bucket") == [keys[99]]
        store.close()
