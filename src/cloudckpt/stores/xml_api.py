"""Parses the XML of all three clouds (listings, results, errors), and implements the multipart
uploads that S3 and Google share.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.errors import ServerError
from cloudckpt.stores.base import (
    Body,
    Part,
    Progress,
    Retry,
    Upload,
    once,
    random_suffix,
    whole_checksum,
)
from cloudckpt.stores.http.client import Reply
from cloudckpt.stores.redaction import excerpt
from cloudckpt.stores.rest import Marks, RestStore, encode_query, iso_date

__all__ = [
    "XmlStore",
    "error_fields",
    "required",
    "result_of",
    "text",
    "unqualified",
]

_MOST_TAGS = 1_000_000  # a response for a thousand blobs of Azure has some seventy thousand

# for an encoding that Python does not know, or that expat can't use, the parser raises LookupError
# or ValueError
_NO_XML = (ElementTree.ParseError, LookupError, ValueError)
_NOT_THE_XML = "the store's response is not the expected XML; check the endpoint and the proxy"


def unqualified(body: bytes, name: str = "") -> Element:
    """Parses an XML response and returns its root, with all namespaces removed from the tags.

    A body that may take far more memory than its size suggests is refused: one with a document type
    (which may declare entities), NUL bytes, or more than `_MOST_TAGS` tags. The count is
    reliable: in every single-byte encoding that expat reads, a tag begins with the ASCII byte
    ``<``.

    Args:
        body: The body of the response.
        name: The tag that the root must have; empty allows any. Needed where an absent child would
            be taken for a missing object. A sign-in page of a proxy may be valid XML, and would be
            taken for an empty listing.

    Raises:
        ServerError: If the root has another tag than `name`.
        Exception: If the body is not valid XML, or is refused; :func:`~.rest.reading` turns it into
            a ServerError.
    """
    if b"\0" in body or b"<!DOCTYPE" in body or body.count(b"<") > _MOST_TAGS:
        raise ElementTree.ParseError(
            "the XML has a document type or too many elements, or is not text"
        )
    # a store sends white space before the XML to keep the connection alive
    root = ElementTree.fromstring(body.lstrip())  # noqa: S314 - bounded above
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if name and root.tag != name:
        raise ServerError(_NOT_THE_XML, cause=f"<{excerpt(root.tag)}> instead of <{name}>")
    return root


def text(element: Element, name: str) -> str:
    """Returns the stripped text of a child element; empty if the child is missing."""
    return (element.findtext(name) or "").strip()


def required(element: Element, name: str) -> str:
    """Returns the unstripped text of a child element; raises ValueError if missing or empty."""
    if found := element.findtext(name):
        return found
    raise ValueError(f"an entry of the listing has no {name}")


def result_of(store: RestStore, reply: Reply, action: str, uri: str) -> Element:
    """Returns the root of the response to a long operation, such as a completion or a copy.

    The store sends the status 200 before the work is done, so only the body tells whether it
    failed. For an empty body, as some stores send it, the result is an element with an empty tag.
    `action` and `uri` are the operation and the object, for messages.

    Raises:
        StoreError: If the body is an ``<Error>``, or does not arrive whole.
    """
    answer = reply.read_all()
    if not answer.strip():
        return Element("")
    root = unqualified(answer)
    if root.tag == "Error":
        raise store.failure(200, reply.headers, answer, action, uri)
    return root


def error_fields(body: bytes) -> Mapping[str, str]:
    """Returns the texts of an ``<Error>`` response by their tags; empty for any other body.

    Only the root decides: a gateway's error page may be XML as well, and contain elements with the
    same names.
    """
    try:
        root = unqualified(body)
    except _NO_XML:
        return {}
    if root.tag != "Error":
        return {}
    return {element.tag: (element.text or "").strip() for element in root.iter()}


class XmlStore(RestStore):
    """A store with S3's protocol for multipart uploads.

    Attributes:
        bucket_url: The URL of the bucket, to which a query can be appended.
        creation_headers: The headers of the request that begins an upload, without those of
            `write_headers`.
        part_checksum: The XML element that carries a part's CRC32C in the completion request; None
            if the store takes no such element.
    """

    bucket_url: str
    creation_headers: Mapping[str, str]
    part_checksum: str | None = None

    @abstractmethod
    def part_headers(self, crc32c: int) -> Mapping[str, str]:
        """Returns the headers that carry the CRC32C of an uploaded body; empty to send none."""

    def completion_headers(self, crc32c: int) -> Mapping[str, str]:
        """Returns the headers of a completion that carry the object's CRC32C; empty for none."""
        return {}

    def create_upload(self, key: str, part_size: int) -> Upload:
        url, attempt = self.object_url(key, {"uploads": ""}), random_suffix()
        headers = {**self.creation_headers, **self.write_headers(attempt)}
        with self.exchange("POST", url, headers, key=key) as reply:
            upload_id = text(unqualified(reply.read_all()), "UploadId")
        if not upload_id:
            why = "the response names no ID of the new upload; check the endpoint and the proxy"
            raise ServerError(why, uri=self.uri(key))
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
            tag = self.tag_of(reply.headers.get("ETag"), upload.key)
        return Part(number, sum(map(len, body)), tag, checksum)

    def _completed(
        self, upload: Upload, parts: Sequence[Part], condition: Mapping[str, str]
    ) -> tuple[str, Mapping[str, str]]:
        """Completes an upload under the given precondition headers.

        Returns:
            The object's ETag (empty if the response has none), and the headers of the response.
        """
        whole = whole_checksum(parts, CRC32C)
        headers = {"Content-Type": "application/xml", **condition}
        if whole is not None:
            headers |= self.completion_headers(whole)
        url = self.object_url(upload.key, {"uploadId": upload.id})
        body = [memoryview(self._completion(parts))]
        with self.exchange("POST", url, headers, body, key=upload.key, is_long=True) as reply:
            root = result_of(self, reply, "POST", self.uri(upload.key))
            tag = text(root, "ETag")
            if not tag and root.tag not in ("", "CompleteMultipartUploadResult"):
                why = "the response does not confirm that the upload is complete; check the proxy"
                raise ServerError(why)
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
        for uploads in self._all_pages(prefix, partial(self._uploads_page, prefix), retry):
            yield from uploads

    def _uploads_page(self, prefix: str, marks: Marks) -> tuple[list[Upload], Marks | None]:
        """Requests a page of a listing of uploads; `marks` is the position where it begins.

        Returns:
            The page, and the position of the next page, which is None after the last page.
        """
        named = zip(("key-marker", "upload-id-marker"), marks, strict=False)
        more = {name: mark for name, mark in named if mark}
        query = {"uploads": "", "encoding-type": "url", "prefix": prefix, **more}
        url = f"{self.bucket_url}?{encode_query(query)}"
        with self.exchange("GET", url, {}, key=prefix) as reply:
            page = unqualified(reply.read_all(), "ListMultipartUploadsResult")
            decode = unquote_plus if text(page, "EncodingType") == "url" else str
            found = [
                Upload(
                    decode(required(entry, "Key")),
                    required(entry, "UploadId"),
                    0,
                    iso_date(text(entry, "Initiated")),
                )
                for entry in page.iterfind("Upload")
            ]
            following = (
                decode(page.findtext("NextKeyMarker") or ""),
                text(page, "NextUploadIdMarker"),
            )
            return found, following if text(page, "IsTruncated") == "true" else None
