"""How copies are asked for in the dialect of each cloud, and what is made of the answers.

Against the scripted stub of ``conftest.py``, where no emulator does what the cloud documents; the
contract of copies is tested against moto, Azurite and the stub of Google's service.
"""

import re

import pytest

from cloudckpt import errors
from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.stores.base import CopySource, ObjectInfo, Upload
from support.dialects import error_xml, xml_of

FOUND = ObjectInfo("run/a b", 100, '"etag"')
CRC = to_base64(CRC32C.of(b"x"))
UPLOAD = Upload("run/copy", "0123456789abcdef", 5 << 20)


VERBS = {
    "copy": lambda store: store.copy(CopySource(store, FOUND), "run/copy"),
    "copy_part": lambda store: store.copy_part(CopySource(store, FOUND), UPLOAD, 1, 0, 10),
}


# S3


@pytest.mark.parametrize(
    ("code", "error", "certain"),
    [
        ("SlowDown", errors.ThrottledError, False),
        ("InternalError", errors.ServerError, False),
        ("PreconditionFailed", errors.PreconditionFailedError, True),
        ("AccessDenied", errors.AccessDeniedError, True),
        ("NoSuchKey", errors.ObjectNotFoundError, True),
        ("KMS.DisabledException", errors.InvalidRequestError, True),
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
    with pytest.raises(errors.ServerError) as caught:
        open_s3().copy(CopySource(open_s3(), FOUND), "run/copy")
    assert not caught.value.certain


def test_a_checksum_that_is_made_of_those_of_parts_is_not_taken_for_the_copys(server, open_s3):
    for told in (
        {"ChecksumCRC32C": f"{CRC}-2"},
        {"ChecksumCRC32C": CRC, "ChecksumType": "COMPOSITE"},
    ):
        server.answer(body=xml_of("CopyObjectResult", ETag='"new"', **told))
        assert open_s3().copy(CopySource(open_s3(), FOUND), "run/copy").checksum is None


# Azure


@pytest.mark.parametrize("verb", ["copy", "copy_part"])
def test_no_signature_is_shown_when_azure_refuses(server, open_azure, verb):
    store = open_azure(endpoint_url=f"{server.url}/account")
    server.answer(status=412, headers={"x-ms-error-code": "SourceConditionNotMet"})
    with pytest.raises(errors.PreconditionFailedError, match="run/a b") as caught:
        VERBS[verb](store)
    signature = re.search(r"sig=([^&]+)", server.requests[0].headers["x-ms-copy-source"])[1]
    shown, error = "", caught.value
    while error is not None:
        shown, error = f"{shown} {error!r} {error}", error.__cause__ or error.__context__
    assert signature not in shown
