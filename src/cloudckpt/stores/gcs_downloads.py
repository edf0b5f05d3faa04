"""How the content of objects is asked for: by which URL, and that it comes as it is stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from cloudckpt.errors import (
    BucketNotFoundError,
    InvalidRequestError,
    ObjectNotFoundError,
    ServerError,
    StoreError,
)
from cloudckpt.stores.http import Reply

__all__ = ["Downloads"]

# how servers refuse a path that they do not have, which some take for a bucket and a key
_UNKNOWN_PATH = frozenset({404, 405, 501})
_UNKNOWN = (BucketNotFoundError, InvalidRequestError, ObjectNotFoundError, ServerError)
_COMPRESSIONS = frozenset({"br", "compress", "deflate", "gzip", "x-compress", "x-gzip", "zstd"})
_AS_STORED = {"Accept-Encoding": "gzip"}

_Send = Callable[[str, Mapping[str, str]], Reply]


class Downloads:
    """The reads of content at one endpoint.

    Google serves content at ``/download/storage/v1/…?alt=media``, where its own clients read it
    (https://cloud.google.com/storage/docs/request-endpoints). The URL of the metadata with
    ``alt=media`` may be answered by a redirect to there (303). Some emulators have only that one,
    which an endpoint that is not Google's is asked for when it does not seem to know the other.

    Content with ``Content-Encoding: gzip`` is decompressed by Google while it is read, which
    ignores ranges and leaves its size open, unless the request accepts gzip
    (https://cloud.google.com/storage/docs/transcoding). Requests do so, as those of Google's client
    for Python, and such content is refused: it is not what its size and checksum say.
    """

    def __init__(self, endpoint: str, *, is_google: bool) -> None:
        self._plain = f"{endpoint}/storage/v1/"
        self._download = f"{endpoint}/download/storage/v1/"
        self._is_known = is_google  # which of the two it has
        self._is_plain = False
        self._refused = threading.local()

    def is_content(self, url: str) -> bool:
        """Whether a URL of the JSON API is that of content."""
        return url.startswith(self._plain) and "alt=media" in url

    def refused(self, status: int, body: bytes) -> None:
        """Notes how this thread was refused."""
        self._refused.status = status
        self._refused.is_missing = b"No such object" in body  # Google's words

    def ask(self, url: str, send: _Send, uri: str) -> Reply:
        """The answer to a read of content.

        Args:
            url: Without ``/download``.
            send: Sends a request to a URL with headers.
            uri: Of the object, for messages.

        Raises:
            StoreError: If it is refused.
            InvalidRequestError: If the content is compressed.
        """
        if self._is_plain:
            reply = self._send(url, send)
        else:
            try:
                reply = self._send(url.replace(self._plain, self._download, 1), send)
                self._is_known = True
            except _UNKNOWN as error:
                if self._is_known or not self._may_lack_path():
                    raise
                reply = self._ask_plainly(url, send, error)
        _check_encoding(reply, uri)
        return reply

    def _send(self, url: str, send: _Send) -> Reply:
        self.refused(0, b"")  # not yet
        return send(url, _AS_STORED)

    def _may_lack_path(self) -> bool:
        """Whether the endpoint has refused the path, and not the object."""
        return self._refused.status in _UNKNOWN_PATH and not self._refused.is_missing

    def _ask_plainly(self, url: str, send: _Send, error: StoreError) -> Reply:
        """The answer of an endpoint that perhaps knows the other URL only.

        What it says there of the object counts. Another failure, as a redirect, says nothing of
        it: then the first answer was about the object.
        """
        try:
            reply = self._send(url, send)
        except StoreError as second:
            if self._refused.status in (404, 412, 416):
                raise second from None
            raise error from None
        self._is_known = self._is_plain = True
        return reply


def _check_encoding(reply: Reply, uri: str) -> None:
    fields = {name.lower(): value for name, value in reply.headers.items()}
    for name in ("content-encoding", "x-goog-stored-content-encoding"):
        codings = {coding.strip().lower() for coding in fields.get(name, "").split(",")}
        if found := codings & _COMPRESSIONS:
            coding = ", ".join(sorted(found))
            raise InvalidRequestError(
                f"the object has Content-Encoding: {coding}, so what is read of it is not what its "
                "size and checksum say; write it again without: download it with `gcloud storage "
                "cp`, which decompresses gzip, and upload that without its options -z and -Z",
                uri=uri,
            )
