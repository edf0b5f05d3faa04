"""What the stores with S3's API do differently, row by row.

No vendor's store is asked here. Each row has a stub, made of its documentation: moto, or the
scripted server of ``conftest.py``, with what the vendor says that it does otherwise.
"""

import contextlib
import dataclasses
import uuid
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints
from unittest.mock import Mock

import pytest
import torch
from botocore.exceptions import ConnectTimeoutError

import cloudckpt
from cloudckpt import Config, RetryPolicy, S3Options, errors
from cloudckpt.config import MIB
from cloudckpt.stores.base import CopySource, ObjectInfo
from cloudckpt.stores.credentials import Credentials
from cloudckpt.stores.registry import open_store
from cloudckpt.stores.s3 import store as s3
from cloudckpt.stores.s3.access import Keys
from cloudckpt.stores.s3.dialects import DIALECTS
from cloudckpt.uri import CheckpointURI
from dcp.values import assert_same, blank_like
from support.contract.copies import CopyContract
from support.contract.data import Hooks
from support.contract.objects import ReadingContract, WritingContract
from support.contract.uploads import UploadContract
from support.dialects import error_xml, get_range, put
from support.stubs.s3_vendors import STUBS, HuggingFaceStub

EXPRESS_BUCKET = "fast--usw2-az1--x-s3"

# which row


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("https://s3.eu-west-1.amazonaws.com", "aws"),
        ("https://account.r2.cloudflarestorage.com", "r2"),
        ("https://account.eu.r2.cloudflarestorage.com", "r2"),
        ("https://cwobject.com", "coreweave"),
        ("http://cwlota.com", "coreweave"),
        ("https://storage.googleapis.com", "other"),
        ("https://s3.hf.co/namespace", "huggingface"),
        ("https://r2.cloudflarestorage.com.example", "other"),
        ("https://nots3.hf.co.example", "other"),
    ],
)
def test_a_store_is_known_by_its_endpoint(open_s3, endpoint, name):
    store = open_s3(endpoint_url=endpoint)
    assert store.access.dialect is DIALECTS[name]
    assert store.capabilities.conditional_writes is DIALECTS[name].conditional_writes
    assert store.capabilities.verifies is DIALECTS[name].verifies_checksums


@pytest.mark.parametrize("name", DIALECTS)
def test_the_user_may_say_whose_store_it_is_which_proves_no_conditions(open_s3, name):
    assert name in get_args(get_type_hints(S3Options)["dialect"])
    options = {"endpoint_url": "http://store.example", "region": "us-east-1"}
    store, like_express = open_s3(dialect=name, **options), open_s3(EXPRESS_BUCKET, **options)
    assert store.access.dialect is DIALECTS[name]
    for found in (store.capabilities, like_express.capabilities):
        known = (found.conditional_writes, found.conditional_deletes, found.create_only)
        assert not any(known)


@pytest.mark.parametrize(
    ("endpoint", "given", "url"),
    [
        ("http://cwlota.com", None, "http://bucket.cwlota.com/"),
        ("http://cwlota.com", "path", "http://cwlota.com/bucket"),
        ("https://s3.hf.co/me", None, "https://s3.hf.co/me/bucket"),
    ],
)
def test_a_bucket_is_addressed_as_its_vendor_demands(open_s3, endpoint, given, url):
    assert open_s3(endpoint_url=endpoint, addressing_style=given).access.url == url


@pytest.mark.parametrize(
    ("bucket", "options", "named"),
    [
        (EXPRESS_BUCKET, {"tags": {"team": "nlp"}}, "^S3 Express.* tags"),
        (EXPRESS_BUCKET, {"storage_class": "STANDARD_IA"}, "^S3 Express.* storage_class"),
        (EXPRESS_BUCKET, {"anonymous": True}, "^S3 Express.* anonymous"),
        ("b", {"endpoint_url": "https://s3.hf.co/me", "sse": "AES256"}, "^Hugging Face.* sse"),
    ],
)
def test_an_option_that_could_have_no_effect_is_refused(open_s3, bucket, options, named):
    with pytest.raises(errors.ConfigError, match=named):
        open_s3(bucket, **{"endpoint_url": None, **options})


# deletions


