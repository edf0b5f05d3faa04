"""How copies are asked for in the dialect of each cloud, and what is made of the answers.

Against the scripted stub of ``conftest.py``, where no emulator does what the cloud documents; the
contract of copies is tested against moto, Azurite and the stub of Google's service.
"""

import re

import pytest

from cloudckpt import AzureOptions, Config, GCSOptions
from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.errors import (
    AccessDeniedError,
    ConnectionLostError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ServerError,
    ThrottledError,
)
from cloudckpt.stores.azure.store import AzureStore
from cloudckpt.stores.base import ObjectInfo, Upload
from cloudckpt.stores.gcs.store import GCSStore
from support.contract.data import put, some_bytes
from support.dialects import error_xml, xml_of
from support.stubs.gcs import GcsStub

FOUND = ObjectInfo("run/a b", 100, '"etag"')
CRC = to_base64(CRC32C.of(b"x"))
UPLOAD = Upload("run/copy", "0123456789abcdef", 5 << 20)


VERBS = {
    "copy": lambda store: store.copy(store, FOUND, "run/copy"),
    "copy_part": lambda store: store.copy_part(store, FOUND, UPLOAD, 1, 0, 10),
}


@pytest.fixture
def open_azure(server, opened, azure_key):
    """As an emulator has it, with the account in the path."""

    def open_one(container="container", **options):
        values = {"endpoint_url": f"{server.url}/account", **options}
        return opened(AzureStore(container, Config(azure=AzureOptions(**values))))

    return open_one


# S3


@pytest.mark.parametrize(
    ("code", "error", "certain"),
    [
        ("SlowDown", ThrottledError, False),
        ("InternalError", ServerError, False),
        ("PreconditionFailed", PreconditionFailedError, True),
        ("AccessDenied", AccessDeniedError, True),
        ("NoSuchKey", ObjectNotFoundError, True),
        ("KMS.DisabledException", InvalidRequestError, True),
    ],
)
@pytest.mark.parametrize("verb", ["copy", "copy_part"])
def test_an_error_in_the_body_of_a_success_is_raised(server, open_s3, verb, code, error, certain):
    store = open_s3()
    server.respond(lambda request: server.Answer(body=b"  " + error_xml(code)))
    with pytest.raises(error, match="run/a b") as caught:
        VERBS[verb](store)
    assert caught.value.certain is certain
    assert caught.value.uri == "s3://bucket/run/copy"


@pytest.mark.parametrize("body", [b"<html>a proxy's page", b"CopyObjectResult", b"\x00"])
def test_an_answer_that_is_none_leaves_open_whether_s3_has_copied(server, open_s3, body):
    server.answer(body=body)
    with pytest.raises(ServerError) as caught:
        open_s3().copy(open_s3(), FOUND, "run/copy")
    assert not caught.value.certain


def test_a_checksum_that_is_made_of_those_of_parts_is_not_taken_for_the_copys(server, open_s3):
    for told in (
        {"ChecksumCRC32C": f"{CRC}-2"},
        {"ChecksumCRC32C": CRC, "ChecksumType": "COMPOSITE"},
    ):
        server.answer(body=xml_of("CopyObjectResult", ETag='"new"', **told))
        assert open_s3().copy(open_s3(), FOUND, "run/copy").checksum is None


# Azure


@pytest.mark.parametrize("verb", ["copy", "copy_part"])
def test_no_signature_is_shown_when_azure_refuses(server, open_azure, verb):
    store = open_azure()
    server.answer(status=412, headers={"x-ms-error-code": "SourceConditionNotMet"})
    with pytest.raises(PreconditionFailedError, match="run/a b") as caught:
        VERBS[verb](store)
    signature = re.search(r"sig=([^&]+)", server.requests[0].headers["x-ms-copy-source"])[1]
    shown, error = "", caught.value
    while error is not None:
        shown, error = f"{shown} {error!r} {error}", error.__cause__ or error.__context__
    assert signature not in shown


# Google


@pytest.fixture
def google():
    with GcsStub("bucket", "other") as stub:
        yield stub


@pytest.fixture
def open_gcs(google, opened):
    def open_one(bucket="bucket", **options):
        options = GCSOptions(endpoint_url=google.url, **options)
        return opened(GCSStore(bucket, Config(gcs=options)))

    return open_one


def calls_of_rewrite(google):
    return [r for r in google.state.requests if "/rewriteTo/" in r.path]


def test_a_copy_that_takes_several_calls_goes_on_until_it_is_done(google, open_gcs):
    store, data = open_gcs(), some_bytes(1000)
    google.state.rewritten = 300
    found = put(store, "source", data)
    assert store.copy(store, found, "copy").size == 1000
    assert google.state.find("bucket", "copy").data == data
    assert len(calls_of_rewrite(google)) == 4


def test_a_copy_that_is_tried_again_goes_on_where_it_was(google, open_gcs):
    store, data = open_gcs(), some_bytes(1000)
    google.state.rewritten = 300
    found = put(store, "source", data)
    google.state.inject(lambda r: r.query.get("rewriteToken") == "600", None)
    with pytest.raises(ConnectionLostError):
        store.copy(store, found, "copy")
    assert store.copy(store, found, "copy").checksum == CRC32C.of(data)
    tokens = [r.query.get("rewriteToken") for r in calls_of_rewrite(google)]
    assert tokens == [None, "300", "600", "600", "900"]
