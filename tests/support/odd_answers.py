"""Answers that no store gives, made from those that one does: what chance changes of the bytes."""

import contextlib
import random
import socketserver
import threading
import time

from cloudckpt.errors import StoreError
from cloudckpt.stores.base import CopySource, ObjectInfo, Part
from support.dialects import DIALECTS, VERSION

ETAG = '"tag"'
_NUMBERS = [
    *("", " ", "\N{SUPERSCRIPT TWO}", "9" * 18, "9" * 19, "9" * 40, "1" * 5000, "\x7f"),
    *'0 00 -5 +4 4.5 1e3 4,4 0x4 1_0 NaN null true [] bytes * "'.split(),  # noqa: SIM905
]
_SPANS = ["bytes 0-3/%s", "bytes %s-3/9", "bytes 0-%s/9", "%s", "bytes */%s", "items 0-3/%s"]
_DATES = [
    *("Fri, 27 Nov 2026 07:36:47 GMT", "Fri, 31 Dec 9999 23:59:59 -9999", "2026-11-27T07:36:47Z"),
    *("0001-01-01T00:00:00", "9999-12-31T23:59:59+00:00", "Fri, 0 Foo 0 99:99:99 +99999999999999"),
]
_PLACES = ["https://", "http://[", "//\x7f", "https://a:99999999/", "s3://b/k", "/", "\xff"]
_BODIES = [
    b"", b"\x00" * 64, b"{}", b"[]", b"null", b'"text"', b"<", b"<a/>", b"<!DOCTYPE a><a/>",
    b'{"error": null}', b'{"error": {"errors": "x"}}', b'{"error": {"errors": [[]]}}', b"NaN",
    b'{"items": [null]}', b'{"items": {}}', b'{"items": [{"name": 5, "size": [], "updated": 7}]}',
    b'{"nextPageToken": {}}', b'{"generation": "x", "size": {}}', b'{"size": -5, "generation": 1}',
    b"[" * 100_000, b'{"a":' * 100_000, b'{"error":' * 50_000 + b"1" + b"}" * 50_000,
    b"<a>" * 50_000, b"<Error><Code>" * 5_000, b"<Error>" + b"<a/>" * 50_000,
    b'<?xml version="1.0" encoding="utf-7"?><a/>', b'<?xml version="1.0" encoding="nothing"?><a/>',
]  # fmt: skip
_LISTED = {
    "s3": b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>run/a</Key>"
    b"<Size>4</Size><ETag>e</ETag><LastModified>2026-11-27T07:36:47Z</LastModified></Contents>"
    b"<CommonPrefixes><Prefix>run/b/</Prefix></CommonPrefixes></ListBucketResult>",
    "google": b'{"items": [{"name": "run/a", "size": "4", "generation": "5",'
    b' "updated": "2026-11-27T07:36:47Z"}], "prefixes": ["run/b/"]}',
    "azure": b"<EnumerationResults><Blobs><Blob><Name>run/a</Name><Properties><Etag>e</Etag>"
    b"<Content-Length>4</Content-Length><Last-Modified>Fri, 27 Nov 2026 07:36:47 GMT"
    b"</Last-Modified></Properties></Blob><BlobPrefix><Name>run/b/</Name></BlobPrefix></Blobs>"
    b"<NextMarker/></EnumerationResults>",
}
_COPIED = {
    "s3": b"<CopyObjectResult><ETag>e</ETag><ChecksumCRC32C>AAAAAA==</ChecksumCRC32C>"
    b"</CopyObjectResult>",
    "google": b'{"done": true, "resource": {"size": "4", "generation": "5", "crc32c": "AAAAAA=="}}',
    "azure": b"",
}


_HEADERS = [
    ("Content-Range", _SPANS),
    ("Retry-After", _DATES),
    ("Date", _DATES),
    ("Last-Modified", _DATES),
    ("Location", _PLACES),
    ("Content-Encoding", ["gzip", "br"]),
    ("x-goog-hash", ["crc32c=%s"]),
    ("x-amz-checksum-type", ["FULL_OBJECT"]),
    ("x-ms-copy-status", ["success"]),
    ("x-ms-meta-hdi_isfolder", ["true"]),
    *((name, [])
      for name in ("Content-Length", "ETag", "x-goog-generation",
                   "x-amz-checksum-crc32c", "x-amz-bucket-region", "x-ms-content-crc64",
                   "x-ms-error-code")),
]  # fmt: skip
"""What they are called, and likely values; ``%s`` is a number."""