@pytest.mark.parametrize("name", [n for n, row in DIALECTS.items() if not row.conditional_deletes])
def test_a_condition_that_would_be_ignored_is_looked_at_before(open_s3, server, name):
    """The stub is a store that deletes whatever the condition is."""
    server.respond(lambda request: server.Answer(headers={"ETag": '"new"'}, size=0))
    store = open_s3(dialect=name)
    store.delete("key", if_version='"new"')
    condition = None if DIALECTS[name].conditional_deletes is False else '"new"'
    sent = [(request.method, request.headers["If-Match"]) for request in server.requests]
    assert sent == [("HEAD", None), ("DELETE", condition)]
    with pytest.raises(errors.PreconditionFailedError) as caught:
        store.delete("key", if_version='"old"')
    assert caught.value.certain
    assert server.requests[-1].method == "HEAD"
    server.respond(lambda request: server.Answer(404))
    store.delete("key", if_version='"old"')  # it is gone, which is what was wanted


# each row, with its stub


@dataclass
class Place:
    """A bucket of a stub."""

    name: str
    stub: Any
    bucket: str
    config: Config

    def uri(self, path=""):
        return f"s3://{self.bucket}/{path}"

    def store(self):
        return open_store(CheckpointURI.parse(self.uri()), self.config)


@pytest.fixture
def open_place(stub_server, s3_url, s3_client, monkeypatch):
    """Opens a bucket of a stub, by the name of its row."""
    with contextlib.ExitStack() as stack:

        def open_one(name):
            server = stack.enter_context(stub_server())
            given = [server, s3_url]
            if name == "huggingface":
                given.append(stack.enter_context(stub_server()))
            stub = STUBS[name](*given)
            bucket = f"b{uuid.uuid4().hex[:12]}"
            options = {"endpoint_url": server.url, "addressing_style": "path", "dialect": name}
            if name == "express":  # known by its name
                options["dialect"] = "auto"
            elif name == "huggingface":
                options["endpoint_url"] += "/me"
            elif name == "coreweave":  # known by its host, and addressed as its vendor demands
                monkeypatch.setenv("HTTP_PROXY", server.url)
                monkeypatch.setenv("NO_PROXY", "127.0.0.1")
                options = {"endpoint_url": "http://cwlota.com"}
            s3_client.create_bucket(Bucket=bucket)
            bucket += getattr(stub, "suffix", "")
            config = Config(
                s3=S3Options(**options),
                part_size=5 * MIB,
                connections=4,
                retry=RetryPolicy(attempts=3, base=0.01, cap=0.05, deadline=60.0),
            )
            return Place(name, stub, bucket, config)

        yield open_one


@pytest.fixture
def express(open_place):
    return open_place("express")


@pytest.fixture
def gateway(open_place):
    """A store whose reads are sent on, its stub, and an object there."""
    place = open_place("huggingface")
    store = place.store()
    return store, place.stub, put(store, data=b"0123456789")


@pytest.fixture(params=STUBS)
def place(request, open_place):
    return open_place(request.param)


def own_name(place):
    """Of the bucket, for moto."""
    return place.bucket.removesuffix(getattr(place.stub, "suffix", ""))


def held(client, place):
    """The keys of a place, and the uploads there that are open."""
    bucket = own_name(place)
    objects = client.list_objects_v2(Bucket=bucket).get("Contents", [])
    uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return [entry["Key"] for entry in [*objects, *uploads]]


