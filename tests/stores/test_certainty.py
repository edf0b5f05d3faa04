"""Which answers are the store's own word that a request was not carried out, and which are not."""

import json
import pickle

import pytest

from cloudckpt.checksum import CRC32C
from cloudckpt.config import Config, S3Options
from cloudckpt.errors import ConnectionLostError, CredentialsError, StoreError, TransientStoreError
from cloudckpt.stores.azure import errors as azure_errors
from cloudckpt.stores.gcs import errors as gcs_errors
from cloudckpt.stores.s3 import errors as s3_errors
from cloudckpt.stores.s3.access import BucketAccess
from cloudckpt.stores.s3.store import S3Store
from support.emulators import free_port
from support.wire.faults import Reset
from support.wire.proxy import FaultyProxy

HTML = b"<html><head><title>Access Denied</title></head><body><h1>Denied</h1></body></html>"


def xml(code: str, root: str = "Error") -> bytes:
    return f'<?xml version="1.0"?>\n<{root}><Code>{code}</Code></{root}>'.encode()


def google(status: int, reason: str) -> bytes:
    errors = [{"domain": "global", "reason": reason, "message": "text"}]
    return json.dumps({"error": {"code": status, "message": "text", "errors": errors}}).encode()


S3, GCS, AZURE = s3_errors.from_answer, gcs_errors.from_answer, azure_errors.from_answer


@pytest.mark.parametrize(
    ("read", "status", "headers", "body"),
    [
        (S3, 412, {}, xml("PreconditionFailed")),
        (S3, 403, {}, xml("AccessDenied")),
        (S3, 404, {}, xml("NoSuchBucket")),
        (S3, 409, {}, xml("ConditionalRequestConflict")),
        (S3, 400, {}, xml("BadDigest")),
        (S3, 400, {}, xml("KMS.DisabledException")),
        (S3, 301, {}, xml("PermanentRedirect")),
        (S3, 503, {}, xml("SlowDown")),
        (S3, 503, {}, xml("ServiceUnavailable")),
        (S3, 429, {}, xml("TooManyRequests")),
        (S3, 507, {}, xml("XMinioStorageFull")),
        (S3, 501, {}, xml("NotImplemented")),
        (GCS, 412, {}, google(412, "conditionNotMet")),
        (GCS, 403, {}, google(403, "forbidden")),
        (GCS, 429, {}, google(429, "rateLimitExceeded")),
        (GCS, 503, {}, google(503, "backendError")),
        (GCS, 412, {}, xml("PreconditionFailed")),
        (GCS, 503, {}, xml("ServiceUnavailable")),
        (
            GCS,
            412,
            {},
            b'{"error": {"code": 412, "message": "text", "status": "FAILED_PRECONDITION"}}',
        ),
        (AZURE, 412, {"x-ms-error-code": "ConditionNotMet"}, b""),
        (AZURE, 409, {}, xml("BlobAlreadyExists")),
        (AZURE, 403, {"x-ms-error-code": "AuthorizationFailure"}, HTML),
        (AZURE, 503, {"x-ms-error-code": "ServerBusy"}, b""),
        (AZURE, 409, {"x-ms-error-code": "SomethingNew"}, b""),
    ],
)
def test_a_refusal_in_the_words_of_the_vendor_is_certain(read, status, headers, body):
    error = read(status, headers, body, "PUT", "x://bucket/key")
    assert error.certain
    assert pickle.loads(pickle.dumps(error)).certain


@pytest.mark.parametrize(
    ("read", "status", "headers", "body"),
    [
        (S3, 500, {}, xml("InternalError")),
        (S3, 400, {}, xml("RequestTimeout")),
        (S3, 400, {}, xml("RequestTimeoutException")),
        (S3, 503, {}, xml("SomethingNew")),
        (S3, 503, {}, b"upstream connect error or disconnect/reset before headers"),
        (S3, 503, {}, b""),
        (S3, 502, {}, HTML),
        (S3, 403, {}, HTML),
        (S3, 412, {}, HTML),
        (S3, 412, {}, b""),
        (S3, 503, {}, xml("SlowDown", root="fault")),
        (S3, 403, {}, xml("403")),
        (S3, 403, {}, xml("")),
        (S3, 503, {}, xml("SlowDown")[:-4]),
        (S3, 503, {"x-ms-error-code": "ServerBusy"}, b""),
        (S3, 429, {}, google(429, "rateLimitExceeded")),
        (GCS, 500, {}, google(500, "backendError")),
        (GCS, 408, {}, google(408, "requestTimeout")),
        (GCS, 503, {}, b'{"code": 503, "message": "no healthy upstream"}'),
        (GCS, 503, {}, b'{"error": "rateLimitExceeded"}'),
        (GCS, 429, {}, b"rateLimitExceeded"),
        (GCS, 503, {}, HTML),
        (GCS, 412, {}, b"Precondition Failed"),
        (AZURE, 500, {"x-ms-error-code": "OperationTimedOut"}, b""),
        (AZURE, 503, {"x-ms-error-code": "OperationTimedOut"}, b""),
        (AZURE, 500, {"x-ms-error-code": "InternalError"}, b""),
        (AZURE, 503, {}, HTML),
        (AZURE, 412, {}, b""),
        (AZURE, 409, {"x-ms-error-code": "409"}, b""),
    ],
)
def test_what_a_gateway_may_have_said_or_has_begun_is_not_certain(read, status, headers, body):
    error = read(status, headers, body, "PUT", "x://bucket/key")
    assert not error.certain
    assert not pickle.loads(pickle.dumps(error)).certain


@pytest.mark.parametrize("read", [S3, GCS, AZURE])
@pytest.mark.parametrize("status", [408, 421, 425, 499, 500, 502, 504])
def test_what_a_gateway_says_of_its_own_troubles_is_tried_again(read, status):
    error = read(status, {}, HTML, "PUT", "s3://bucket/key")
    assert isinstance(error, TransientStoreError)
    assert not error.certain


@pytest.mark.parametrize("read", [S3, GCS, AZURE])
def test_a_proxy_that_asks_for_a_password_is_named(read):
    error = read(407, {}, HTML, "PUT", "s3://bucket/key")
    assert not isinstance(error, TransientStoreError)
    assert "a proxy requires a user" in str(error)


def test_an_error_is_not_certain_unless_it_says_so():
    assert not StoreError("text").certain


def put_to(url: str) -> StoreError:
    """What an attempt to write an object there fails with."""
    s3 = S3Options(endpoint_url=url, addressing_style="path")
    store = S3Store("bucket", Config(s3=s3, connect_timeout=5.0, read_timeout=5.0))
    try:
        with pytest.raises(StoreError) as caught:
            store.put("key", [memoryview(b"data")], checksum=CRC32C.of(b"data"))
    finally:
        store.close()
    return caught.value


def test_what_reached_nobody_is_certain():
    error = put_to(f"http://127.0.0.1:{free_port()}")
    assert isinstance(error, ConnectionLostError)
    assert error.certain


def test_what_could_not_be_signed_is_certain(s3_url, monkeypatch):
    """Credentials that were there at first could not be renewed."""

    def sign(*_):
        raise CredentialsError("they have expired")

    monkeypatch.setattr(BucketAccess, "authorize", sign)
    error = put_to(s3_url)
    assert isinstance(error, CredentialsError)
    assert error.certain


def test_what_was_sent_and_not_answered_is_not_certain(s3_url):
    with FaultyProxy(s3_url) as proxy:
        proxy.inject(Reset("request"))
        error = put_to(proxy.url)
    assert isinstance(error, ConnectionLostError)
    assert not error.certain
