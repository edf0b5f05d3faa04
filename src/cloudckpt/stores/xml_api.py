"""The XML that S3 made and others speak: answers and errors of all three clouds, and the uploads in
parts of S3 and Google.
"""

from __future__ import annotations

import contextlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.errors import ConnectionLostError, ObjectNotFoundError, ServerError
from cloudckpt.stores.base import (
    Body,
    Part,
    Progress,
    Retry,
    Upload,
    nbytes,
    random_suffix,
    whole_checksum,
)
from cloudckpt.stores.http.bodies import Reply
from cloudckpt.stores.http.messages import encode_query, iso_date
from cloudckpt.stores.pages import Marks, all_pages
from cloudckpt.stores.redaction import told
from cloudckpt.stores.rest import RestStore

__all__ = [
    "Completion",
    "Dialect",
    "XmlMultipart",
    "error_fields",
    "key_text",
    "required",
    "result_of",
    "text",
    "unqualified",
]

_PIECE = 64 * 1024
_DEEPEST = 100  # levels; real answers have six
_MOST_ELEMENTS = 1_000_000  # five thousand blobs of Azure have some two hundred thousand

# an encoding that Python does not know, or that expat can't use, comes as one of the other two
_NO_XML = (ElementTree.ParseError, LookupError, ValueError)
_NOT_THE_XML = "the answer is not the XML it should be; check the endpoint and the proxy"


class _Builder(ElementTree.TreeBuilder):
    """Refuses what no store answers, and what would take more memory than its bytes suggest."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = self._elements = 0

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ElementTree.ParseError("it has a document type, which may declare entities")

    def start(self, tag: str, attributes: dict[str, str], /) -> Element:
        self._depth += 1
        self._elements += 1
        if self._depth > _DEEPEST or self._elements > _MOST_ELEMENTS:
            raise ElementTree.ParseError("it has too many elements, or too many in each other")
        return super().start(tag, attributes)

    def end(self, tag: str, /) -> Element:
        self._depth -= 1
        return super().end(tag)


def unqualified(body: bytes, uri: str, name: str = "") -> Element:
    """The root of an answer, its names without their namespaces.

    Args:
        body: Of the answer.
        uri: What it is about, for messages.
        name: That the root must have, if what is not in it would be taken for missing.

    Raises:
        ServerError: If it has another root.
        Exception: If the body is no XML that a store answers; see :func:`~.http.messages.reading`.
    """
    root = _parsed(body)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if name and root.tag != name:
        raise _another_root(root.tag, name, uri)
    return root


def _another_root(found: str, wanted: str, uri: str) -> ServerError:
    """A sign-in page may be XML, and would be taken for a listing in which nothing is."""
    cause = f"<{told(found)}> in place of <{wanted}>" if found else f"no <{wanted}>"
    return ServerError(_NOT_THE_XML, uri=uri, cause=cause)


def text(element: Element, name: str) -> str:
    """The text of a child; empty if there is none."""
    return (element.findtext(name) or "").strip()


def required(element: Element, name: str) -> str:
    """The text of a child, which an entry of a listing must have; ValueError if it has none."""
    if found := element.findtext(name):
        return found
    raise ValueError(f"an entry has no {name}")


def key_text(root: Element, key: str) -> str:
    """A key in a listing, which may have been asked for with ``encoding-type=url``."""
    return unquote_plus(key) if text(root, "EncodingType") == "url" else key


def result_of(store: RestStore, reply: Reply, action: str, uri: str) -> Element:
    """The root of the answer to long work, whose status is sent before the work is done.

    An element without a name if the answer has no body, as some stores' do.

    Raises:
        StoreError: If the body says that the work has failed.
    """
    answer = reply.read_all()
    if not answer.strip():
        return Element("")
    root = unqualified(answer, uri)
    if root.tag == "Error":
        raise store.belated(reply.headers, answer, action, uri)
    return root


def error_fields(body: bytes) -> Mapping[str, str]:
    """The names and texts of an error's elements; none if it is no error of an object store.

    A gateway's page may be XML, too, and have elements of such names elsewhere.
    """
    try:
        root = _parsed(body)
    except _NO_XML:
        return {}
    if root.tag.rpartition("}")[2] != "Error":
        return {}
    return {el.tag.rpartition("}")[2]: (el.text or "").strip() for el in root.iter()}


def _parsed(body: bytes) -> Element:
    body = body.lstrip()  # of the white space that has kept the connection alive
    parser = ElementTree.XMLParser(target=_Builder())  # noqa: S314 - the builder bounds it
    for start in range(0, max(len(body), 1), _PIECE):  # a refusal is heard behind each piece only
        parser.feed(body[start : start + _PIECE])
    root: Element = parser.close()
    return root


def _nothing(crc32c: int) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Where the vendors differ.

    Attributes:
        creation: Headers of the request that begins an upload.
        part: Headers of a part, from its CRC32C.
        completion: Headers of the request that completes an upload, from the object's CRC32C.
        part_checksum: The XML element of a part's CRC32C in that request, if it is to be there.
    """

    creation: Mapping[str, str]
    part: Callable[[int], Mapping[str, str]] = _nothing
    completion: Callable[[int], Mapping[str, str]] = _nothing
    part_checksum: str | None = None


