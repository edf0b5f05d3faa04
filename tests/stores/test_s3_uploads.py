"""What S3 and its like make of an upload: whose checksum, and whether it is there after all.

The scripted stub of ``conftest.py`` imitates what the vendors document and moto does not do; moto
stands behind a proxy that loses answers.
"""

import xml.etree.ElementTree as ElementTree

import pytest

from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.config import MIB
from cloudckpt.errors import StoreError
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.stores.s3.dialects import AWS, DIALECTS
from support.contract.data import put, put_part
from support.dialects import xml_of

KEY = "run/object"
PIECES = (b"first part", b"the last part")
DATA = b"".join(PIECES)


WHOLE = to_base64(CRC32C.of(DATA))
FOUND = ObjectInfo(KEY, len(DATA), '"opaque"')


SESSION = xml_of(
    "CreateSessionResult",
    Credentials="<AccessKeyId>key</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>"
    "<SessionToken>token</SessionToken><Expiration>2100-01-01T00:00:00Z</Expiration>",
)  # of a directory bucket


# whose checksum


@pytest.fixture
def uploads(server):
    """A store that takes uploads, and echoes what checksums they are to have, as AWS does; what
    began them, and what completed them."""
    begun, completed = [], []

    def respond(request):
        if request.target.endswith("?session"):
            return server.Answer(body=SESSION)
        if request.target.endswith("?uploads"):
            begun.append(request)
            names = ("x-amz-checksum-algorithm", "x-amz-checksum-type")
            told = {name: request.headers[name] for name in names if name in request.headers}
            return server.Answer(200, told, xml_of("InitiateMultipartUploadResult", UploadId="i"))
        if request.method == "PUT":
            return server.Answer(headers={"ETag": '"tag"'})
        completed.append(request)
        return server.Answer(body=xml_of("CompleteMultipartUploadResult", ETag='"tag"'))

    server.respond(respond)
    return begun, completed


def send(store, key=KEY):
    upload = store.create_upload(key, len(PIECES[0]))
    parts = [put_part(store, upload, number, piece) for number, piece in enumerate(PIECES, 1)]
    return store.complete_upload(upload, parts)


def test_aws_gets_checksums_of_the_whole(open_s3, uploads):
    send(open_s3(dialect="aws"))
    [begun], [completed] = uploads
    assert begun.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    assert completed.headers["x-amz-checksum-crc32c"] == WHOLE
    assert completed.headers["x-amz-checksum-type"] == "FULL_OBJECT"


@pytest.mark.parametrize("dialect", [name for name, row in DIALECTS.items() if row is not AWS])
def test_all_others_get_those_of_the_parts(open_s3, server, uploads, dialect):
    """Cloudflare R2 documents FULL_OBJECT for CRC64NVME only and COMPOSITE for CRC32C
    (https://developers.cloudflare.com/r2/api/s3/api/#checksum-types). MinIO before 2025 rejects
    a checksum of the whole at the end (https://github.com/minio/minio/issues/20944)."""
    send(open_s3(checksum="on", dialect=dialect))
    [begun], [completed] = uploads
    wanted = [to_base64(CRC32C.of(piece)) for piece in PIECES]
    assert begun.headers["x-amz-checksum-type"] == "COMPOSITE"
    sent = [request for request in server.requests if request.method == "PUT"]
    assert [request.headers["x-amz-checksum-crc32c"] for request in sent] == wanted
    assert not [name for name in completed.headers if name.startswith("x-amz-checksum")]
    listed = ElementTree.fromstring(completed.body).iter("ChecksumCRC32C")
    assert [entry.text for entry in listed] == wanted


# the checksum of an object

TOLD = {"ETag": '"opaque"', "x-amz-checksum-crc32c": to_base64(7)}


def test_the_checksum_that_the_store_keeps_of_a_whole_object_is_not_computed(open_s3, server):
    server.answer(headers={**TOLD, "x-amz-checksum-type": "FULL_OBJECT"}, size=len(DATA))
    assert open_s3(checksum="on").checksum_of(FOUND) == 7
    [request] = server.requests
    assert (request.method, request.headers["x-amz-checksum-mode"]) == ("HEAD", "ENABLED")
    assert request.headers["If-Match"] == '"opaque"'


@pytest.mark.parametrize(
    ("checksum", "told"),
    [
        ("on", {**TOLD, "x-amz-checksum-type": "COMPOSITE"}),
        ("on", {**TOLD, "x-amz-checksum-crc32c": f"{to_base64(7)}-2"}),
        ("on", TOLD),  # of who knows what
        ("on", {"ETag": '"opaque"', "x-amz-checksum-crc64nvme": "AAAAAAAAAAA="}),
        ("on", 400),  # keys that expired, for example: the GET says so
        ("on", 403),
        ("off", {}),
    ],
)
def test_the_checksum_of_another_object_is_computed(open_s3, server, checksum, told):
    if isinstance(told, int):
        server.answer(status=told)
    elif checksum == "on":
        server.answer(headers=told, size=len(DATA))
    span = {"Content-Range": f"bytes 0-{len(DATA) - 1}/{len(DATA)}", "ETag": '"opaque"'}
    server.answer(status=206, headers=span, body=DATA)
    assert open_s3(checksum=checksum).checksum_of(FOUND) == CRC32C.of(DATA)
    assert server.requests[-1].headers["If-Match"] == '"opaque"'


# what only AWS promises


def test_aws_creates_or_replaces_one_version_where_that_is_asked_for(
    open_s3, server, uploads, monkeypatch
):
    """A policy may demand it: https://docs.aws.amazon.com/AmazonS3/latest/userguide/
    conditional-writes-enforce.html; parts and the beginning of an upload take no conditions."""
    monkeypatch.setenv("HTTP_PROXY", server.url)
    store = open_s3(endpoint_url="http://s3.us-east-1.amazonaws.com", addressing_style="path")
    assert store.capabilities.create_only
    put(store, KEY, b"data", if_version="")
    upload = store.create_upload(KEY, 5 * MIB)
    part = put_part(store, upload, 1, b"data")
    for version in ("", '"old"'):
        store.complete_upload(upload, [part], if_version=version)
    names = ("If-None-Match", "If-Match")
    conditions = [tuple(map(request.headers.get, names)) for request in server.requests]
    none = (None, None)
    assert conditions == [("*", None), none, none, ("*", None), (None, '"old"')]


# which bucket

POINT = "arn:aws:s3:eu-west-1:123456789012:accesspoint/point"


def test_an_access_point_is_addressed_as_boto3_does(open_s3, server, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", server.url)  # the stub sees whom to connect to
    server.answer(status=502)
    store = open_s3(POINT, endpoint_url=None)
    assert store.capabilities.conditional_writes is True
    with pytest.raises(StoreError) as caught:
        store.head("run/object")
    assert caught.value.uri == f"s3://{POINT}/run/object"
    host = "point-123456789012.s3-accesspoint.eu-west-1.amazonaws.com"
    assert {request.target for request in server.requests} == {f"{host}:443"}
