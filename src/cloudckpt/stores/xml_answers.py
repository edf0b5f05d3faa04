"""XML as object stores answer it: S3, and Google and Azure in their XML dialects."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

from cloudckpt.errors import ServerError

__all__ = ["error_fields", "key_text", "text", "unqualified"]


def unqualified(body: bytes, uri: str) -> Element:
    """The root of an answer, its names without their namespaces.

    Raises:
        ServerError: If the body is no XML: cut off, or a proxy's.
    """
    try:
        root = _parsed(body)
    except ElementTree.ParseError as exc:
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
    except ElementTree.ParseError:
        return {}
    if root.tag.rpartition("}")[2] != "Error":
        return {}
    return {el.tag.rpartition("}")[2]: (el.text or "").strip() for el in root.iter()}


def _parsed(body: bytes) -> Element:
    body = body.lstrip()  # of the white space that has kept the connection alive
    return ElementTree.fromstring(body)  # noqa: S314 - from the store; expat limits entities
