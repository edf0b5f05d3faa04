"""The proxy itself: what it claims to do to a request, it does."""

import contextlib
import http.client
import threading
import time
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions
import pytest

from support.wire.faults import (
    Call,
    Corrupt,
    CorruptUpload,
    Delay,
    Drip,
    Reset,
    Respond,
    Stall,
    StripHeaders,
    StripQuery,
    Truncate,
    internal_error,
    s3_error,
    slow_down,
    too_many_requests,
)
from support.wire.hop import Answer
from support.wire.proxy import FaultyProxy

from .places import Folder, S3Bucket

CONTENT = bytes(range(256)) * 40
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20250101/us-east-1/s3/aws4_request"}


def connected(proxy, timeout=5.0):
    host = urlsplit(proxy.url).netloc
    return contextlib.closing(http.client.HTTPConnection(host, timeout=timeout))


@pytest.fixture
def store(s3_client, bucket):
    """A bucket of its own."""
    return Folder(S3Bucket(s3_client, bucket), "")


@pytest.fixture
def dialect():
    """Without TLS: what is said here is looked at byte by byte."""
    return "plain s3"


@pytest.fixture
def through(proxy):
    """boto3 through the proxy."""
    once = botocore.config.Config(retries={"total_max_attempts": 1})
    client = boto3.client("s3", endpoint_url=proxy.url, config=once)
    yield client
    client.close()


@pytest.fixture
def ask(proxy, store):
    """Sends a raw request for an object that holds CONTENT; returns status, headers and body."""
    store.put("run/object", CONTENT)

    def ask(method: str = "GET", name: str = "run/object", body=None, headers=None, timeout=5.0):
        with connected(proxy, timeout) as connection:
            connection.request(
                method, f"/{store.bucket_name}/{name}", body, {**SIGNED, **(headers or {})}
            )
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    return ask


def test_without_a_rule_requests_and_answers_pass_unchanged(ask, store):
    assert ask()[2] == CONTENT
    assert ask("PUT", "run/new", body=CONTENT)[0] == 200
    assert store.get("run/new") == CONTENT
    status, headers, body = ask("HEAD")
    assert (status, int(headers["Content-Length"]), body) == (200, len(CONTENT), b"")


def test_a_chunked_body_arrives_whole(ask, store):
    assert ask("PUT", "run/new", body=iter([CONTENT[:100], CONTENT[100:]]))[0] == 200
    assert store.get("run/new") == CONTENT


def test_several_requests_share_a_connection(proxy, store):
    store.put("run/object", CONTENT)
    ports = set()
    with connected(proxy) as connection:
        for _ in range(3):
            connection.request("GET", f"/{store.bucket_name}/run/object", headers=SIGNED)
            assert connection.getresponse().read() == CONTENT
            ports.add(connection.sock.getsockname()[1])
    assert len(ports) == 1


def test_a_client_that_waits_for_100_continue_is_invited(proxy, store, through):
    through.put_object(Bucket=store.bucket_name, Key="run/new", Body=CONTENT)
    assert proxy.requests("PutObject")[0].header("Expect") == "100-continue"
    assert store.get("run/new") == CONTENT


@pytest.mark.parametrize("moment", ["request", "answer", "body"])
def test_a_reset_breaks_the_connection(ask, proxy, moment):
    proxy.inject(Reset(moment, after=0))
    with pytest.raises(ConnectionResetError):
        ask()


@pytest.mark.parametrize(
    ("fault", "arrived"), [(Reset("request"), False), (Reset("request", after=500), False),
                           (Reset("answer"), True), (Stall("request", after=500), False)],
)  # fmt: skip
def test_a_request_is_carried_out_only_if_it_arrived_whole(ask, proxy, store, fault, arrived):
    proxy.inject(fault)
    with pytest.raises(OSError):  # noqa: PT011 - reset or timeout, by the fault
        ask("PUT", "run/new", body=CONTENT, timeout=0.5)
    assert ("run/new" in store.objects()) is arrived
    assert proxy.exchanges[0].carried_out == (200 if arrived else None)


