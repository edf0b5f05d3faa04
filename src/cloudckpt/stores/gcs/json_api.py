"""Builds the requests and parses the responses of Google Cloud Storage's JSON API."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

from cloudckpt.config import GCSOptions
from cloudckpt.stores.base import ATTEMPT, ObjectInfo, Progress
from cloudckpt.stores.http.client import Reply, whole_number
from cloudckpt.stores.rest import iso_date

__all__ = [
    "BRIEF",
    "CACHE_CONTROL",
    "LISTED",
    "RESOURCE",
    "answer_of",
    "creation_headers",
    "described",
    "generation",
    "insertion",
    "of_payload",
    "parse_crc32c",
    "resource_of",
]

_NO_GENERATION = str(2**63 - 1)  # generations are times: no object has the last one
RESOURCE = "name,size,generation,crc32c,metadata,timeCreated"

LISTED = "name,size,generation,timeCreated"
BRIEF = {"prettyPrint": "false"}

CACHE_CONTROL = "no-store"
"""The Cache-Control of new objects, which forbids caching.

Otherwise Google caches publicly readable objects for an hour, even if they are replaced or deleted:
https://cloud.google.com/storage/docs/caching
"""


def creation_headers(options: GCSOptions) -> dict[str, str]:
    """Returns the XML API's headers for a new object with the properties in the options."""
    wanted = {
        "Cache-Control": CACHE_CONTROL,
        "x-goog-storage-class": options.storage_class,
        "x-goog-encryption-kms-key-name": options.kms_key_name,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def resource_of(options: GCSOptions, attempt: str = "") -> dict[str, Any]:
    """Returns the JSON description of a new object, according to the options.

    The encryption key is not part of the description, but a query parameter. ``attempt``, which
    names this write, goes into the metadata of the object.
    """
    wanted = {
        "contentType": "application/octet-stream",
        "cacheControl": CACHE_CONTROL,
        "storageClass": options.storage_class,
        "metadata": {ATTEMPT: attempt} if attempt else None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def insertion(resource: Mapping[str, Any], boundary: str) -> tuple[bytes, bytes]:
    """Returns the bytes before and after an object's content in the request that writes it."""
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
        f"{json.dumps(resource)}\r\n"
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    return head.encode(), f"\r\n--{boundary}--\r\n".encode()


def described(resource: Mapping[str, Any], key: str) -> ObjectInfo:
    """Converts an object's JSON description to an ObjectInfo.

    Raises:
        KeyError: If it has no generation or no size.
        TypeError, ValueError: If one of these is not a number.
    """
    version = str(int(resource["generation"]))
    size = whole_number(str(resource["size"]))
    attempt = str(dict(resource.get("metadata") or {}).get(ATTEMPT, ""))
    crc32c = parse_crc32c(f"crc32c={resource.get('crc32c', '')}")
    modified = iso_date(str(resource.get("timeCreated", "")))
    return ObjectInfo(key, size, version, crc32c, modified, attempt)


def answer_of(reply: Reply) -> dict[str, Any]:
    """Parses the JSON object in the body of a response.

    Raises:
        ValueError: If the body is not JSON, or is another value or an error, which would be taken
            for an empty listing.
    """
    answer = json.loads(reply.read_all())
    if not isinstance(answer, dict) or "error" in answer:
        raise ValueError(
            "the response is not a JSON object, or is an error although its status is 200"
        )
    return answer


def generation(version: str) -> str:
    """Returns `version` if it is a number; else a number that no object's generation has."""
    return version if version.isascii() and version.isdigit() else _NO_GENERATION


def parse_crc32c(text: str) -> int | None:
    """Parses the CRC32C in a value of ``x-goog-hash``; None if that has no CRC32C."""
    match = re.search(r"\bcrc32c=([A-Za-z0-9+/]{6}==)", text)
    return int.from_bytes(base64.b64decode(match.group(1)), "big") if match else None


def of_payload(progress: Progress | None, before: int, size: int) -> Progress | None:
    """Returns a callback for a request's progress that reports only an object's own bytes.

    Args:
        progress: Called with the number of the object's bytes that were sent; if None, the result
            is None.
        before: Bytes of the request before the object's.
        size: Bytes of the object.
    """
    if progress is None:
        return None
    sent = reported = 0

    def moved(count: int) -> None:
        nonlocal sent, reported
        sent += count
        payload = min(max(sent - before, 0), size)
        step, reported = payload - reported, payload
        progress(step)

    return moved
