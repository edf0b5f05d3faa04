"""What the stores of all clouds make of the wire, whatever dialect they speak on it."""

import email.utils
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("azure.storage.blob")

import test_azure
import test_gcs
import test_s3

from cloudckpt import AzureOptions, Config, GCSOptions, S3Options
from cloudckpt.errors import (
    ConnectionLostError,
    InvalidRequestError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores.azure import AzureStore
from cloudckpt.stores.base import ObjectStore, Part
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.s3 import S3Store
from emulators import free_port


def s3(url):
    options = S3Options(endpoint_url=url, addressing_style="path", anonymous=True)
    return S3Store("bucket", Config(s3=options))


def google(url):
    return GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=url)))


def azure(url):
    options = AzureOptions(endpoint_url=url, account="account", anonymous=True)
    return AzureStore("bucket", Config(azure=options))


@dataclass(frozen=True)
class Dialect:
    """A way to speak to a store.

    Attributes:
        open: Opens a store at a URL.
        verbs: How each verb reaches it: a function, and an answer that suits it.
        versions: Where answers tell the version of an object.
        versioned: The verbs that need to be told it.
        metadata: What headers with an object's metadata begin with.
    """

    open: Callable[[str], ObjectStore]
    verbs: Mapping[str, tuple[Callable[[ObjectStore], object], Mapping[str, Any]]]
    versions: Mapping[str, str] = field(default_factory=lambda: {"ETag": '"tag"'})
    versioned: tuple[str, ...] = ("put", "get", "get_range", "head")
    metadata: str = "x-amz-meta-"


DIALECTS = {
    "s3": Dialect(s3, test_s3.VERBS, versioned=("put", "put_part", "get", "get_range", "head")),
    "google": Dialect(
        google, test_gcs.VERBS, {"x-goog-generation": "7"}, ("put", "head"), "x-goog-meta-"
    ),
    "azure": Dialect(
        azure,
        test_azure.VERBS,
        versioned=("put", "complete_upload", "get", "head"),
        metadata="x-ms-meta-",
    ),
}


@pytest.fixture(scope="module")
def stub(stub_server):
    with stub_server() as stub:
        yield stub


@pytest.fixture
def server(stub):
    stub.reset_script()
    return stub


@pytest.fixture(scope="module", params=DIALECTS)
def dialect(request):
    return DIALECTS[request.param]


@pytest.fixture(scope="module")
def store(dialect, stub):
    store = dialect.open(stub.url)
    yield store
    store.close()


def failure(store, status, headers=(), body=b""):
    return store.failure(status, dict(headers), body, "PUT", store.uri("run/object"))


def test_a_store_makes_one_attempt(dialect, store, server):
    for verb, (function, _) in dialect.verbs.items():
        server.reset_script()
        server.respond(lambda request: server.Answer(503))
        with pytest.raises(ThrottledError):
            function(store)
        assert len(server.requests) == 1, verb


def test_a_connection_that_closes_without_an_answer_is_lost(dialect, store, server):
    for function, _ in dialect.verbs.values():
        server.answer(mute=True)
        with pytest.raises(ConnectionLostError):
            function(store)


def test_an_endpoint_that_is_not_there_is_a_lost_connection(dialect):
    store = dialect.open(f"http://127.0.0.1:{free_port()}")
    for function, _ in dialect.verbs.values():
        with pytest.raises(ConnectionLostError, match="refused") as caught:
            function(store)
        assert caught.value.uri.startswith(store.uri("run/"))
    store.close()


@pytest.mark.parametrize("body", [b"", b"<html>nginx</html>", b"\xff\xfe<", b"<Error>", b"{", b"5"])
def test_an_answer_that_is_no_error_of_the_vendor_is_judged_by_its_status(store, body):
    assert type(failure(store, 503, body=body)) is ThrottledError


def test_an_answer_without_a_version_is_a_broken_answer(dialect, store, server):
    for verb in dialect.versioned:
        function, answer = dialect.verbs[verb]
        in_body = "ETag" not in dialect.versions
        nothing = {**answer, "headers": {}, "body": b"{}" if in_body else answer.get("body", b"")}
        server.respond(lambda request, nothing=nothing: server.Answer(**nothing))
        with pytest.raises(TransientStoreError) as caught:
            function(store)
        assert caught.value.uri == store.uri("run/object")


def test_a_truncated_object_tells_how_much_came(dialect, store, server):
    headers = {**dialect.versions, "Content-Range": "bytes 0-999/1000"}
    server.answer(status=206, headers=headers, body=b"x" * 300, size=1000, hang_up=True)
    with pytest.raises(ConnectionLostError) as caught:
        store.get_range("run/object", 0, [memoryview(bytearray(1000))])
    assert (caught.value.received, caught.value.version) == (300, *dialect.versions.values())
    assert caught.value.uri == store.uri("run/object")


