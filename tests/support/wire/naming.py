"""What a request asks for: operations of three vendors by the names that S3 has for them.

So a fault for ``CompleteMultipartUpload`` befalls the completion of an upload in any store. A name
tells what an operation is for, not how it works: Azure's ``Put Block List`` has this one too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import parse_qsl, unquote, urlsplit

Naming = Callable[[str, str], tuple[str, str]]
"""From method and target (path and query, as sent) to the operation and ``/bucket/key``.

The operation is S3's name for it, or the method if it has none."""


def s3_naming(method: str, target: str) -> tuple[str, str]:
    """S3 with path-style addressing."""
    path, query = _parsed(target)
    keyed = "/" in path.strip("/")
    known: list[tuple[str, bool, str]] = [
        ("PUT", keyed and "partNumber" in query, "UploadPart"),
        ("PUT", keyed, "PutObject"),
        ("POST", "uploads" in query, "CreateMultipartUpload"),
        ("POST", "uploadId" in query, "CompleteMultipartUpload"),
        ("GET", "uploads" in query, "ListMultipartUploads"),
        ("GET", keyed and "uploadId" in query, "ListParts"),
        ("GET", keyed, "GetObject"),
        ("GET", "list-type" in query, "ListObjectsV2"),
        ("HEAD", keyed, "HeadObject"),
        ("DELETE", keyed and "uploadId" in query, "AbortMultipartUpload"),
        ("DELETE", keyed, "DeleteObject"),
    ]
    return _first(known, method), path


def google_naming(method: str, target: str) -> tuple[str, str]:
    """Google Cloud Storage: the JSON API, and the XML API with path-style addressing."""
    match = re.match(r"(/upload|/download)?/storage/v1/b/([^/?]+)/o(?:/([^/?]+))?", target)
    if match is None:
        return s3_naming(method, target)
    _, query = _parsed(target)
    key = unquote(match[3]) if match[3] else query.get("name", "")
    known: list[tuple[str, bool, str]] = [
        ("POST", match[1] is not None, "PutObject"),
        ("POST", "/rewriteTo/" in target, "CopyObject"),
        ("GET", not key, "ListObjectsV2"),
        ("GET", query.get("alt") == "media", "GetObject"),
        ("GET", True, "HeadObject"),
        ("DELETE", bool(key), "DeleteObject"),
    ]
    return _first(known, method), f"/{unquote(match[2])}/{key}".rstrip("/")


def azure_naming(method: str, target: str) -> tuple[str, str]:
    """Azure Blob Storage with the account in the path, as Azurite has it."""
    path, query = _parsed(target)
    component = query.get("comp")
    known: list[tuple[str, bool, str]] = [
        ("PUT", component == "block", "UploadPart"),
        ("PUT", component == "blocklist", "CompleteMultipartUpload"),
        ("PUT", component is None, "PutObject"),
        ("GET", component == "blocklist", "ListParts"),
        ("GET", query.get("include") == "uncommittedblobs", "ListMultipartUploads"),
        ("GET", component == "list", "ListObjectsV2"),
        ("GET", component is None, "GetObject"),
        ("HEAD", component is None, "HeadObject"),
        ("DELETE", component is None, "DeleteObject"),
    ]
    return _first(known, method), "/" + path.removeprefix("/").partition("/")[2]


def _parsed(target: str) -> tuple[str, dict[str, str]]:
    """The path, percent-decoded, and the parameters."""
    parts = urlsplit(target)
    return unquote(parts.path), dict(parse_qsl(parts.query, keep_blank_values=True))


def _first(known: list[tuple[str, bool, str]], method: str) -> str:
    return next((name for of, fits, name in known if of == method and fits), method)