def test_a_truncated_answer_announces_what_it_does_not_send(ask, proxy):
    proxy.inject(Truncate(after=1000))
    with pytest.raises(http.client.IncompleteRead) as error:
        ask()
    assert error.value.partial == CONTENT[:1000]


@pytest.mark.parametrize("moment", ["request", "answer", "body"])
def test_a_stalled_connection_says_nothing_and_stays_open(ask, proxy, moment):
    proxy.inject(Stall(moment, after=10))
    with pytest.raises(TimeoutError):
        ask(timeout=0.3)
    assert proxy.wait_idle(), proxy.under_way


@pytest.mark.parametrize("moment", ["answer", "body"])
def test_a_dripping_answer_comes_byte_by_byte(ask, proxy, store, moment):
    store.put("run/short", b"0123456789")
    proxy.inject(Drip(0.001, moment))
    began = time.monotonic()
    assert ask(name="run/short")[2] == b"0123456789"
    assert time.monotonic() - began >= 10 * 0.001


@pytest.mark.parametrize("at", [0, 700, -1])
def test_a_corrupt_answer_differs_in_one_byte(ask, proxy, at):
    proxy.inject(Corrupt(at))
    body = ask()[2]
    assert [i for i in range(len(CONTENT)) if body[i] != CONTENT[i]] == [at % len(CONTENT)]


def test_a_corrupt_upload_differs_in_one_byte(ask, proxy, store):
    proxy.inject(CorruptUpload(at=5))
    ask("PUT", "run/new", body=CONTENT)
    assert store.get("run/new") == CONTENT[:5] + bytes([CONTENT[5] ^ 0xFF]) + CONTENT[6:]


@pytest.mark.parametrize(
    ("fault", "status", "code", "wait"),
    [(slow_down(7), 503, b"SlowDown", "7"), (slow_down(), 503, b"SlowDown", None),
     (too_many_requests(3), 429, b"TooManyRequests", "3"),
     (internal_error(), 500, b"InternalError", None),
     (s3_error(200, "InternalError"), 200, b"InternalError", None),
     (s3_error(403, "AccessDenied"), 403, b"AccessDenied", None)],
)  # fmt: skip
def test_an_error_is_answered_in_the_stores_place(ask, proxy, store, fault, status, code, wait):
    proxy.inject(fault)
    answered, headers, body = ask("PUT", "run/new", body=CONTENT)
    assert (answered, headers.get("Retry-After")) == (status, wait)
    assert b"<Code>" + code + b"</Code>" in body
    assert "run/new" not in store.objects()


def test_an_error_can_hide_a_success(ask, proxy, store):
    proxy.inject(internal_error(carry_out=True))
    assert ask("PUT", "run/new", body=CONTENT)[0] == 500
    assert store.get("run/new") == CONTENT


def test_a_canned_answer_is_sent_as_it_is(ask, proxy):
    proxy.inject(Respond(Answer(418, "teapot", (("X-Kind", "pot"),), b"short")))
    status, headers, body = ask()
    assert (status, headers["X-Kind"], body) == (418, "pot", b"short")


@pytest.mark.parametrize("moment", ["request", "answer"])
def test_a_delayed_exchange_arrives_late(ask, proxy, moment):
    proxy.inject(Delay(0.2, moment))
    began = time.monotonic()
    assert ask()[2] == CONTENT
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize(("moment", "there"), [("request", False), ("answer", True)])
def test_a_function_is_called_at_its_moment(ask, proxy, store, moment, there):
    seen = []
    proxy.inject(Call(lambda _: seen.append("run/new" in store.objects()), moment, after=10))
    assert ask("PUT", "run/new", body=CONTENT)[0] == 200
    assert seen == [there]