@pytest.mark.parametrize("key", ["a/../b", "a/./b"])
def test_a_key_with_dot_segments_is_never_sent(store, server, key):
    with pytest.raises(InvalidRequestError):
        store.put(key, [memoryview(b"data")], checksum=0)
    assert server.requests == []


# whose object it is

NAME = "0123456789abcdef"


def name_in(dialect, request):
    """The name that a request gives to a write."""
    if b'"metadata"' in request.body:
        return test_gcs.inserted(request)[0]["metadata"].get("cloudckptattempt")
    return request.headers[dialect.metadata + "cloudckptattempt"]


def test_a_write_gives_its_object_a_name(dialect, store, server):
    put, answer = dialect.verbs["put"]
    server.answer(**answer)
    put(store, attempt=NAME)
    assert name_in(dialect, server.requests[-1]) == NAME


def test_an_upload_gives_its_object_a_name(dialect, store, server):
    names = []
    for _ in range(2):
        for verb in ("create_upload", "complete_upload"):
            if verb in dialect.verbs:
                server.answer(**dialect.verbs[verb][1])
        upload = store.create_upload("run/object", 5 * 1024**2)
        checksum = store.capabilities.checksum.of(b"data")
        store.complete_upload(upload, [Part(1, 4, '"tag"', checksum)])
        names.append([name_in(dialect, request) for request in server.requests])
        assert upload.attempt in names[-1]
        server.reset_script()
    assert names[0] != names[1]


@pytest.mark.parametrize("there", [NAME, "f" * 16, ""])
def test_one_request_tells_whose_an_object_is(dialect, store, server, there):
    _, answer = dialect.verbs["head"]
    if dialect.metadata == "x-goog-meta-":
        told = {"metadata": {"team": "nlp", "cloudckptattempt": there}} if there else {}
        answer = {**answer, "body": test_gcs.resource(**told)}
    elif there:
        named = {dialect.metadata.title() + "Cloudckptattempt": there}
        answer = {**answer, "headers": {**answer["headers"], **named}}
    server.answer(**answer)
    found = store.written("run/object", NAME)
    assert (found is not None) == (there == NAME)
    assert len(server.requests) == 1


# proxies


def asked(dialect, url, server):
    """The request to put an object with a store at a URL."""
    store = dialect.open(url)
    function, answer = dialect.verbs["put"]
    server.answer(**answer)
    function(store)
    store.close()
    return server.requests[-1].target


@pytest.mark.parametrize("hosts", ["127.0.0.1", ".internal,127.0.0.1"])
def test_no_proxy_is_respected(dialect, server, monkeypatch, hosts):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", hosts)
    assert asked(dialect, server.url, server).startswith("/")


def test_a_proxy_may_be_written_without_its_scheme(dialect, server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", server.url.removeprefix("http://"))
    assert asked(dialect, "http://store.example", server).startswith("http://store.example/")


@pytest.mark.parametrize("dialect", ["google", "azure"], indirect=True)  # boto3 knows none
@pytest.mark.parametrize("variable", ["ALL_PROXY", "all_proxy"])
def test_a_proxy_for_all_is_asked_unless_there_is_one_for_the_scheme(
    dialect, server, monkeypatch, variable
):
    monkeypatch.setenv(variable, server.url.removeprefix("http://"))
    assert asked(dialect, "http://store.example", server).startswith("http://store.example/")
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv(variable, "socks5://127.0.0.1:9")
    assert asked(dialect, "http://store.example", server).startswith("http://store.example/")


# when to come back


@pytest.mark.parametrize("status", [429, 500, 503])
def test_retry_after_is_passed_on(store, status):
    assert failure(store, status, {"Retry-After": "7"}).retry_after == 7.0


def test_retry_after_may_be_a_date(store):
    later = email.utils.formatdate(time.time() + 3600, usegmt=True)
    assert 3000 < failure(store, 503, {"Retry-After": later}).retry_after <= 3600


def test_a_date_to_retry_after_is_by_the_clock_of_the_store(store):
    theirs = time.time() + 600
    headers = {
        "Date": email.utils.formatdate(theirs, usegmt=True),
        "Retry-After": email.utils.formatdate(theirs + 2, usegmt=True),
    }
    assert failure(store, 503, headers).retry_after == 2.0


def test_of_two_retry_afters_the_finer_counts(store):
    headers = {"Retry-After": "2", "x-ms-retry-after-ms": "1500"}  # Azure sends both
    assert failure(store, 503, headers).retry_after == 1.5


@pytest.mark.parametrize(
    "value", ["soon", "-1", "", "1.5", email.utils.formatdate(0, usegmt=True), "٣"]
)
def test_a_retry_after_that_is_no_number_of_seconds_does_no_harm(store, value):
    assert failure(store, 503, {"Retry-After": value}).retry_after is None
