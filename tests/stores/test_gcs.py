"""Google's store: what it sends, and what it makes of the answers.

Who asks, and for what, is tested against the scripted stub of ``conftest.py``.
``test_gcs_contract`` has a stub that behaves as a bucket does.
"""

import dataclasses
import json
from urllib.parse import unquote, urlsplit

import pytest

from cloudckpt import errors
from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.stores.base import ObjectInfo, Part
from support.dialects import (
    CRC,
    GOOGLE,
    KEYS,
    VERSION,
    error_json,
    one_stub,  # noqa: F401 - a fixture
    put,
    query_of,
    resource,
    xml_of,
)

UPLOAD, VERBS, call = GOOGLE.upload, GOOGLE.verbs, GOOGLE.call


@pytest.fixture(scope="module")
def store(stub):
    store = GOOGLE.open(stub.url)
    yield store
    store.close()


NO_BUCKET = "The specified bucket does not exist."


# where requests go, and what they carry


@pytest.mark.parametrize("key", [*KEYS, "x/", "back\\slash"])
def test_a_key_is_one_segment_of_the_json_api_and_a_path_of_the_xml_api(store, server, key):
    upload = dataclasses.replace(UPLOAD, key=key)
    for verb, function in {
        "head": lambda: store.head(key),
        "put": lambda: put(store, key),
        "put_part": lambda: store.put_part(upload, 1, [memoryview(b"data")], checksum=CRC),
        "delete": lambda: store.delete(key),
    }.items():
        server.answer(**GOOGLE.answers[verb])
        function()
    head, inserting, part, deletion = server.requests
    segment = urlsplit(head.target).path.removeprefix("/storage/v1/b/bucket/o/")
    assert (unquote(segment), "/" in segment) == (key, False)
    assert query_of(inserting)["name"] == key
    assert unquote(urlsplit(part.target).path) == f"/bucket/{key}"
    assert urlsplit(deletion.target).path == urlsplit(head.target).path


def test_another_version_than_the_one_asked_for_is_refused(store, server):
    with pytest.raises(errors.PreconditionFailedError):
        call(store, server, "get_range", if_version="5")


# multipart uploads


def test_the_checksum_of_a_completed_object_is_compared_with_its_parts(store, server):
    first, last = b"first part", b"the last part"
    parts = [Part(n, len(d), f'"{n}"', CRC32C.of(d)) for n, d in enumerate((first, last), 1)]
    whole = f"md5=xxx,crc32c={to_base64(CRC32C.of(first + last))}"
    headers = {"x-goog-generation": VERSION, "x-goog-hash": whole}
    server.answer(headers=headers, body=xml_of("CompleteMultipartUploadResult", ETag='"x"'))
    info = store.complete_upload(UPLOAD, parts)
    assert (info.key, info.size, info.version) == ("run/object", 23, VERSION)
    assert query_of(server.requests[0]) == {"uploadId": UPLOAD.id}


def test_what_the_answer_to_a_completion_lacks_is_asked_for(store, server):
    server.answer(body=xml_of("CompleteMultipartUploadResult", ETag='"x"'))
    server.answer(body=resource())  # encrypted with a key of the customer's: no hash above
    info = VERBS["complete_upload"](store)
    assert (info.size, info.version) == (4, VERSION)
    assert urlsplit(server.requests[1].target).path == "/storage/v1/b/bucket/o/run%2Fobject"


@pytest.mark.parametrize("found", [{"crc": CRC + 1}, {"size": 5}])
def test_an_object_that_was_put_together_wrongly_is_deleted(store, server, found):
    server.answer(body=xml_of("CompleteMultipartUploadResult", ETag='"x"'))
    for _ in range(2):  # what was made, and whether it is still there
        server.answer(body=resource(**found))
    server.answer(status=204)
    with pytest.raises(errors.StoreError, match="incorrectly") as caught:
        VERBS["complete_upload"](store)
    assert not isinstance(caught.value, errors.TransientStoreError)
    assert caught.value.uri == "gs://bucket/run/object"
    deletion = server.requests[-1]
    path = urlsplit(deletion.target).path
    assert (deletion.method, path) == ("DELETE", "/storage/v1/b/bucket/o/run%2Fobject")
    assert query_of(deletion)["ifGenerationMatch"] == VERSION


def test_an_object_that_another_writer_has_replaced_at_once_stays(store, server):
    server.answer(body=xml_of("CompleteMultipartUploadResult", ETag='"x"'))
    theirs = resource(size=9, metadata={"cloudckptattempt": "fedcba9876543210"})
    server.respond(lambda request: server.Answer(body=theirs))
    with pytest.raises(errors.PreconditionFailedError, match="another writer") as caught:
        VERBS["complete_upload"](store)
    assert not caught.value.certain
    assert [request.method for request in server.requests] == ["POST", "GET"]


def test_an_object_whose_checksum_is_not_told_is_read(store, server):
    headers = {"x-goog-generation": VERSION, "Content-Range": "bytes 0-3/4"}
    server.answer(status=206, headers=headers, body=b"data")
    assert store.checksum_of(ObjectInfo("run/object", 4, VERSION)) == CRC
    assert query_of(server.requests[-1])["ifGenerationMatch"] == VERSION
    assert store.checksum_of(ObjectInfo("run/object", 4, VERSION, 7)) == 7
    assert len(server.requests) == 1


# what the answers mean


IN_WORDS = json.dumps(
    {"error": {"errors": [{"domain": "global", "message": "Object run/object does not exist."}]}}
)
REFUSALS = {  # as Google words them, and emulators
    "no object": (404, "No such object: bucket/run/object", errors.ObjectNotFoundError),
    "no bucket": (404, NO_BUCKET, errors.BucketNotFoundError),
    "denied": (403, "x@y.com does not have storage.objects.get access", errors.AccessDeniedError),
    "who pays": (400, "Bucket is a requester pays bucket but no user", errors.InvalidRequestError),
    "gcp-storage-emulator": (404, "", errors.ObjectNotFoundError),
    "fake-gcs-server": (404, '{"error": {"code": 404, "message": "Not Found", "errors": null}}',
                        errors.ObjectNotFoundError),
    "fake-gcs-server, reads": (404, "Not Found\n", errors.ObjectNotFoundError),
    "storage-testbench": (404, json.dumps({"code": 404, "message": IN_WORDS}),
                          errors.ObjectNotFoundError),
    "storage-testbench, older": (404, IN_WORDS, errors.ObjectNotFoundError),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("verb", ["get", "get_range", "head"])
def test_a_refused_read_is_understood(store, server, verb, name):
    status, text, expected = REFUSALS[name]
    server.respond(lambda request: server.Answer(status, body=text.encode()))
    with pytest.raises(expected) as caught:
        VERBS[verb](store)
    assert expected is errors.ObjectNotFoundError or text in str(caught.value)
    if expected is errors.ObjectNotFoundError:
        store.delete("run/object")


def test_bytes_that_arrived_damaged_are_sent_again(store, server):
    text = 'Provided CRC32C "AAAAAQ==" doesn\'t match calculated CRC32C "Nks/tw==".'
    server.answer(status=400, body=error_json(400, "invalid", text))
    with pytest.raises(errors.ServerError, match="damaged"):
        put(store)
