"""The XML that S3 made and others speak: answers and errors of all three clouds, and the uploads in
parts of S3 and Google.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.errors import ConnectionLostError, ServerError
from cloudckpt.stores.base import (
    Body,
    Part,
    Progress,
    Retry,
    Upload,
    nbytes,
    once,
    random_suffix,
    whole_checksum,
)
from cloudckpt.stores.http.bodies import Reply, iso_date
from cloudckpt.stores.redaction import told
from cloudckpt.stores.rest import Marks, RestStore, encode_query

__all__ = [
    "XmlStore",
    "error_fields",
    "key_text",
    "required",
    "result_of",
    "text",
    "unqualified",
]

_MOST_TAGS = 1_000_000  # a thousand blobs of Azure have some seventy thousand

# an encoding that Python does not know, or that expat can't use, comes as one of the other two
_NO_XML = (ElementTree.ParseError, LookupError, ValueError)
_NOT_THE_XML = "the store's answer is not the expected XML; check the endpoint and the proxy"


def unqualified(body: bytes, uri: str, name: str = "") -> Element:
    """The root of an answer, its names without their namespaces.

    Args:
        body: Of the answer.
        uri: What it is about, for messages.
        name: That the root must have, if what is not in it would be taken for missing.

    Raises:
        ServerError: If it has another root.
        Exception: If the body is no XML that a store answers; see :func:`~.http.bodies.reading`.
    """
    root = _parsed(body)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if name and root.tag != name:
        raise _another_root(root.tag, name, uri)
    return root


def _another_root(found: str, wanted: str, uri: str) -> ServerError:
    """A sign-in page may be XML, and would be taken for a listing in which nothing is."""
    cause = f"<{told(found)}> instead of <{wanted}>" if found else f"no <{wanted}>"
    return ServerError(_NOT_THE_XML, uri=uri, cause=cause)


def text(element: Element, name: str) -> str:
    """The text of a child; empty if there is none."""
    return (element.findtext(name) or "").strip()


def required(element: Element, name: str) -> str:
    """The text of a child, which an entry of a listing must have; ValueError if it has none."""
    if found := element.findtext(name):
        return found
    raise ValueError(f"an entry of the listing has no {name}")


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
    """What no store answers is refused before it takes more memory than its bytes suggest.

    Such as a document type, which may declare entities. In what expat reads as a text of single
    bytes, all tags begin with the byte of ASCII.
    """
    if b"\0" in body or b"<!DOCTYPE" in body or body.count(b"<") > _MOST_TAGS:
        raise ElementTree.ParseError(
            "the XML has a document type or too many elements, or is not text"
        )
    # white space has kept the connection alive
    return ElementTree.fromstring(body.lstrip())  # noqa: S314 - bounded above


class XmlStore(RestStore):
    """A store whose uploads in parts are those of S3's protocol.

    Attributes:
        bucket_url: The URL of the bucket, for a query to be appended.
        creation_headers: Of the request that begins an upload.
        part_checksum: The XML element of a part's CRC32C in that request, if it is to be there.
    """

    bucket_url: str
    creation_headers: Mapping[str, str]
    part_checksum: str | None = None

    @abstractmethod
    def part_headers(self, crc32c: int) -> Mapping[str, str]:
        """The headers of what carries bytes of an object, from their CRC32C."""

    def completion_headers(self, crc32c: int) -> Mapping[str, str]:
        """The headers of the request that completes an upload, from the object's CRC32C."""
        return {}

    def create_upload(self, key: str, part_size: int) -> Upload:
        url, attempt = self.object_url(key, {"uploads": ""}), random_suffix()
        headers = {**self.creation_headers, **self.naming(attempt)}
        with self.exchange("POST", url, headers, key=key) as reply:
            upload_id = text(unqualified(reply.read_all(), self.uri(key)), "UploadId")
        if not upload_id:
            raise ServerError("the answer has no upload ID", uri=self.uri(key))
        return Upload(key, upload_id, part_size, attempt=attempt)

    def put_part(
        self,
        upload: Upload,
        number: int,
        body: Body,
        *,
        checksum: int,
        progress: Progress | None = None,
    ) -> Part:
        url = self.object_url(upload.key, {"partNumber": str(number), "uploadId": upload.id})
        headers = self.part_headers(checksum)
        with self.exchange("PUT", url, headers, body, progress, key=upload.key) as reply:
            tag = reply.headers.get("ETag")
        if not tag:
            raise ConnectionLostError("the answer has no ETag", uri=self.uri(upload.key))
        return Part(number, nbytes(body), tag, checksum)

    def _completed(
        self, upload: Upload, parts: Sequence[Part], condition: Mapping[str, str]
    ) -> tuple[str, Mapping[str, str]]:
        """Makes the object out of its parts, under the condition of these headers.

        Returns:
            The object's ETag, empty if it was not told, and the headers of the answer.
        """
        whole = whole_checksum(parts, CRC32C)
        headers = {"Content-Type": "application/xml", **condition}
        if whole is not None:
            headers |= self.completion_headers(whole)
        url = self.object_url(upload.key, {"uploadId": upload.id})
        body = [memoryview(self._completion(parts))]
        uri = self.uri(upload.key)
        with self.exchange("POST", url, headers, body, key=upload.key, is_long=True) as reply:
            root = result_of(self, reply, "POST", uri)
            tag = text(root, "ETag")
            if not tag and root.tag not in ("", "CompleteMultipartUploadResult"):
                raise ServerError("the answer to the completion of an upload is empty", uri=uri)
            return tag, reply.headers

    def _completion(self, parts: Sequence[Part]) -> bytes:
        root = ElementTree.Element("CompleteMultipartUpload")
        for part in parts:
            entry = ElementTree.SubElement(root, "Part")
            ElementTree.SubElement(entry, "PartNumber").text = str(part.number)
            ElementTree.SubElement(entry, "ETag").text = part.tag
            if self.part_checksum is not None and part.checksum is not None:
                checksum = to_base64(part.checksum)
                ElementTree.SubElement(entry, self.part_checksum).text = checksum
        body: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
        return body

    def abort_upload(self, upload: Upload) -> None:
        url = self.object_url(upload.key, {"uploadId": upload.id})
        self._removed(upload.key, url, {})

    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:

        def ask(marks: Marks) -> tuple[list[Upload], Marks | None]:
            named = zip(("key-marker", "upload-id-marker"), marks, strict=False)
            more = {name: mark for name, mark in named if mark}
            query = {"uploads": "", "encoding-type": "url", "prefix": prefix, **more}
            url = f"{self.bucket_url}?{encode_query(query)}"
            with self.exchange("GET", url, {}, key=prefix) as reply:
                uri = self.uri(prefix)
                page = unqualified(reply.read_all(), uri, "ListMultipartUploadsResult")
                found = [_open_upload(page, entry) for entry in page.iterfind("Upload")]
            marker = key_text(page, page.findtext("NextKeyMarker") or "")
            following = marker, text(page, "NextUploadIdMarker")
            return found, following if text(page, "IsTruncated") == "true" else None

        for uploads in self._all_pages(prefix, ask, retry):
            yield from uploads


def _open_upload(page: Element, entry: Element) -> Upload:
    began = iso_date(text(entry, "Initiated"))
    key = key_text(page, required(entry, "Key"))
    return Upload(key, required(entry, "UploadId"), 0, began)
