"""Google's store: by which URL content is read, and content that is stored compressed."""

import gzip
import json

import pytest

from cloudckpt.errors import (
    InvalidRequestError,
    ServerError,
    StoreError,
)
from support.dialects import get_range

PAGE = b"<!DOCTYPE html><title>404</title>Cannot GET /download"


@pytest.fixture
def store(open_gcs):
    return open_gcs()


def get(store):
    return bytes(store.get("run/object")[0])


reading = pytest.mark.parametrize("read", [get, get_range])


def content(request, server, data=b"data", **headers):
    """As Google serves it, whole or a range."""
    fields = {"x-goog-generation": "1", **headers}
    if "Range" not in request.headers:
        return server.Answer(headers=fields, body=data)
    start, end = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
    span = f"bytes {start}-{min(end, len(data) - 1)}/{len(data)}"
    return server.Answer(206, headers={**fields, "Content-Range": span}, body=data[start : end + 1])


def is_download(request):
    return request.target.startswith("/download/storage/v1/b/bucket/o/run%2Fobject?alt=media")


def paths(server):
    return ["download" if is_download(request) else "plain" for request in server.requests]


@reading
def test_content_is_read_where_no_redirect_leads_elsewhere(store, server, read):
    def respond(request):
        # https://cloud.google.com/storage/docs/json_api/v1/status-codes: 303 See Other
        if not is_download(request):
            return server.Answer(303, headers={"Location": f"/download{request.target}"})
        return content(request, server)

    server.respond(respond)
    for _ in range(2):
        assert read(store) == b"data"
    assert paths(server) == ["download"] * 2


def test_a_page_in_the_place_of_both_is_told_as_such(store, server):
    server.respond(lambda request: server.Answer(404, body=PAGE))
    with pytest.raises(ServerError, match="answered in place of the store"):
        get(store)


# compressed content

ORIGINAL = b"data" * 100
STORED = gzip.compress(ORIGINAL)


@pytest.fixture
def compressed(server):
    """Serves an object that is stored with Content-Encoding: gzip.

    https://cloud.google.com/storage/docs/transcoding: decompressed, without Content-Length and
    Content-Encoding and without regard to ranges, unless the request accepts gzip.
    """
    stored = {"x-goog-stored-content-encoding": "gzip", "x-goog-generation": "1"}

    def respond(request):
        if "alt=media" not in request.target:
            resource = {"size": str(len(STORED)), "generation": "1"}
            return server.Answer(body=json.dumps(resource).encode())
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return content(request, server, STORED, **stored, **{"Content-Encoding": "gzip"})
        return server.Answer(headers=stored, body=ORIGINAL, framing="chunked")

    server.respond(respond)
    return server


@reading
def test_compressed_content_is_told_at_once(store, compressed, read):
    with pytest.raises(InvalidRequestError, match="Content-Encoding: gzip") as caught:
        read(store)
    assert caught.value.uri == "gs://bucket/run/object"
    assert "gcloud storage cp" in str(caught.value)
    assert len(compressed.requests) == 1


@reading
@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Encoding": "br"},
        {"x-goog-stored-content-encoding": "gzip", "Warning": "214 UploadServer gzip"},
        {"Content-Encoding": "GZIP, identity"},
    ],
)
def test_compressed_content_is_told_however_it_shows(store, server, read, headers):
    server.respond(lambda request: content(request, server, **headers))
    with pytest.raises(InvalidRequestError, match="Content-Encoding"):
        read(store)


@reading
@pytest.mark.parametrize("coding", ["", "identity", "utf-8", "aws-chunked"])
def test_an_encoding_that_changes_no_byte_does_no_harm(store, server, read, coding):
    headers = {"Content-Encoding": coding, "x-goog-stored-content-encoding": coding}
    server.respond(lambda request: content(request, server, **headers))
    assert read(store) == b"data"


def test_a_refusal_that_comes_compressed_is_understood(store, server):
    text = b"me@example.com does not have storage.objects.get access to the object"
    server.answer(status=403, headers={"Content-Encoding": "gzip"}, body=gzip.compress(text))
    with pytest.raises(StoreError, match=r"does not have storage\.objects\.get"):
        get(store)
