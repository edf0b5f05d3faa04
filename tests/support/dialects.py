"""How each verb reaches the store of each cloud, and answers that suit it."""

import base64
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cloudckpt import AzureOptions, Config, GCSOptions, S3Options
from cloudckpt.checksum import CRC32C, CRC64NVME, to_base64
from cloudckpt.config import MIB
from cloudckpt.errors import StoreError
from cloudckpt.stores.azure.store import AzureStore
from cloudckpt.stores.base import ObjectStore, Part, Upload
from cloudckpt.stores.gcs.store import GCSStore
from cloudckpt.stores.s3.store import S3Store

CRC = CRC32C.of(b"data")
HASH = f"crc32c={to_base64(CRC)}"
VERSION = "1700000000000001"
"""Of an object of Google's."""

AZURE_KEY = base64.b64encode(b"SECRETKEY" * 4).decode()

KEYS = [
    *("with spaces", "a+b", "100%", "a%2Fb", "a&b=c;d,e:f@g", "größe/重み", "#1", "a?b=c", "a//b"),
    *("(a)'b'!*~$", '"quoted"', "[a]{b}|c^d`e<f>"),
]


@pytest.fixture(scope="module", name="stub")
def one_stub(stub_server):
    """One server for a module that imports this, since a store for each test takes its time."""
    with stub_server() as stub:
        yield stub


def put(store, key="run/object", data=b"data", **more):
    checksum = store.capabilities.checksum.of(data)
    return store.put(key, [memoryview(data)], checksum=checksum, **more)


def get_range(store, key="run/object", start=0, size=4, **conditions):
    memory = bytearray(size)
    store.get_range(key, start, [memoryview(memory)], **conditions)
    return bytes(memory)


def at_once(count, function):
    """What the function returns, or raises, on many threads."""
    everybody, results = threading.Barrier(count), []

    def run():
        everybody.wait(30)
        try:
            results.append(function())
        except StoreError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def answers_of(meanings):
    """Status, code and expected error, of a table of the answers that mean each."""
    rows = [(kind, one) for kind, text in meanings.items() for one in text.split(", ")]
    return [(int(one[:3]), one[4:], kind) for kind, one in rows]


def query_of(request):
    found = parse_qs(urlsplit(request.target).query, keep_blank_values=True)
    return {name: value for name, (value,) in found.items()}


def xml_of(tag, attributes="", **fields):
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    return f"<{tag}{attributes}>{inner}</{tag}>".encode()


def error_xml(code, message="no details", **more):
    return xml_of("Error", Code=code, Message=message, **more)


def error_json(status, reason, message="no details"):
    errors = [{"domain": "global", "reason": reason, "message": message}]
    return json.dumps({"error": {"code": status, "message": message, "errors": errors}}).encode()


def resource(size=4, crc=CRC, **fields):
    """An answer with an object's metadata, as Google's JSON API gives it."""
    values = {"name": "run/object", "size": str(size), "generation": VERSION}
    return json.dumps({**values, "crc32c": to_base64(crc), **fields}).encode()


def inserted(request):
    """The metadata and the bytes of an upload by Google's JSON API."""
    boundary = request.headers["Content-Type"].partition("boundary=")[2].encode()
    _, first, second, end = request.body.split(b"--" + boundary)
    assert end == b"--\r\n"
    metadata, data = first.partition(b"\r\n\r\n")[2], second.partition(b"\r\n\r\n")[2]
    return json.loads(metadata), data.removesuffix(b"\r\n")


def page(*blobs, marker=""):
    """A page of a listing of Azure's; blobs are XML."""
    blobs = "".join(blobs)
    return b'<?xml version="1.0" encoding="utf-8"?>' + xml_of(
        "EnumerationResults", Blobs=blobs, NextMarker=marker
    )


@dataclass(frozen=True)
class Dialect:
    """A way to speak to a store.

    Attributes:
        open: Opens a store at a URL, which sends no credentials.
        upload: What the verbs of uploads are about.
        part: The tag of its part.
        answers: What suits each verb.
        versions: Where answers tell the version of an object.
        versioned: The verbs that need to be told it.
        metadata: What headers with an object's metadata begin with.
        crc: The checksum of ``data``.
    """

    open: Callable[[str], ObjectStore]
    upload: Upload
    part: str
    answers: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    versioned: tuple[str, ...]
    metadata: str
    crc: int = CRC

    @property
    def verbs(self) -> Mapping[str, Callable[[ObjectStore], object]]:
        upload, crc = self.upload, self.crc
        parts = [Part(1, 4, self.part, crc)]
        functions = {
            "put": put,
            "create_upload": lambda store: store.create_upload("run/object", 5 * MIB),
            "put_part": lambda store: store.put_part(
                upload, 3, [memoryview(b"data")], checksum=crc
            ),
            "complete_upload": lambda store: store.complete_upload(upload, parts),
            "abort_upload": lambda store: store.abort_upload(upload),
            "list_uploads": lambda store: list(store.list_uploads("run/")),
            "get": lambda store: store.get("run/object"),
            "get_range": get_range,
            "head": lambda store: store.head("run/object"),
            "list": lambda store: list(store.list("run/")),
            "delete": lambda store: store.delete("run/object"),
        }
        return {verb: functions[verb] for verb in self.answers}

    def call(self, store, server, verb, **more):
        """Carries out a verb against an answer that suits it; returns the request that was sent."""
        server.answer(**self.answers[verb])
        self.verbs[verb](store, **more)
        return server.requests[-1]

    def failures(self, store, server, *answers) -> Iterator[StoreError]:
        """What each verb fails with for each answer."""
        for answer in answers:
            for function in self.verbs.values():
                server.reset_script()
                server.respond(lambda request, answer=answer: answer)
                with pytest.raises(StoreError) as caught:
                    function(store)
                yield caught.value