def state(number=0):
    return {"large": torch.arange(12 * MIB // 4) + number, "small": torch.full((3,), number)}


def loaded(uri, config):
    found = blank_like(state())
    cloudckpt.load(found, checkpoint_id=uri, config=config)
    return found


def test_a_checkpoint_lives_in_every_dialect(place, s3_client):
    if place.name == "other":
        with pytest.raises(errors.ConfigError, match="ignores conditional writes"):
            cloudckpt.save(state(), checkpoint_id=place.uri("run/step-1"), config=place.config)
        assert held(s3_client, place) == []
        place.config = dataclasses.replace(place.config, conditional_writes="off")
    first, second, config = place.uri("run/step-1"), place.uri("run/step-2"), place.config
    cloudckpt.save(state(1), checkpoint_id=first, config=config)
    cloudckpt.save(state(2), checkpoint_id=first, config=config)  # in place of that
    assert_same(loaded(first, config), state(2))
    cloudckpt.copy(first, second, config=config)
    assert_same(loaded(second, config), state(2))
    cloudckpt.verify(second, config=config)
    found = cloudckpt.list_checkpoints(place.uri("run"), config=config)
    assert [entry.step for entry in found] == [1, 2]
    operations = place.stub.operations()
    assert "PutPart" in operations
    assert "Copy" in operations
    for uri in (first, second):
        cloudckpt.delete(uri, config=config)
    assert held(s3_client, place) == []


class TestStubs(Hooks):
    """What of the contract depends on what a vendor's store does otherwise."""

    @pytest.fixture(params=STUBS)
    def store(self, request, open_place, s3_client):
        place = open_place(request.param)
        self.bucket, self.client = own_name(place), s3_client
        if "put_if" in request.function.__name__ and place.name == "other":
            pytest.skip("it ignores conditions")
        return place.store()

    @pytest.fixture
    def copier(self, store):
        return store

    def put_directly(self, store, key, data):
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def get_directly(self, store, key):
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    test_absent = WritingContract.test_put_if_absent_leaves_an_object_that_is_there
    test_version = WritingContract.test_put_if_version_replaces_that_version_and_brings_nothing_back
    test_listing = ReadingContract.test_list_finds_keys_by_their_beginning_in_the_order_of_keys
    test_level = ReadingContract.test_one_level_has_its_objects_and_each_folder_once
    test_uploads = UploadContract.test_uploads_are_listed_by_the_beginning_of_their_keys
    test_parts = CopyContract.test_copied_and_sent_parts_make_one_object


# sessions of directory buckets


def test_a_session_is_renewed_before_it_ends(express):
    express.stub.lifetime = 40.0  # less than what botocore wants to be left
    store = express.store()
    for number in range(3):
        put(store, f"key{number}")
    assert len(express.stub.sessions) >= 2
    assert express.stub.refused == []


def test_a_session_that_is_refused_is_begun_anew(express):
    store = express.store()
    put(store, "key")
    express.stub.sessions.clear()  # S3 knows it no longer
    put(store, "key")
    assert express.stub.refused == ["Put"]
    assert len(express.stub.sessions) == 1


def test_a_copy_is_tried_again_if_its_credentials_come_late(express, monkeypatch):
    store, late = express.store(), ConnectTimeoutError(endpoint_url="http://169.254.169.254")
    found = put(store, "key")
    with monkeypatch.context() as patch:
        patch.setattr(Keys, "secrets", Mock(side_effect=late))
        with pytest.raises(errors.ConnectionLostError):
            store.copy(CopySource(store, found), "copy")
    assert store.copy(CopySource(store, found), "copy").size == found.size


@pytest.mark.parametrize(
    ("status", "code", "expected", "told"),
    [
        (403, "AccessDenied", errors.AccessDeniedError, "s3express:CreateSession"),
        (404, "NoSuchBucket", errors.BucketNotFoundError, "CreateSession"),
        (503, "SlowDown", errors.ConnectionLostError, "can't be fetched now"),
    ],
)
def test_a_session_that_is_refused_says_why(open_s3, server, status, code, expected, told):
    server.respond(lambda request: server.Answer(status, body=error_xml(code)))
    store = open_s3(EXPRESS_BUCKET)
    with pytest.raises(expected, match=told) as caught:
        put(store, "key")
    assert caught.value.certain  # nothing was sent
    assert {request.target for request in server.requests} == {f"/{EXPRESS_BUCKET}?session"}


# reads that are sent on


def test_nothing_but_the_url_goes_to_whom_reads_are_sent_on_to(monkeypatch, request):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-the-role")
    store, stub, info = request.getfixturevalue("gateway")
    assert store.get("run/object") == (b"0123456789", info)
    assert get_range(store, start=2, size=3, if_version=info.version) == b"234"
    whole, part = stub.read
    usual = {"host", "accept-encoding", "user-agent"}
    assert {name.lower() for name in whole.headers} <= usual
    assert {name.lower() for name in part.headers} <= usual | {"range"}


def test_a_target_that_always_refuses_is_an_error_without_its_signature(gateway):
    store, stub, info = gateway
    stub.lifetime = -1.0
    with pytest.raises(errors.AccessDeniedError, match="to which the store redirected") as caught:
        get_range(store, size=1, if_version=info.version)
    assert len(stub.expired) == 1
    assert "SIGNED" not in f"{caught.value!r} {caught.value} {vars(caught.value)}"


def test_a_read_whose_get_renews_the_credentials_is_tried_again(gateway, monkeypatch):
    (store, _, info), denied = gateway, errors.AccessDeniedError("403")
    monkeypatch.setattr(store, "_head", Mock(side_effect=[denied, info, denied, denied]))
    with pytest.raises(errors.ServerError):
        store.get("run/object")
    with pytest.raises(errors.AccessDeniedError):  # it is refused with these, too
        store.get("run/object")


def test_only_the_store_itself_says_that_an_object_is_not_there(gateway):
    store, stub, info = gateway
    stub.is_behind = True
    with pytest.raises(errors.ServerError, match="missing object"):
        store.get("run/object")
    with pytest.raises(errors.ServerError, match="missing object"):
        get_range(store, size=1, if_version=info.version)


def test_a_version_is_pinned_though_the_store_ignores_conditions(gateway):
    store, _, old = gateway
    assert get_range(store, size=3, if_version=old.version) == b"012"
    new = put(store, data=b"new")
    assert get_range(store, size=3, if_version=new.version) == b"new"
    with pytest.raises(errors.PreconditionFailedError):
        get_range(store, size=3, if_version=old.version)
    with pytest.raises(errors.ObjectNotFoundError):
        store.get("run/nothing")
    with pytest.raises(errors.RangeNotSatisfiableError):
        get_range(store, start=7, size=3, if_version=new.version)


@pytest.mark.parametrize("name", [name for name, row in DIALECTS.items() if not row.redirects])
def test_no_other_store_may_send_reads_on(open_s3, stub_server, server, name, monkeypatch):
    if name == "express":
        monkeypatch.setattr(Credentials, "get", lambda self: (None, ()))
    with stub_server() as elsewhere:
        location = {"Location": f"{elsewhere.url}/target"}
        server.respond(lambda request: server.Answer(302, location))
        with pytest.raises(errors.StoreError):
            open_s3(dialect=name).get("key")
        assert server.requests[-1].target.endswith("/key")
        assert elsewhere.requests == []


@pytest.mark.parametrize(
    ("location", "may_be_read"),
    [
        ("{}/x?Signature=s", True),
        ("/other/path?Signature=s", True),
        ("http://cdn.example/x?Signature=s", False),
        ("https://user:password@cdn.example/x", False),
        ("ftp://cdn.example/x", False),
        ("file:///etc/passwd", False),
        ("https://[cdn.example/x", False),
    ],
)
def test_a_target_has_an_address_that_may_be_read_from(
    open_s3, tls_server, authority, monkeypatch, location, may_be_read
):
    monkeypatch.setenv("AWS_CA_BUNDLE", authority.bundle)
    there = {"ETag": '"v"'}
    tls_server.answer(headers=there, size=4)
    tls_server.answer(status=302, headers={"Location": location.format(tls_server.url)})
    tls_server.answer(headers=there, body=b"data")
    store = open_s3(endpoint_url=f"{tls_server.url}/me", dialect="huggingface")
    if may_be_read:
        assert store.get("key") == (b"data", ObjectInfo("key", 4, '"v"'))
    else:
        with pytest.raises(errors.InvalidRequestError):
            store.get("key")
    assert [request.method for request in tls_server.requests] == [
        "HEAD",
        *["GET"] * (1 + may_be_read),
    ]


def test_a_storage_bucket_by_its_own_scheme(stub_server, s3_url, s3_client, monkeypatch):
    """Whatever endpoint is meant for s3:// in the same job."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://minio.example:9000")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    bucket = f"b{uuid.uuid4().hex[:12]}"
    s3_client.create_bucket(Bucket=bucket)
    with stub_server() as server, stub_server() as cdn:
        monkeypatch.setattr(s3, "HUGGING_FACE_ENDPOINT", server.url)
        stub = HuggingFaceStub(server, s3_url, cdn, namespace="my-org")
        uri, config = f"hf://buckets/my-org/{bucket}/run/step-1", Config(part_size=5 * MIB)
        cloudckpt.save(state(3), checkpoint_id=uri, config=config)
        assert_same(loaded(uri, config), state(3))
        assert cloudckpt.latest(f"hf://buckets/my-org/{bucket}/run", config=config) is not None
        with pytest.raises(errors.CheckpointNotFoundError) as caught:
            cloudckpt.load(state(), checkpoint_id=f"{uri}0", config=config)
        assert f"{uri}0" in str(caught.value)
        for _, request in stub.log:
            assert "/us-east-1/s3/aws4_request" in request.headers["Authorization"]
            assert request.headers["User-Agent"].startswith("cloudckpt/")  # botocore gets no 302
