"""The S3 store: what it sends, and what it makes of the answers.

What moto does not show (errors, signatures, headers) is tested against the scripted stub of
``conftest.py``, the rest against moto.
"""

import base64
import dataclasses
import itertools
import pickle
import re
import xml.etree.ElementTree as ElementTree

import pytest

from cloudckpt import Config, RetryPolicy, S3Options
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ClockError,
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    ServerError,
    StorageFullError,
    StoreError,
    ThrottledError,
    TransientStoreError,
    WrongRegionError,
)
from cloudckpt.stores.base import Part
from cloudckpt.stores.rest import Request
from cloudckpt.stores.s3.access import BucketAccess
from cloudckpt.stores.s3.store import S3Store
from cloudckpt.transfer.retry import Retrier
from support.dialects import (
    CRC,
    S3,
    answers_of,
    error_xml,
    get_range,
    one_stub,  # noqa: F401 - a fixture
    put,
    xml_of,
)

UPLOAD, VERBS, call = S3.upload, S3.verbs, S3.call


@pytest.fixture(scope="module")
def store(stub):
    store = S3Store("bucket", Config(s3=S3Options(endpoint_url=stub.url, addressing_style="path")))
    yield store
    store.close()


# signatures


def send_large(store, verb, data):
    body, crc = [memoryview(data)[:3], memoryview(data)[3:]], CRC32C.of(data)
    if verb == "put":
        store.put("run/object", body, checksum=crc)
    else:
        store.put_part(UPLOAD, 1, body, checksum=crc)


LARGE = bytes(2 * 1024**2)


# where requests go


@pytest.mark.parametrize(
    ("endpoint", "known"),
    [
        ("http://s3.us-east-1.amazonaws.com", True),
        ("http://s3.cn-north-1.amazonaws.com.cn", True),
        ("http://s3.eusc-de-east-1.amazonaws.eu", True),
        ("http://s3.us-iso-east-1.c2s.ic.gov", True),
        ("https://s3.amazonaws.com", True),
        ("https://s3-us-west-2.amazonaws.com", True),
        ("https://s3-fips.dualstack.us-gov-west-1.amazonaws.com", True),
        ("https://bucket.vpce-1a2b3c-d4e5f6.s3.us-east-1.vpce.amazonaws.com", True),
        ("http://ec2-3-4-5-6.compute-1.amazonaws.com:9000", None),
        ("https://minio-1234.elb.us-east-1.amazonaws.com", None),
        ("https://s3.us-east-1.elb.amazonaws.com", None),
        ("https://a1b2c3.execute-api.us-east-1.amazonaws.com", None),
        ("https://op-01ac5.s3-outposts.us-east-1.amazonaws.com", None),
        ("http://store.example", None),
        ("http://amazonaws.com.example", None),
        ("http://notamazonaws.eu", None),
    ],
)
def test_only_aws_is_known_to_honour_conditions(open_s3, endpoint, known):
    found = open_s3(endpoint_url=endpoint, region="us-east-1").capabilities
    assert (found.conditional_writes, found.conditional_deletes) == (known, known is True)
    assert found.create_only is bool(known)


# what is sent along


@pytest.mark.parametrize("storage_class", ["GLACIER", "DEEP_ARCHIVE"])
def test_a_storage_class_that_can_not_be_loaded_from_is_refused_on_aws(open_s3, storage_class):
    with pytest.raises(ConfigError, match=f"storage_class='{storage_class}'"):
        open_s3(storage_class=storage_class, endpoint_url=None)
    open_s3(storage_class=storage_class)  # on others it may be the name of any class


def test_the_checksum_of_a_whole_upload_follows_from_its_parts(open_s3, server):
    store = open_s3(dialect="aws")
    first, last = b"first part", b"the last part"
    parts = [
        Part(1, len(first), '"one"', CRC32C.of(first)),
        Part(2, len(last), '"two"', CRC32C.of(last)),
    ]
    server.answer(**S3.answers["complete_upload"])
    info = store.complete_upload(UPLOAD, parts)
    request = server.requests[0]
    whole = CRC32C.of(first + last).to_bytes(4, "big")
    assert request.headers["x-amz-checksum-crc32c"] == base64.b64encode(whole).decode()
    assert request.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    listed = [
        {element.tag.rpartition("}")[2]: element.text for element in part}
        for part in ElementTree.fromstring(request.body)
    ]
    assert [entry["PartNumber"] for entry in listed] == ["1", "2"]
    assert [entry["ETag"] for entry in listed] == ['"one"', '"two"']
    assert [base64.b64decode(entry["ChecksumCRC32C"]) for entry in listed] == [
        part.checksum.to_bytes(4, "big") for part in parts
    ]
    assert info.size == len(first + last)