def test_stripped_headers_do_not_reach_the_server(ask, proxy):
    assert ask("PUT", body=b"x", headers={"If-None-Match": "*"})[0] == 412
    proxy.inject(StripHeaders(["if-none-match"]))
    assert ask("PUT", body=b"x", headers={"If-None-Match": "*"})[0] == 200


def test_stripped_parameters_do_not_reach_the_server(ask, proxy):
    assert ask(name="run/object?partNumber=7&more=1")[0] == 416
    proxy.inject(StripQuery(["partNumber"]))
    assert ask(name="run/object?partNumber=7&more=1")[::2] == (200, CONTENT)


def test_a_rule_strikes_the_requests_that_fit(ask, proxy):
    rule = proxy.inject(internal_error(), operation="Get*", path="*/run/*", skip=1, times=2)
    assert [ask()[0] for _ in range(5)] == [200, 500, 500, 200, 200]
    assert ask("HEAD")[0] == 200
    assert (rule.seen, rule.injected) == (5, 2)
    rule = proxy.inject(internal_error(), where=lambda request: request.byte_range == (3, 9))
    assert ask(headers={"Range": "bytes=3-8"})[0] == 500
    assert ask(headers={"Range": "bytes=3-9"})[0] == 206


def test_a_seed_repeats_what_chance_decided(s3_url, store):
    def statuses(seed):
        with FaultyProxy(s3_url, seed=seed) as proxy, connected(proxy) as connection:
            proxy.inject(internal_error(), probability=0.5)
            for _ in range(20):
                connection.request("GET", f"/{store.bucket_name}?list-type=2", headers=SIGNED)
                answer = connection.getresponse()
                answer.read()
                yield answer.status

    first = list(statuses(1))
    assert first == list(statuses(1))
    assert set(first) == {200, 500}


def test_the_log_knows_the_operations(proxy, store, through):
    name = store.bucket_name
    through.put_object(Bucket=name, Key="a/b", Body=b"x")
    through.get_object(Bucket=name, Key="a/b", Range="bytes=0-0")
    through.head_object(Bucket=name, Key="a/b")
    upload = through.create_multipart_upload(Bucket=name, Key="a/c")["UploadId"]
    through.upload_part(Bucket=name, Key="a/c", UploadId=upload, PartNumber=1, Body=b"x")
    through.list_multipart_uploads(Bucket=name)
    through.abort_multipart_upload(Bucket=name, Key="a/c", UploadId=upload)
    through.list_objects_v2(Bucket=name)
    through.delete_objects(Bucket=name, Delete={"Objects": [{"Key": "a/b"}]})
    with pytest.raises(botocore.exceptions.ClientError):
        through.complete_multipart_upload(
            Bucket=name, Key="a/c", UploadId="gone", MultipartUpload={"Parts": []}
        )
    assert [request.operation for request in proxy.requests()][:10] == [
        "PutObject", "GetObject", "HeadObject", "CreateMultipartUpload", "UploadPart",
        "ListMultipartUploads", "AbortMultipartUpload", "ListObjectsV2", "DeleteObjects",
        "CompleteMultipartUpload",
    ]  # fmt: skip
    assert proxy.requests("GetObject", "*/a/b")[0].byte_range == (0, 1)
    proxy.clear()
    assert proxy.exchanges == []


def test_what_is_under_way_is_forgotten(ask, proxy):
    reached, held = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        reached.set()
        held.wait(60)

    proxy.inject(Call(hold))
    asking = threading.Thread(target=ask)
    asking.start()
    assert reached.wait(60)
    assert len(proxy.under_way) == 1
    proxy.clear()
    assert proxy.wait_idle(0)
    held.set()
    asking.join()
    assert proxy.under_way == proxy.exchanges == []


def test_only_plain_http_can_be_broken():
    with pytest.raises(ValueError, match="no http://host:port"):
        FaultyProxy("https://example.com")