@dataclass(frozen=True)
class Completion:
    """The answer to a completion: the object's ETag, empty if it was not told, and the headers."""

    tag: str
    headers: Mapping[str, str]


class XmlMultipart:
    """The operations on the multipart uploads of one bucket."""

    def __init__(self, store: RestStore, bucket_url: str, dialect: Dialect) -> None:
        self._store = store
        self._bucket_url = bucket_url
        self._dialect = dialect

    def create(self, key: str, part_size: int) -> Upload:
        """Begins an upload."""
        url, attempt = self._store.object_url(key, {"uploads": ""}), random_suffix()
        headers = {**self._dialect.creation, **self._store.naming(attempt)}
        with self._store.exchange("POST", url, headers, key=key) as reply:
            upload_id = text(unqualified(reply.read_all(), self._store.uri(key)), "UploadId")
        if not upload_id:
            raise ServerError("the answer names no upload", uri=self._store.uri(key))
        return Upload(key, upload_id, part_size, attempt=attempt)

    def put_part(
        self, upload: Upload, number: int, body: Body, checksum: int, progress: Progress | None
    ) -> Part:
        """Sends a part."""
        url = self._store.object_url(upload.key, {"partNumber": str(number), "uploadId": upload.id})
        headers = self._dialect.part(checksum)
        with self._store.exchange("PUT", url, headers, body, progress, key=upload.key) as reply:
            tag = reply.headers.get("ETag")
        if not tag:
            raise ConnectionLostError("the answer has no ETag", uri=self._store.uri(upload.key))
        return Part(number, nbytes(body), tag, checksum)

    def complete(
        self, upload: Upload, parts: Sequence[Part], condition: Mapping[str, str]
    ) -> Completion:
        """Makes the object out of its parts, under the condition of these headers."""
        whole = whole_checksum(parts, CRC32C)
        headers = {"Content-Type": "application/xml", **condition}
        if whole is not None:
            headers |= self._dialect.completion(whole)
        url = self._store.object_url(upload.key, {"uploadId": upload.id})
        body = [memoryview(self._completion(parts))]
        uri = self._store.uri(upload.key)
        with self._store.exchange(
            "POST", url, headers, body, key=upload.key, is_long=True
        ) as reply:
            root = result_of(self._store, reply, "POST", uri)
            tag = text(root, "ETag")
            if not tag and root.tag not in ("", "CompleteMultipartUploadResult"):
                raise ServerError("the completion has no result", uri=uri)
            return Completion(tag, dict(reply.headers))

    def _completion(self, parts: Sequence[Part]) -> bytes:
        root = ElementTree.Element("CompleteMultipartUpload")
        for part in parts:
            entry = ElementTree.SubElement(root, "Part")
            ElementTree.SubElement(entry, "PartNumber").text = str(part.number)
            ElementTree.SubElement(entry, "ETag").text = part.tag
            if self._dialect.part_checksum is not None and part.checksum is not None:
                checksum = to_base64(part.checksum)
                ElementTree.SubElement(entry, self._dialect.part_checksum).text = checksum
        body: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
        return body

    def abort(self, upload: Upload) -> None:
        """Discards an upload; one that is gone is no error."""
        url = self._store.object_url(upload.key, {"uploadId": upload.id})
        with (
            contextlib.suppress(ObjectNotFoundError),
            self._store.exchange("DELETE", url, {}, key=upload.key),
        ):
            pass

    def open_uploads(self, prefix: str, retry: Retry) -> Iterator[Upload]:
        """The uploads under a prefix, page by page."""

        def ask(marks: Marks) -> tuple[list[Upload], Marks | None]:
            named = zip(("key-marker", "upload-id-marker"), marks, strict=False)
            more = {name: mark for name, mark in named if mark}
            query = {"uploads": "", "encoding-type": "url", "prefix": prefix, **more}
            url = f"{self._bucket_url}?{encode_query(query)}"
            with self._store.exchange("GET", url, {}, key=prefix) as reply:
                uri = self._store.uri(prefix)
                page = unqualified(reply.read_all(), uri, "ListMultipartUploadsResult")
                found = [_open_upload(page, entry) for entry in page.iterfind("Upload")]
            marker = key_text(page, page.findtext("NextKeyMarker") or "")
            following = marker, text(page, "NextUploadIdMarker")
            return found, following if text(page, "IsTruncated") == "true" else None

        for uploads in all_pages(self._store.uri(prefix), ask, retry):
            yield from uploads


def _open_upload(page: Element, entry: Element) -> Upload:
    began = iso_date(text(entry, "Initiated"))
    key = key_text(page, required(entry, "Key"))
    return Upload(key, required(entry, "UploadId"), 0, began)