@pytest.mark.parametrize(
    ("setting", "endpoint", "sent"),
    [
        ("auto", "http://s3.us-east-1.amazonaws.com", True),
        ("auto", "http://store.example", False),
        ("on", "http://store.example", True),
        ("off", "http://s3.us-east-1.amazonaws.com", False),
    ],
)
def test_checksums_go_to_aws_and_to_whom_it_is_told(
    open_s3, server, monkeypatch, setting, endpoint, sent
):
    monkeypatch.setenv("HTTP_PROXY", server.url)
    store = open_s3(endpoint_url=endpoint, checksum=setting)
    for verb in ("put", "put_part", "create_upload"):
        headers = call(store, server, verb).headers
        assert any("checksum" in name.lower() for name in headers) == sent, verb
    assert (b"ChecksumCRC32C" in call(store, server, "complete_upload").body) == sent


# what the answers mean

MEANINGS = {
    ObjectNotFoundError: "404 NoSuchKey, 404 NoSuchUpload, 404",
    BucketNotFoundError: "404 NoSuchBucket, 404 NoSuchAccessPoint",
    AccessDeniedError: (
        "403 AccessDenied, 403 AllAccessDisabled, 403, 403 NotSignedUp, 400 "
        "KMS.AccessDeniedException"
    ),
    CredentialsError: (
        "403 InvalidAccessKeyId, 403 SignatureDoesNotMatch, 403 ExpiredToken, 400 ExpiredToken, "
        "400 InvalidToken, 401, 403 InvalidSecurity"
    ),
    ClockError: "403 RequestTimeTooSkewed, 403 RequestExpired",
    WrongRegionError: (
        "301 PermanentRedirect, 307 TemporaryRedirect, 400 AuthorizationHeaderMalformed, 400 "
        "IllegalLocationConstraintException, 301"
    ),
    PreconditionFailedError: "412 PreconditionFailed, 412",
    ThrottledError: (
        "400 PriorRequestNotComplete, 400 ThrottledException, 400 RequestThrottledException, 400 "
        "BandwidthLimitExceeded, 400 KMS.ThrottlingException, 503 SlowDown, 503 "
        "ServiceUnavailable, 503, 429 TooManyRequests, 429 QuotaExceeded, 429 AccessDenied, 400 "
        "ThrottlingException"
    ),
    ServerError: (
        "400 RequestTimeoutException, 500 InternalFailure, 400 XAmzContentSHA256Mismatch, 500 "
        "KMS.KMSInternalException, 500 KMS.KeyUnavailableException, 503 "
        "KMS.DependencyTimeoutException, 409 ConditionalRequestConflict, 409 OperationAborted, "
        "400 BadDigest, 400 RequestTimeout, 400 IncompleteBody, 500 InternalError, 502, 504"
    ),
    InvalidRequestError: (
        "400 KMS.DisabledException, 400 KMS.InvalidKeyUsageException, 400 "
        "KMS.KMSInvalidStateException, 400 KMS.NotFoundException, 400 EntityTooLarge, 400 "
        "InvalidPart, 400 SomethingNew, 405 MethodNotAllowed, 501 NotImplemented, 403 "
        "InvalidObjectState"
    ),
    RangeNotSatisfiableError: "416 InvalidRange, 416",
    StorageFullError: "507 XMinioStorageFull, 403 QuotaExceeded",
}


@pytest.mark.parametrize(("status", "code", "expected"), answers_of(MEANINGS))
def test_an_answer_of_failure_has_a_name(store, status, code, expected):
    body = error_xml(code, "the vendor's words") if code else b""
    headers = {"x-amz-bucket-region": "eu-west-3"}
    error = store.failure(status, headers, body, "PUT", "s3://bucket/run/object")
    assert type(error) is expected
    assert error.uri == "s3://bucket/run/object"
    for text in (f"HTTP {status}", code, "the vendor's words" if code else ""):
        assert text in str(error)


@pytest.mark.parametrize("before", [b" ", b"\r\n \n"])
def test_white_space_before_the_xml_of_an_answer_does_no_harm(store, server, before):
    """It keeps a connection alive while an upload is completed."""
    declared = before + b'<?xml version="1.0" encoding="UTF-8"?>\n'
    server.answer(body=declared + xml_of("CompleteMultipartUploadResult", ETag='"tag"'))
    assert VERBS["complete_upload"](store).version == '"tag"'
    for status in (200, 400):
        server.answer(status=status, body=declared + error_xml("NoSuchUpload"))
        with pytest.raises(ObjectNotFoundError):
            VERBS["complete_upload"](store)


