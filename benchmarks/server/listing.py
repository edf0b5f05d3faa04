"""Lists of a bucket: its objects and open uploads."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from urllib.parse import quote
from xml.sax.saxutils import escape

from benchmarks.server.answers import element, iso_time, xml
from benchmarks.server.message import Answer, Body, Request
from benchmarks.server.objects import Buckets, StoredObject

LIST_LIMIT = 1000


@dataclass(frozen=True)
class Page:
    """One page of a listing, in the order of keys."""

    entries: list[StoredObject | str]
    """Objects, and the common prefixes of those behind a delimiter."""
    after: str
    """Where the next page begins; empty if this is the last."""


def page_of(
    buckets: Buckets, bucket: str, prefix: str, after: str, delimiter: str, limit: int
) -> Page:
    """Returns up to `limit` entries that begin with `prefix` and come behind `after`."""
    entries: list[StoredObject | str] = []
    last, common = "", ""
    for stored in buckets.in_order(bucket):
        name = stored.key
        if not name.startswith(prefix) or name <= after:
            continue
        group = _group(name, prefix, delimiter)
        # A continuation point may be a common prefix, which covers all keys below it.
        if group and group in (common, after):
            continue
        if len(entries) == limit:
            return Page(entries, last)
        common, last = group, group or name
        entries.append(group or stored)
    return Page(entries, "")


def list_objects(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Lists objects and common prefixes, page by page."""
    body.read()
    query = request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    limit = min(int(query.get("max-keys", LIST_LIMIT)), LIST_LIMIT)
    after = query.get("start-after", query.get("marker", ""))
    if token := query.get("continuation-token"):
        after = base64.urlsafe_b64decode(token).decode()
    written = quote if query.get("encoding-type") == "url" else escape
    page = page_of(buckets, request.bucket, prefix, after, delimiter, limit)
    rows = [
        f"<CommonPrefixes><Prefix>{written(entry)}</Prefix></CommonPrefixes>"
        if isinstance(entry, str)
        else f"<Contents><Key>{written(entry.key)}</Key><Size>{entry.size}</Size>"
        f"<ETag>{escape(entry.etag)}</ETag><StorageClass>STANDARD</StorageClass>"
        f"<LastModified>{iso_time(entry.modified)}</LastModified></Contents>"
        for entry in page.entries
    ]
    truncated = bool(page.after)
    token = base64.urlsafe_b64encode(page.after.encode()).decode()
    inner = [
        f"<Name>{request.bucket}</Name><Prefix>{written(prefix)}</Prefix>",
        f"<KeyCount>{len(rows)}</KeyCount><MaxKeys>{limit}</MaxKeys>",
        f"<IsTruncated>{str(truncated).lower()}</IsTruncated>",
        f"<Delimiter>{written(delimiter)}</Delimiter>" if delimiter else "",
        f"<NextContinuationToken>{token}</NextContinuationToken>" if truncated else "",
        "<EncodingType>url</EncodingType>" if written is quote else "",
        *rows,
    ]
    return xml(element("ListBucketResult", "".join(inner)))


def _group(key: str, prefix: str, delimiter: str) -> str:
    if not delimiter:
        return ""
    head, found, _ = key[len(prefix) :].partition(delimiter)
    return prefix + head + found if found else ""


def list_uploads(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Lists the open uploads of a prefix, on one page."""
    body.read()
    prefix = request.query.get("prefix", "")
    rows = "".join(
        f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{upload_id}</UploadId>"
        f"<Initiated>{iso_time(upload.started)}</Initiated></Upload>"
        for upload_id, upload in buckets.uploads(request.bucket)
        if upload.key.startswith(prefix)
    )
    inner = f"<Bucket>{request.bucket}</Bucket><IsTruncated>false</IsTruncated>{rows}"
    return xml(element("ListMultipartUploadsResult", inner))