def _s3(url):
    options = S3Options(endpoint_url=url, addressing_style="path", anonymous=True)
    return S3Store("bucket", Config(s3=options))


def _azure(url):
    options = AzureOptions(endpoint_url=url, anonymous=True)
    return AzureStore("bucket", Config(azure=options))


_READ = {"body": b"data", "headers": {"ETag": '"tag"'}}
_RANGE = {**_READ, "status": 206, "headers": {"ETag": '"tag"', "Content-Range": "bytes 0-3/9"}}

S3 = Dialect(
    _s3,
    upload=Upload("run/object", "id/with+odd=chars&more", 5 * MIB),
    part='"tag"',
    answers={
        "put": {"headers": {"ETag": '"tag"'}},
        "create_upload": {"body": xml_of("InitiateMultipartUploadResult", UploadId="id")},
        "put_part": {"headers": {"ETag": '"tag"'}},
        "complete_upload": {"body": xml_of("CompleteMultipartUploadResult", ETag='"tag"')},
        "abort_upload": {"status": 204},
        "list_uploads": {"body": xml_of("ListMultipartUploadsResult", IsTruncated="false")},
        "get": _READ,
        "get_range": _RANGE,
        "head": {"headers": {"ETag": '"tag"'}, "size": 9},
        "list": {"body": xml_of("ListBucketResult", IsTruncated="false")},
        "delete": {"status": 204},
    },
    versions={"ETag": '"tag"'},
    versioned=("put", "put_part", "get", "get_range", "head"),
    metadata="x-amz-meta-",
)
NAMESPACE = " xmlns='http://s3.amazonaws.com/doc/2006-03-01/'"
_MADE = {"x-goog-generation": VERSION}
GOOGLE = Dialect(
    lambda url: GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=url))),
    upload=S3.upload,
    part='"tag"',
    answers={
        "put": {"body": resource()},
        "create_upload": {
            "body": xml_of("InitiateMultipartUploadResult", NAMESPACE, UploadId="id")
        },
        "put_part": {"headers": {"ETag": '"tag"'}},
        "complete_upload": {
            "headers": {**_MADE, "x-goog-hash": HASH},
            "body": xml_of("CompleteMultipartUploadResult", NAMESPACE, ETag='"tag"'),
        },
        "abort_upload": {"status": 204},
        "list_uploads": {
            "body": xml_of("ListMultipartUploadsResult", NAMESPACE, IsTruncated="false")
        },
        "get": {"headers": _MADE, "body": b"data"},
        "get_range": {**_RANGE, "headers": {**_MADE, "Content-Range": "bytes 0-3/9"}},
        "head": {"body": resource()},
        "list": {"body": b'{"kind": "storage#objects"}'},
        "delete": {"status": 204},
    },
    versions=_MADE,
    versioned=("put", "head"),
    metadata="x-goog-meta-",
)
CREATED = {"status": 201, "headers": {"ETag": '"0x1"'}}
AZURE = Dialect(
    _azure,
    upload=Upload("run/object", "0123456789abcdef", 1024),
    part="MDEyMzQ1Njc4OWFiY2RlZjAwMDAz",  # the upload's ID and 00003
    answers={
        "put": CREATED,
        "put_part": {"status": 201},
        "complete_upload": CREATED,
        "list_uploads": {"body": page()},
        "get": _READ,
        "get_range": _RANGE,
        "head": {"headers": {"ETag": '"0x1"'}, "size": 9},
        "list": {"body": page()},
        "delete": {"status": 202},
    },
    versions={"ETag": '"tag"'},
    versioned=("put", "complete_upload", "get", "head"),
    metadata="x-ms-meta-",
    crc=CRC64NVME.of(b"data"),
)
DIALECTS = {"s3": S3, "google": GOOGLE, "azure": AZURE}