class Odd:
    """Changes answers by chance.

    Args:
        rng: The chance.
        name: The dialect that is spoken.
    """

    def __init__(self, rng: random.Random, name: str) -> None:
        self._rng = rng
        self._name = name

    def raw(self, verb: str) -> bytes:
        """All bytes of an answer to a verb, about half of whose features are as they should be."""
        rng, suits = self._rng, DIALECTS[self._name].answers.get(verb, {})
        body = suits.get("body", b"")
        if verb in ("list", "list_level"):
            body = _LISTED[self._name]
        elif verb in ("copy", "copy_part"):
            body = _COPIED[self._name]
        status = str(suits.get("status", 200))
        headers = {"ETag": ETAG, "x-goog-generation": VERSION, **suits.get("headers", {})}
        headers["Content-Length"] = str(len(body))
        if rng.random() < 0.2:
            status = rng.choice(["100", "200", "206", "304", "400", "403", "404", "409", "412",
                                 "416", "429", "500", "503", "999", "20", "2x0"])  # fmt: skip
        if rng.random() < 0.6:
            body = self._changed(body)
            if rng.random() < 0.9:
                headers["Content-Length"] = str(len(body))
        for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
            name, value = self._header()
            headers[name] = value
        if rng.random() < 0.05:
            headers["Transfer-Encoding"] = "chunked"
            body = rng.choice([b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), b"-5\r\n", b"f" * 99])
        head = f"HTTP/1.1 {status} odd\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        data = head.encode("latin-1", "replace") + b"Connection: close\r\n\r\n" + body
        return self._changed(data) if rng.random() < 0.1 else data

    def _header(self) -> tuple[str, str]:
        rng = self._rng
        number = rng.choice(_NUMBERS)
        name, usual = rng.choice(_HEADERS)
        return name, rng.choice([*usual, "%s"]).replace("%s", number)

    def _changed(self, data: bytes) -> bytes:
        rng = self._rng
        if rng.random() < 0.3:
            return rng.choice(_BODIES)
        for _ in range(rng.randint(1, 4)):
            start, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
            stop = min(stop, start + rng.choice([0, 1, 4, 40]))
            piece = rng.choice(
                [
                    b"",
                    rng.choice(_NUMBERS).encode(),
                    rng.randbytes(rng.randint(1, 8)),
                    data[start:stop] * rng.randint(2, 50),
                    rng.choice(_BODIES)[:2000],
                ]
            )
            data = data[:start] + piece + data[stop:]
        return data


class _Server(socketserver.ThreadingTCPServer):
    """Sends the same bytes in answer to each request, and closes the connection."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    answer = b""

    def handle_error(self, request, client_address) -> None:
        """A client that has heard enough is no matter."""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        left = 0
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            left = int(value) if name.lower() == b"content-length" else left
        self.rfile.read(left)
        self.wfile.write(self.server.answer)


@contextlib.contextmanager
def odd_server():
    """A server whose next answers are what ``answer`` is set to."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def calls(name):
    """All that a store of a dialect can be asked, by name."""
    dialect = DIALECTS[name]
    found = ObjectInfo("run/a", 4, VERSION if name == "google" else ETAG)
    return {
        **dialect.verbs,
        "list_level": lambda store: list(store.list_level("run/")),
        "list_uploads": lambda store: list(store.list_uploads("run/")),
        "complete_upload": lambda store: store.complete_upload(
            dialect.upload, [Part(1, 4, dialect.part, dialect.crc)]
        ),
        "abort_upload": lambda store: store.abort_upload(dialect.upload),
        "checksum_of": lambda store: store.checksum_of(found),
        "copy": lambda store: store.copy(
            CopySource(store, found), "run/b", attempt="0123456789abcdef"
        ),
        "copy_part": lambda store: store.copy_part(
            CopySource(store, found), dialect.upload, 1, 0, 4
        ),
        "delete_version": lambda store: store.delete("run/a", if_version=found.version),
    }


def ask(server, store, name, rng):
    """One call amid odd answers; what is wrong with its outcome, if anything.

    Nothing but a result or an error of stores, within seconds.
    """
    verb = rng.choice(sorted(calls(name).keys() - {name == "google" and "copy_part"}))
    server.answer = Odd(rng, name).raw(verb)
    began = time.monotonic()
    try:
        calls(name)[verb](store)
    except StoreError:
        pass
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return f"{verb}: {error!r} of {server.answer[:2000]!r}"
    took = time.monotonic() - began
    return f"{verb}: {took:.1f} s for {server.answer[:2000]!r}" if took > 20 else None
