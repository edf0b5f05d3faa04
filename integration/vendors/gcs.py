"""The operations of Google Cloud Storage, by google-cloud-storage and by our store."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, quote

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.cloud import storage
from google.cloud.storage import transfer_manager

from cloudckpt import Config, GCSOptions
from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.stores.base import ATTEMPT, CopySource, ObjectInfo, Part, Upload
from cloudckpt.stores.gcs.store import GCSStore

from .differences import Operation
from .recorder import Answer, Recorded

__all__ = ["answer", "operations"]

BUCKET, KEY = "bucket", "run/a b/größe+%2F&=;#1~.metadata"
DATA = b"what is in the object"
CRC = to_base64(CRC32C.of(DATA))
GENERATION = "1700000000000001"
TAG = '"0123456789abcdef0123456789abcdef"'
UPLOAD = Upload(KEY, "an.upload_id-1", len(DATA))
PART = Part(1, len(DATA), TAG, CRC32C.of(DATA))
NAME = "0123456789abcdef"  # of a write
WHOLE = to_base64(CRC32C.combine([(PART.checksum, PART.size)] * 2))
KMS_KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"


def answer(request: Recorded) -> Answer:
    """What Google says, as far as both clients want to hear it."""
    if request.host == "oauth2.googleapis.com":
        token = {"access_token": "token", "expires_in": 3600, "token_type": "Bearer"}
        return _json(token)
    if request.host == "iamcredentials.googleapis.com":
        return Answer(404)  # google-auth asks for the account's regions, in a thread of its own
    path, _, text = request.target.partition("?")
    query = parse_qs(text, keep_blank_values=True)
    if "/storage/v1/" not in path:
        return _xml_answer(request, query)
    if request.method == "DELETE":
        return Answer(204)
    if path.endswith("/o") and request.method == "GET":
        return _json({} if "pageToken" in query else {"nextPageToken": "a+/b="})
    if "/rewriteTo/" in path:
        size = str(len(DATA))
        done = {"done": True, "objectSize": size, "totalBytesRewritten": size}
        return _json({**done, "resource": _DESCRIBED})
    if query.get("alt") == ["media"]:
        return _content(request)
    return _json(_DESCRIBED)


_DESCRIBED = {"name": KEY, "size": str(len(DATA)), "generation": GENERATION, "crc32c": CRC}


def _json(value: Any) -> Answer:
    return Answer(headers={"Content-Type": "application/json"}, body=json.dumps(value).encode())


def _content(request: Recorded) -> Answer:
    headers = {"x-goog-generation": GENERATION, "x-goog-hash": f"crc32c={CRC}"}
    first, _, last = request.header("Range").removeprefix("bytes=").partition("-")
    if not first or not last:
        return Answer(headers=headers, body=DATA)
    headers["Content-Range"] = f"bytes {first}-{last}/{len(DATA)}"
    return Answer(206, headers, DATA[int(first) : int(last) + 1])


def _xml_answer(request: Recorded, query: Mapping[str, list[str]]) -> Answer:
    if request.method == "PUT":
        return Answer(headers={"ETag": TAG, "x-goog-hash": f"crc32c={CRC}"})
    if request.method == "DELETE":
        return Answer(204)
    if request.method == "GET":
        more = "" if "key-marker" in query else _MORE
        return _xml("ListMultipartUploadsResult", f"<EncodingType>url</EncodingType>{more}")
    if "uploads" in query:
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{UPLOAD.id}</UploadId>")
    headers = {"x-goog-generation": GENERATION, "x-goog-hash": f"crc32c={WHOLE}"}
    return _xml("CompleteMultipartUploadResult", f"<ETag>{TAG}</ETag>", headers)


_MORE = (
    "<IsTruncated>true</IsTruncated><NextKeyMarker>a%20b</NextKeyMarker>"
    "<NextUploadIdMarker>c+/d</NextUploadIdMarker>"
)


def _xml(root: str, content: str, headers: Mapping[str, str] | None = None) -> Answer:
    name = "http://s3.amazonaws.com/doc/2006-03-01/"
    return Answer(200, headers or {}, f'<{root} xmlns="{name}">{content}</{root}>'.encode())


def operations(folder: Path) -> Iterator[Operation]:
    """All of them, with several settings; ``folder`` is for files that the clients read."""
    account = _service_account(folder)
    with _clients({"GOOGLE_APPLICATION_CREDENTIALS": account}) as (client, store):
        bucket = client.bucket(BUCKET)
        yield from _writing("gcs", bucket, store, folder)
        yield _copying("gcs", bucket, store)
        yield from _reading("gcs", bucket, store)
    options = GCSOptions(
        user_project="payer",
        kms_key_name=KMS_KEY,
        storage_class="NEARLINE",
    )
    with _clients({"GOOGLE_APPLICATION_CREDENTIALS": account}, options) as (client, store):
        bucket, name = client.bucket(BUCKET, user_project="payer"), "gcs, all options"
        yield from _writing(name, bucket, store, folder, _with_all_options)
        yield _copying(name, bucket, store, _with_all_options)
        yield from _reading(name, bucket, store)
    with _clients({}, GCSOptions(anonymous=True)) as (client, store):
        yield from _reading("gcs, anonymous", client.bucket(BUCKET), store)


def _service_account(folder: Path) -> str:
    secret = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account",
        "project_id": "project",
        "private_key_id": "1",
        "private_key": secret.decode(),
        "client_email": "job@project.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": "https://oauth2.googleapis.com/token",
    }
    path = folder / "account.json"
    path.write_text(json.dumps(account))
    return str(path)


@contextlib.contextmanager
def _clients(
    variables: Mapping[str, str], options: GCSOptions | None = None
) -> Iterator[tuple[storage.Client, GCSStore]]:
    options = options or GCSOptions()
    # else a thread of the client's looks at the bucket whenever it likes
    quiet = {"DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA": "true"}
    with mock.patch.dict(os.environ, {**quiet, **variables}):
        make = storage.Client.create_anonymous_client if options.anonymous else storage.Client
        client, store = make(), GCSStore(BUCKET, Config(gcs=options))
        with contextlib.closing(client), contextlib.closing(store):
            yield client, store


def _plain(bucket: storage.Bucket) -> storage.Blob:
    blob = bucket.blob(KEY)
    blob.cache_control = "no-store"
    blob.metadata = {ATTEMPT: NAME}
    return blob


def _with_all_options(bucket: storage.Bucket) -> storage.Blob:
    blob = bucket.blob(KEY, kms_key_name=KMS_KEY)
    blob.cache_control = "no-store"
    blob.storage_class = "NEARLINE"
    blob.metadata = {ATTEMPT: NAME}
    return blob


def _writing(
    name: str,
    bucket: storage.Bucket,
    store: GCSStore,
    folder: Path,
    new: Callable[[storage.Bucket], storage.Blob] = _plain,
) -> Iterator[Operation]:
    """``new`` makes a blob with what new objects get."""
    binary = "application/octet-stream"

    def put(**condition: int) -> Any:
        return lambda: new(bucket).upload_from_string(
            DATA, content_type=binary, checksum="crc32c", **condition
        )

    def our_put(**condition: Any) -> Any:
        given = {"checksum": PART.checksum, "attempt": NAME, **condition}
        return lambda: store.put(KEY, [memoryview(DATA)], **given)

    yield Operation(f"{name}: put", put(), our_put())
    create_only = put(if_generation_match=0)
    yield Operation(f"{name}: put, create only", create_only, our_put(if_version=""))
    replace = put(if_generation_match=int(GENERATION))
    yield Operation(f"{name}: put, replace", replace, our_put(if_version=GENERATION))

    file = folder / "large"
    file.write_bytes(2 * DATA)

    def upload() -> None:
        transfer_manager.upload_chunks_concurrently(
            str(file),
            new(bucket),
            content_type=binary,
            chunk_size=len(DATA),
            worker_type=transfer_manager.THREAD,
            max_workers=1,
            checksum="crc32c",
        )

    yield Operation(
        f"{name}: create upload",
        upload,
        lambda: store.create_upload(KEY, UPLOAD.part_size),
        keep=lambda request: request.target.endswith("?uploads"),
    )
    yield Operation(
        f"{name}: part",
        upload,
        lambda: store.put_part(UPLOAD, 1, [memoryview(DATA)], checksum=PART.checksum),
        keep=lambda request: "partNumber=1" in request.target,
    )
    yield Operation(
        f"{name}: completion",
        upload,
        lambda: store.complete_upload(UPLOAD, [PART, Part(2, PART.size, TAG, PART.checksum)]),
        keep=lambda request: request.method == "POST" and "uploadId" in request.target,
    )
    # the client has no listing of uploads and aborts only what it began: as documented, see
    # https://cloud.google.com/storage/docs/xml-api/get-bucket-uploads and delete-multipart
    yield Operation(
        f"{name}: abort",
        lambda: _send(bucket, "DELETE", f"/{quote(KEY)}?uploadId={UPLOAD.id}"),
        lambda: store.abort_upload(UPLOAD),
    )
    yield Operation(f"{name}: delete", lambda: bucket.blob(KEY).delete(), lambda: store.delete(KEY))
    yield Operation(
        f"{name}: delete, pinned",
        lambda: bucket.blob(KEY).delete(if_generation_match=int(GENERATION)),
        lambda: store.delete(KEY, if_version=GENERATION),
    )


def _copying(
    name: str,
    bucket: storage.Bucket,
    store: GCSStore,
    new: Callable[[storage.Bucket], storage.Blob] = _plain,
) -> Operation:
    found = ObjectInfo(KEY, len(DATA), GENERATION)

    def copy() -> None:
        blob = new(bucket)
        blob.content_type = "application/octet-stream"
        generation = {"if_source_generation_match": int(GENERATION)}
        blob.rewrite(bucket.blob(KEY), if_generation_match=0, **generation)

    return Operation(
        f"{name}: copy",
        copy,
        lambda: store.copy(CopySource(store, found), KEY, attempt=NAME, if_version=""),
    )


def _reading(name: str, bucket: storage.Bucket, store: GCSStore) -> Iterator[Operation]:
    def their_read(**options: Any) -> Any:
        # anew: a blob remembers the generation that it has met
        return lambda: bucket.blob(KEY).download_as_bytes(**options)

    def read(version: str | None = None) -> None:
        store.get_range(KEY, 2, [memoryview(bytearray(3))], if_version=version)

    yield Operation(f"{name}: get", their_read(), lambda: store.get(KEY))
    span = {"start": 2, "end": 4, "checksum": None}
    yield Operation(f"{name}: range", their_read(**span), read)
    pinned = their_read(**span, if_generation_match=int(GENERATION))
    yield Operation(f"{name}: range, pinned", pinned, lambda: read(GENERATION))
    yield Operation(f"{name}: head", lambda: bucket.get_blob(KEY), lambda: store.head(KEY))
    yield Operation(
        f"{name}: list",
        lambda: list(bucket.list_blobs(prefix="run/a b+ü/")),
        lambda: list(store.list("run/a b+ü/")),
    )
    yield Operation(
        f"{name}: list a level",
        lambda: list(bucket.list_blobs(prefix="run/a b+ü/", delimiter="/")),
        lambda: list(store.list_level("run/a b+ü/")),
    )
    prefix = f"uploads&encoding-type=url&prefix={quote('run/a b+ü/', safe='')}"

    def list_uploads() -> None:
        _send(bucket, "GET", f"?{prefix}")
        _send(bucket, "GET", f"?{prefix}&key-marker=a%20b&upload-id-marker=c%2B%2Fd")

    yield Operation(
        f"{name}: list uploads", list_uploads, lambda: list(store.list_uploads("run/a b+ü/"))
    )


def _send(bucket: storage.Bucket, method: str, target: str) -> None:
    """A request that the client can't make, by its session."""
    payer = {"x-goog-user-project": bucket.user_project} if bucket.user_project else {}
    url = f"https://storage.googleapis.com/{bucket.name}{target}"
    bucket.client._http.request(method, url, headers=payer).raise_for_status()