@pytest.mark.parametrize("status", [409, 200])
def test_a_conflict_of_conditional_requests_means_that_nothing_was_written(store, server, status):
    """A completion may tell it behind the status 200."""
    server.answer(status=status, body=error_xml("ConditionalRequestConflict"))
    with pytest.raises(ServerError, match="not written") as caught:
        VERBS["complete_upload"](store)
    assert caught.value.certain


def redirect(region, status=301, code="PermanentRedirect"):
    return status, {"x-amz-bucket-region": region}, error_xml(code)


# buckets in another region

MALFORMED = (
    b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is "
    b"malformed; the region 'us-east-1' is wrong; expecting 'eu-west-3'</Message>"
    b"<Region>eu-west-3</Region></Error>"
)
ELSEWHERE = {  # as AWS documents them, and as botocore's redirector knows them
    "in the body": (400, {}, MALFORMED),
    "in a header of 400": (400, {"x-amz-bucket-region": "eu-west-3"}, MALFORMED),
    "in a header of 301": redirect("eu-west-3"),
    "in a header of 307": redirect("eu-west-3", 307, "TemporaryRedirect"),
    "for a region to opt in": redirect("eu-west-3", 400, "IllegalLocationConstraintException"),
}


def regions(server):
    return [re.search(r"/([^/]+)/s3/", r.headers["Authorization"])[1] for r in server.requests]


@pytest.mark.parametrize(
    ("verb", "way"),
    [("put", way) for way in ELSEWHERE]
    + [(verb, "in the body") for verb in VERBS if verb not in ("put", "head")],
)
def test_a_request_follows_the_bucket_to_its_region(open_s3, server, verb, way):
    store, (status, headers, body) = open_s3(), ELSEWHERE[way]
    server.answer(status=status, headers=headers, body=body)
    request = call(store, server, verb)
    assert regions(server) == ["us-east-1", "eu-west-3"]
    assert request.body == server.requests[0].body
    call(store, server, "put")
    assert regions(server)[2:] == ["eu-west-3"]


@pytest.mark.parametrize("status", [301, 307, 400])
def test_head_follows_the_bucket_though_its_answer_has_no_body(open_s3, server, status):
    store = open_s3()
    server.answer(status=status, headers={"x-amz-bucket-region": "eu-west-3"})
    assert call(store, server, "head").method == "HEAD"
    assert regions(server) == ["us-east-1", "eu-west-3"]


def test_head_finds_the_region_that_only_another_answer_names(open_s3, server):
    store = open_s3()
    server.answer(server.Answer(400), server.Answer(400, body=MALFORMED))  # to HEAD, to GET
    whole = {"ETag": '"tag"', "Content-Range": "bytes 0-0/9"}
    server.answer(status=206, headers=whole, body=b"d")
    assert store.head("run/object").size == 9
    assert regions(server) == ["us-east-1", "us-east-1", "eu-west-3"]


@pytest.mark.parametrize("region", ["us-east-1", "", "evil.example/", "-", "a" * 64])
def test_a_region_that_leads_nowhere_is_not_followed(open_s3, server, region):
    server.respond(lambda request: server.Answer(*redirect(region)))
    with pytest.raises(WrongRegionError):
        put(open_s3())
    assert len(server.requests) == 1


def test_a_bucket_that_is_always_elsewhere_is_followed_once_a_request(open_s3, server):
    answers = itertools.cycle(["eu-west-3", "us-east-1"])
    server.respond(lambda request: server.Answer(*redirect(next(answers))))
    with pytest.raises(WrongRegionError, match="AWS_REGION=us-east-1") as caught:
        put(open_s3())
    assert caught.value.region == "us-east-1"
    assert pickle.loads(pickle.dumps(caught.value)).region == "us-east-1"
    assert len(server.requests) == 2


@pytest.mark.parametrize("anonymous", [False, True])
def test_on_aws_the_bucket_is_followed_to_another_host(anonymous):
    options = S3Options(region="us-east-1", anonymous=anonymous)
    access = BucketAccess("bucket", Config(s3=options), "s3://bucket")
    urls = [f"{access.base}run/object?partNumber=1", f"{access.bucket_url}?delete"]

    def sent(url):
        return access.authorize(Request("GET", url, {}), {}, *access.credentials.get())

    assert [sent(url)[0] for url in urls] == urls
    assert access.follow("eu-west-3", *sent(urls[0]))
    host = "https://bucket.s3.eu-west-3.amazonaws.com/"
    assert [sent(url)[0] for url in urls] == [
        f"{host}run/object?partNumber=1",
        f"{host}?delete",
    ]
    assert access.region == "eu-west-3"
    assert not access.follow("eu-west-3", *sent(urls[0]))


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_404_whose_page_is_cut_off_does_not_say_that_there_is_no_object(store, server, framing):
    cut = {"size": 300, "framing": framing, "unfinished": True, "hang_up": True}
    server.respond(lambda request: server.Answer(404, **cut))
    for look in (store.get, store.head, store.delete):
        with pytest.raises(ConnectionLostError):
            look("run/.metadata")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "NoSuchKey", ObjectNotFoundError),
        (404, "NoSuchBucket", BucketNotFoundError),
        (403, "AccessDenied", AccessDeniedError),
        (403, "ExpiredToken", CredentialsError),
        (503, "SlowDown", ThrottledError),
    ],
)
def test_head_finds_out_the_reason_that_its_answer_does_not_tell(
    store, server, status, code, expected
):
    server.respond(lambda request: server.Answer(status, body=error_xml(code)))
    with pytest.raises(StoreError) as caught:
        store.head("run/object")
    assert isinstance(caught.value, expected)


