"""XML as object stores answer it: S3, and Google and Azure in their XML dialects."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

from cloudckpt.errors import ServerError

__all__ = ["error_fields", "key_text", "text", "unqualified"]

_PIECE = 64 * 1024
_DEEPEST = 100  # levels; real answers have six
_MOST_ELEMENTS = 1_000_000  # five thousand blobs of Azure have some two hundred thousand

# an encoding that Python does not know, or that expat can't use, comes as one of the other two
_NO_XML = (ElementTree.ParseError, LookupError, ValueError)


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


def unqualified(body: bytes, uri: str) -> Element:
    """The root of an answer, its names without their namespaces.

    Raises:
        ServerError: If the body is no XML that a store answers: cut off, or a proxy's.
    """
    try:
        root = _parsed(body)
    except _NO_XML as exc:
        raise ServerError("the answer is not the XML it should be", uri=uri, cause=exc) from exc
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def text(element: Element, name: str) -> str:
    """The text of a child; empty if there is none."""
    return (element.findtext(name) or "").strip()


def key_text(root: Element, element: Element, name: str) -> str:
    """A key in a listing, which may have been asked for with ``encoding-type=url``."""
    key = element.findtext(name) or ""
    return unquote_plus(key) if text(root, "EncodingType") == "url" else key


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
