"""The operations of Azure Blob Storage, by azure-storage-blob and by our store."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs

from azure.core import MatchConditions
from azure.identity import DefaultAzureCredential
from azure.storage.blob import BlobBlock, ContainerClient, StandardBlobTier

from cloudckpt import AzureOptions, Config
from cloudckpt.checksum import CRC64NVME
from cloudckpt.stores.azure.store import AzureStore, block_id
from cloudckpt.stores.base import ATTEMPT, CopySource, ObjectInfo, Part, Upload

from .differences import Operation
from .recorder import Answer, Recorded
from .shared_key import ACCOUNT
from .shared_key import KEY as ACCOUNT_KEY

__all__ = ["answer", "operations"]

CONTAINER, KEY = "container", "run/a b/größe+%2F&=;#1~.metadata"
DATA = b"what is in the object"
TAG = '"0x8D0123456789ABC"'
NAME = "0123456789abcdef"  # of a write
UPLOAD = Upload(KEY, NAME, 8, attempt=NAME)
SAS = "sv=2024-11-04&sr=c&sp=rwdl&se=2099-01-01T00%3A00%3A00Z&sig=c2lnbmF0dXJl%2B%2F%3D"
_LOGIN = "login.microsoftonline.com"

_KEY = {"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_KEY": ACCOUNT_KEY}
_SAS = {"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_SAS_TOKEN": SAS}
_TOKEN = {
    "AZURE_STORAGE_ACCOUNT": ACCOUNT,
    "AZURE_TENANT_ID": "11111111-2222-3333-4444-555555555555",
    "AZURE_CLIENT_ID": "66666666-7777-8888-9999-000000000000",
    "AZURE_CLIENT_SECRET": "a secret",
}


def answer(request: Recorded) -> Answer:
    """What Azure says, as far as both clients want to hear it."""
    path, _, text = request.target.partition("?")
    query = parse_qs(text, keep_blank_values=True)
    if request.host == _LOGIN:
        return _sign_in(path)
    written = {"ETag": TAG, "Last-Modified": "Sun, 22 Nov 2026 04:00:00 GMT"}
    if request.method == "DELETE":
        return Answer(202)
    if request.method == "PUT":
        copies = "comp" not in query and request.header("x-ms-copy-source")
        return Answer(202 if copies else 201, {**written, "x-ms-copy-status": "success"})
    if query.get("comp") == ["list"]:
        # the client takes prefix and page size of the next request from here
        asked = f"<Prefix>{query['prefix'][0]}</Prefix><MaxResults>1000</MaxResults>"
        more = "" if "marker" in query else "a+/b="
        return _xml(
            f"<EnumerationResults>{asked}<Blobs/><NextMarker>{more}</NextMarker>",
            "</EnumerationResults>",
        )
    if query.get("comp") == ["blocklist"]:
        block = f"<Block><Name>{block_id(UPLOAD, 1)}</Name><Size>8</Size></Block>"
        return _xml(f"<BlockList><UncommittedBlocks>{block}</UncommittedBlocks>", "</BlockList>")
    return _content(request, written)


def _sign_in(path: str) -> Answer:
    """What Microsoft Entra ID says."""
    place = f"https://{_LOGIN}/{_TOKEN['AZURE_TENANT_ID']}"
    if path.endswith("/token"):
        said: dict[str, Any] = {"token_type": "Bearer", "expires_in": 3599, "access_token": "token"}
    elif path.endswith("/instance"):
        configuration = f"{place}/v2.0/.well-known/openid-configuration"
        said = {"tenant_discovery_endpoint": configuration, "metadata": []}
    else:
        said = {
            "issuer": f"{place}/v2.0",
            "authorization_endpoint": f"{place}/oauth2/v2.0/authorize",
            "token_endpoint": f"{place}/oauth2/v2.0/token",
        }
    return Answer(headers={"Content-Type": "application/json"}, body=json.dumps(said).encode())


def _xml(*pieces: str) -> Answer:
    text = "".join(['<?xml version="1.0" encoding="utf-8"?>', *pieces])
    return Answer(headers={"Content-Type": "application/xml"}, body=text.encode())


def _content(request: Recorded, headers: Mapping[str, str]) -> Answer:
    headers = {**headers, "x-ms-blob-type": "BlockBlob"}
    span = request.header("Range") or request.header("x-ms-range")
    first, _, last = span.removeprefix("bytes=").partition("-")
    if not first:
        return Answer(headers=headers, body=DATA)
    part = DATA[int(first) : int(last) + 1]
    where = f"bytes {first}-{int(first) + len(part) - 1}/{len(DATA)}"
    return Answer(206, {**headers, "Content-Range": where}, part)


def operations(folder: Path) -> Iterator[Operation]:
    """All of them, with several settings."""
    with _clients(_KEY, ACCOUNT_KEY) as (client, store):
        yield from _writing("azure, account key", client, store)
        yield from _reading("azure, account key", client, store)
    with _clients(_SAS, SAS) as (client, store):
        yield from _writing("azure, signature", client, store)
        yield from _reading("azure, signature", client, store)
    options = AzureOptions(
        access_tier="Cool", encryption_scope="scope", tags={"team": "nlp + more", "run": "7"}
    )
    with _clients(_TOKEN, DefaultAzureCredential, options) as (client, store):
        new = {
            "standard_blob_tier": StandardBlobTier.COOL,
            "tags": {"team": "nlp + more", "run": "7"},
        }
        name = "azure, token, all options"
        yield from _writing(name, client, store, {"encryption_scope": "scope"}, new)
        yield from _reading(name, client, store)
    with _clients(_KEY, None, AzureOptions(anonymous=True)) as (client, store):
        yield from _reading("azure, anonymous", client, store)


@contextlib.contextmanager
def _clients(
    variables: Mapping[str, str], credential: Any, options: AzureOptions | None = None
) -> Iterator[tuple[ContainerClient, AzureStore]]:
    with mock.patch.dict(os.environ, variables), contextlib.ExitStack() as stack:
        given = stack.enter_context(credential()) if callable(credential) else credential
        url = f"https://{ACCOUNT}.blob.core.windows.net"
        client = ContainerClient(url, CONTAINER, credential=given)
        store = AzureStore(CONTAINER, Config(azure=options or AzureOptions()))
        with client, contextlib.closing(store):
            yield client, store


def _writing(
    name: str,
    client: ContainerClient,
    store: AzureStore,
    scope: Mapping[str, Any] | None = None,
    new: Mapping[str, Any] | None = None,
) -> Iterator[Operation]:
    """``scope`` is said of all that is written, ``new`` of new blobs."""
    scope = scope or {}
    new = {**scope, "metadata": {ATTEMPT: NAME}, **(new or {})}
    blob = client.get_blob_client(KEY)
    checksum = CRC64NVME.of(DATA)
    unchanged = {"etag": TAG, "match_condition": MatchConditions.IfNotModified}

    def put(**condition: Any) -> Any:
        return lambda: blob.upload_blob(DATA, **new, **condition)

    def our_put(**condition: Any) -> Any:
        given = {"checksum": checksum, "attempt": NAME, **condition}
        return lambda: store.put(KEY, [memoryview(DATA)], **given)

    yield Operation(f"{name}: put", put(overwrite=True), our_put())
    create_only = put(overwrite=False)
    yield Operation(f"{name}: put, create only", create_only, our_put(if_version=""))
    replace = put(overwrite=True, **unchanged)
    yield Operation(f"{name}: put, replace", replace, our_put(if_version=TAG))

    ids = [block_id(UPLOAD, number) for number in (1, 2)]
    yield Operation(
        f"{name}: part",
        # the client encodes what is base64 already, so it is given what that is of
        lambda: blob.stage_block(f"{UPLOAD.id}00001", DATA, **scope),
        lambda: store.put_part(UPLOAD, 1, [memoryview(DATA)], checksum=checksum),
    )
    parts = [Part(number, len(DATA), name, checksum) for number, name in enumerate(ids, 1)]
    blocks = [BlobBlock(f"{UPLOAD.id}0000{part.number}") for part in parts]
    yield Operation(
        f"{name}: completion",
        lambda: blob.commit_block_list(blocks, **new),
        lambda: store.complete_upload(UPLOAD, parts),
    )

    found, source = ObjectInfo(KEY, 2 * len(DATA), TAG), f"{blob.url.partition('?')[0]}?a=signature"
    pinned = {"source_etag": TAG, "source_match_condition": MatchConditions.IfNotModified}
    missing = {"match_condition": MatchConditions.IfMissing}
    yield Operation(
        f"{name}: copy",
        lambda: blob.start_copy_from_url(source, requires_sync=True, **pinned, **missing, **new),
        lambda: store.copy(CopySource(store, found), KEY, attempt=NAME, if_version=""),
    )
    yield Operation(
        f"{name}: copied part",
        lambda: blob.stage_block_from_url(
            f"{UPLOAD.id}00001", source, source_offset=3, source_length=len(DATA) - 3, **scope
        ),
        lambda: store.copy_part(CopySource(store, found), UPLOAD, 1, 3, len(DATA)),
    )
    yield Operation(
        f"{name}: blocks, as abort lists them",
        lambda: blob.get_block_list("uncommitted"),
        lambda: store.abort_upload(UPLOAD),
        keep=lambda request: "comp=blocklist" in request.target,
    )
    yield Operation(
        f"{name}: delete",
        lambda: client.delete_blob(KEY, delete_snapshots="include"),
        lambda: store.delete(KEY),
    )
    unchanged = {"etag": TAG, "match_condition": MatchConditions.IfNotModified}
    yield Operation(
        f"{name}: delete, pinned",
        lambda: client.delete_blob(KEY, delete_snapshots="include", **unchanged),
        lambda: store.delete(KEY, if_version=TAG),
    )


def _reading(name: str, client: ContainerClient, store: AzureStore) -> Iterator[Operation]:
    blob = client.get_blob_client(KEY)
    prefix = "run/a b+ü/"

    def read(version: str | None = None) -> None:
        store.get_range(KEY, 2, [memoryview(bytearray(3))], if_version=version)

    unchanged = {"etag": TAG, "match_condition": MatchConditions.IfNotModified}
    yield Operation(f"{name}: get", lambda: blob.download_blob().readall(), lambda: store.get(KEY))
    yield Operation(f"{name}: range", lambda: blob.download_blob(2, 3).readall(), read)
    yield Operation(
        f"{name}: range, pinned",
        lambda: blob.download_blob(2, 3, **unchanged).readall(),
        lambda: read(TAG),
    )
    yield Operation(f"{name}: head", blob.get_blob_properties, lambda: store.head(KEY))
    yield Operation(
        f"{name}: list",
        lambda: list(client.list_blobs(prefix, results_per_page=1000)),
        lambda: list(store.list(prefix)),
    )
    yield Operation(
        f"{name}: list a level",
        lambda: list(client.walk_blobs(prefix, delimiter="/", results_per_page=1000)),
        lambda: list(store.list_level(prefix)),
    )
    yield Operation(
        f"{name}: list uploads",
        lambda: list(
            client.list_blobs(prefix, include=["uncommittedblobs"], results_per_page=1000)
        ),
        lambda: list(store.list_uploads(prefix)),
    )