@pytest.mark.parametrize("code", ["InternalError", "SlowDown"])
def test_a_completion_that_fails_behind_status_200_is_transient(store, server, code):
    server.answer(status=200, body=b'<?xml version="1.0" encoding="UTF-8"?>\n' + error_xml(code))
    with pytest.raises(TransientStoreError):
        VERBS["complete_upload"](store)


@pytest.mark.parametrize(("span", "body"), [("5-8/9", b"data"), ("0-1/9", b"da"), ("0-8/9", b"")])
def test_other_bytes_than_were_asked_for_say_nothing_of_the_object(store, server, span, body):
    headers = {"ETag": '"tag"', "Content-Range": f"bytes {span}"}
    server.answer(status=206, headers=headers, body=body)
    with pytest.raises(ServerError, match="the store offered bytes"):
        get_range(store)


# answers that leave something out

PARTS = [Part(number, 4, f'"{number}"', CRC) for number in (1, 2)]
NAMED = dataclasses.replace(UPLOAD, attempt="0123456789abcdef")
SILENT = [
    xml_of("CompleteMultipartUploadResult", Key="run/object", ETag=""),
    xml_of("CompleteMultipartUploadResult", Key="run/object"),
    b"",
    b"  \n",
]


@pytest.mark.parametrize("answer", SILENT)
def test_a_completion_that_names_no_etag_proves_nothing(store, server, answer):
    server.answer(body=answer)
    with pytest.raises(ConnectionLostError, match="no ETag") as caught:
        store.complete_upload(NAMED, PARTS)
    assert not caught.value.certain


def test_a_store_that_ignores_a_range_is_asked_again(store, server):
    whole = {"status": 200, "headers": {"ETag": '"tag"'}, "body": b"another length"}
    server.answer(**whole)
    server.answer(**whole)
    server.answer(**S3.answers["get_range"])
    retrier = Retrier(RetryPolicy(attempts=3, base=0.0, cap=0.0))
    assert retrier.call(lambda: get_range(store)) == b"data"


def test_a_store_that_always_ignores_ranges_is_named(store, server):
    server.answer(status=200, headers={"ETag": '"tag"'}, body=b"another length")
    with pytest.raises(ServerError, match="ignored the Range header"):
        get_range(store)


def test_a_range_that_is_the_whole_object_may_come_as_such(store, server):
    server.answer(status=200, headers={"ETag": '"tag"'}, body=b"data")
    assert get_range(store) == b"data"


@pytest.mark.parametrize("content_range", [None, "bytes 0-3/*", "nonsense"])
def test_an_unusable_content_range_is_a_broken_answer(store, server, content_range):
    headers = {"ETag": '"tag"'} | ({"Content-Range": content_range} if content_range else {})
    server.answer(status=206, headers=headers, body=b"data")
    with pytest.raises(TransientStoreError):
        get_range(store)


@pytest.mark.parametrize(
    "answer",
    [
        {"body": b""},
        {"body": b"", "size": 300, "hang_up": True},
        {"body": xml_of("CompleteMultipartUploadResult")},
        {"body": b"   \n", "size": 500, "hang_up": True},
        {"body": b'<?xml version="1.0"?>\n  ', "size": 500, "hang_up": True},
        {"body": b"<CompleteMultip", "size": 500, "hang_up": True},
    ],
)
def test_a_completion_without_a_result_or_with_a_part_of_it_is_transient(store, server, answer):
    server.answer(**answer)
    with pytest.raises(TransientStoreError):
        VERBS["complete_upload"](store)


# conditions


def test_a_version_that_is_gone_is_a_failed_condition_on_aws(open_s3, server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", server.url)
    store = open_s3(endpoint_url="http://s3.us-east-1.amazonaws.com")
    server.respond(lambda request: server.Answer(412, body=error_xml("PreconditionFailed")))
    with pytest.raises(PreconditionFailedError):
        put(store, if_version='"old"')
    assert [request.headers["If-Match"] for request in server.requests] == ['"old"']
