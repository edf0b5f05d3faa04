"""Google's store: content that is stored compressed.

https://cloud.google.com/storage/docs/transcoding: decompressed, without Content-Length and
Content-Encoding and without regard to ranges, unless the request accepts gzip.
"""

import gzip

import pytest

from cloudckpt.errors import InvalidRequestError, StoreError
from support.dialects import get_range

STORED = {"x-goog-stored-content-encoding": "gzip"}


@pytest.fixture
def store(open_gcs):
    return open_gcs()


def get(store):
    return bytes(store.get("run/object")[0])


reading = pytest.mark.parametrize("read", [get, get_range])


def serve(server, headers, **answer):
    """Content as Google serves it, whole or a range."""

    def respond(request):
        found = {"x-goog-generation": "1", **headers}
        if "Range" not in request.headers or answer:
            return server.Answer(headers=found, body=b"data", **answer)
        return server.Answer(206, {**found, "Content-Range": "bytes 0-3/4"}, b"data")

    server.respond(respond)


@reading
@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        ({**STORED, "Content-Encoding": "gzip"}, {}),
        (STORED, {"framing": "chunked"}),
        ({**STORED, "Warning": "214 UploadServer gzip"}, {}),
        ({"Content-Encoding": "br"}, {}),
        ({"Content-Encoding": "GZIP, identity"}, {}),
    ],
)
def test_compressed_content_is_told_at_once(store, server, read, headers, answer):
    serve(server, headers, **answer)
    with pytest.raises(InvalidRequestError, match="Content-Encoding") as caught:
        read(store)
    assert caught.value.uri == "gs://bucket/run/object"
    assert len(server.requests) == 1


@reading
@pytest.mark.parametrize("coding", ["", "identity", "utf-8", "aws-chunked"])
def test_an_encoding_that_changes_no_byte_does_no_harm(store, server, read, coding):
    serve(server, {"Content-Encoding": coding, "x-goog-stored-content-encoding": coding})
    assert read(store) == b"data"


def test_a_refusal_that_comes_compressed_is_understood(store, server):
    text = b"me@example.com does not have storage.objects.get access to the object"
    server.answer(status=403, headers={"Content-Encoding": "gzip"}, body=gzip.compress(text))
    with pytest.raises(StoreError, match=r"does not have storage\.objects\.get"):
        get(store)
