"""The S3 store: what it sends, and what it makes of the answers.

What moto does not show (errors, signatures, headers) is tested against the scripted stub of
``conftest.py``, the rest against moto.
"""

import itertools
import pickle
import re

import pytest

from cloudckpt import Config, S3Options, errors
from cloudckpt.stores.base import Part
from cloudckpt.stores.s3.access import BucketAccess
from support.dialects import (
    S3,
    error_xml,
    get_range,
    one_stub,  # noqa: F401 - a fixture
    put,
    xml_of,
)

UPLOAD, VERBS, call = S3.upload, S3.verbs, S3.call


@pytest.fixture(scope="module")
def store(stub):
    store = S3.open(stub.url)
    yield store
    store.close()


@pytest.mark.parametrize("storage_class", ["GLACIER", "DEEP_ARCHIVE"])
def test_a_storage_class_that_can_not_be_loaded_from_is_refused_on_aws(open_s3, storage_class):
    with pytest.raises(errors.ConfigError, match=f"storage_class='{storage_class}'"):
        open_s3(storage_class=storage_class, endpoint_url=None)
    open_s3(storage_class=storage_class)  # on others it may be the name of any class


# what the answers mean


@pytest.mark.parametrize("before", [b" ", b"\r\n \n"])
def test_white_space_before_the_xml_of_an_answer_does_no_harm(store, server, before):
    """It keeps a connection alive while an upload is completed."""
    declared = before + b'<?xml version="1.0" encoding="UTF-8"?>\n'
    server.answer(body=declared + xml_of("CompleteMultipartUploadResult", ETag='"tag"'))
    assert VERBS["complete_upload"](store).version == '"tag"'
    for status in (200, 400):
        server.answer(status=status, body=declared + error_xml("NoSuchUpload"))
        with pytest.raises(errors.ObjectNotFoundError, match="upload does not exist any more"):
            VERBS["complete_upload"](store)


@pytest.mark.parametrize("status", [409, 200])
def test_a_conflict_of_conditional_requests_means_that_nothing_was_written(store, server, status):
    """A completion may tell it behind the status 200."""
    server.answer(status=status, body=error_xml("ConditionalRequestConflict"))
    with pytest.raises(errors.ServerError, match="not written") as caught:
        VERBS["complete_upload"](store)
    assert caught.value.certain


def test_a_store_that_completes_nothing_on_a_condition_is_told_so(store, server):
    answer = {"status": 501, "body": error_xml("NotImplemented")}
    for version, words in (('"old"', "conditional_writes='off'"), ("", "off"), (None, "rejects")):
        server.answer(**answer)
        with pytest.raises(errors.InvalidRequestError, match=words) as caught:
            store.complete_upload(UPLOAD, [Part(1, 4, '"tag"', None)], if_version=version)
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
    + [("head", way) for way in ELSEWHERE if way != "in the body"]  # whose answer has none
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
    with pytest.raises(errors.WrongRegionError):
        put(open_s3())
    assert len(server.requests) == 1


def test_a_bucket_that_is_always_elsewhere_is_followed_once_a_request(open_s3, server):
    answers = itertools.cycle(["eu-west-3", "us-east-1"])
    server.respond(lambda request: server.Answer(*redirect(next(answers))))
    with pytest.raises(errors.WrongRegionError, match="region is us-east-1") as caught:
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
        return access.authorize("GET", url, {}, (), access.credentials.get())

    assert [sent(url)[0] for url in urls] == urls
    assert access.follow("eu-west-3", *sent(urls[0]))
    host = "https://bucket.s3.eu-west-3.amazonaws.com/"
    assert [sent(url)[0] for url in urls] == [f"{host}run/object?partNumber=1", f"{host}?delete"]
    assert access.region == "eu-west-3"
    assert not access.follow("eu-west-3", *sent(urls[0]))


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("status", [404, 400])
def test_a_refusal_that_is_cut_off_says_nothing(store, server, framing, status):
    """Neither that there is no object, nor that the request can't be sent again."""
    cut = {"size": 300, "framing": framing, "unfinished": True, "hang_up": True}
    server.respond(lambda request: server.Answer(status, **cut))
    for look in (store.get, store.head, store.delete):
        with pytest.raises(errors.ConnectionLostError):
            look("run/.metadata")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "NoSuchKey", errors.ObjectNotFoundError),
        (404, "NoSuchBucket", errors.BucketNotFoundError),
        (403, "AccessDenied", errors.AccessDeniedError),
        (403, "ExpiredToken", errors.CredentialsError),
        (503, "SlowDown", errors.ThrottledError),
    ],
)
def test_head_finds_out_the_reason_that_its_answer_does_not_tell(
    store, server, status, code, expected
):
    server.respond(lambda request: server.Answer(status, body=error_xml(code)))
    with pytest.raises(errors.StoreError) as caught:
        store.head("run/object")
    assert isinstance(caught.value, expected)


# answers that leave something out


@pytest.mark.parametrize(
    ("status", "span", "body"),
    [
        (206, "bytes 5-8/9", b"data"),
        (206, "bytes 0-1/9", b"da"),
        (206, "bytes 0-8/9", b""),
        (206, None, b"data"),
        (206, "bytes 0-3/*", b"data"),
        (206, "nonsense", b"data"),
        (200, None, b"another length"),
    ],
)
def test_other_bytes_than_were_asked_for_are_asked_for_again(store, server, status, span, body):
    headers = {"ETag": '"tag"'} | ({"Content-Range": span} if span else {})
    server.answer(status=status, headers=headers, body=body)
    with pytest.raises(errors.TransientStoreError):
        get_range(store)


def test_a_range_that_is_the_whole_object_may_come_as_such(store, server):
    server.answer(status=200, headers={"ETag": '"tag"'}, body=b"data")
    assert get_range(store) == b"data"


@pytest.mark.parametrize(
    "answer",
    [
        {"body": b""},
        {"body": b"  \n"},
        {"body": xml_of("CompleteMultipartUploadResult")},
        {"body": xml_of("CompleteMultipartUploadResult", Key="run/object", ETag="")},
        {"body": b'<?xml version="1.0" encoding="UTF-8"?>\n' + error_xml("InternalError")},
        {"body": b"   \n", "size": 500, "hang_up": True},
        {"body": b"<CompleteMultip", "size": 500, "hang_up": True},
    ],
)
def test_a_completion_without_its_result_proves_nothing(store, server, answer):
    server.answer(**answer)
    with pytest.raises(errors.TransientStoreError) as caught:
        VERBS["complete_upload"](store)
    assert not caught.value.certain
