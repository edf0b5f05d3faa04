"""``az://``: Azure Blob Storage.

Azure's SDKs find the credentials and endpoint; all requests go through
:mod:`cloudckpt.stores.http.client`. A multipart upload sends the blocks of a block blob, with
identifiers unique to the upload, and then the block list that makes the blob.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import quote, unquote, urlencode
from xml.etree.ElementTree import Element

from cloudckpt.checksum import CRC64NVME
from cloudckpt.config import Config
from cloudckpt.errors import (
    AccessDeniedError,
    CredentialsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ServerError,
    StoreError,
)
from cloudckpt.stores.azure.access import ContainerAccess, Secret
from cloudckpt.stores.azure.errors import from_answer
from cloudckpt.stores.azure.names import check_blob
from cloudckpt.stores.base import (
    Body,
    CopySource,
    ObjectInfo,
    ObjectStore,
    Part,
    Progress,
    Retry,
    Upload,
    once,
    random_suffix,
)
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.stores.http.client import whole_number
from cloudckpt.stores.redaction import excerpt
from cloudckpt.stores.rest import UNRESERVED, Marks, Page, RestStore, encode_query, http_date
from cloudckpt.stores.xml_api import text, unqualified

__all__ = ["AzureStore"]

# https://learn.microsoft.com/azure/storage/blobs/scalability-targets
_MAX_PUT = 5000 * 1024**2
_MAX_BLOCK = 4000 * 1024**2
_MAX_BLOCKS = 50_000  # of a blob
_MAX_COPY = 256 * 1024**2  # of one Copy Blob From URL request
_BLOBS_PER_PAGE = "1000"

# block ids consist of the upload's id and the part number; all ids of a blob must have equal length
_UPLOAD_ID = len(random_suffix())
_NUMBER = len(f"{_MAX_BLOCKS}")


class AzureStore(RestStore):
    """A container of an Azure storage account, or of the emulator Azurite."""

    access: ContainerAccess
    metadata_prefix = "x-ms-meta-"

    def __init__(self, container: str, config: Config, host: str = "", root: str = "") -> None:
        """Opens a container.

        Args:
            container: The container's name.
            config: The options.
            host: The blob endpoint in the URI; empty if the URI has none.
            root: The container's URI for messages; by default ``az://container``.
        """
        self.access = ContainerAccess(container, host, config, root or f"az://{container}")
        super().__init__(root or f"az://{container}", self.access)
        options = config.azure
        is_azure = self.access.is_azure
        self._checksums = is_azure if config.checksum == "auto" else config.checksum == "on"
        self.capabilities = Capabilities(
            conditional_writes=is_azure or None,
            conditional_deletes=is_azure,
            min_part_size=1,
            max_part_size=_MAX_BLOCK,
            max_parts=_MAX_BLOCKS,
            max_put_size=_MAX_PUT,
            checksum=CRC64NVME,
            verifies=self._checksums,
            create_only=is_azure,
            max_copy_size=_MAX_COPY,
            copies_parts=is_azure,  # Azurite can't
        )
        self._scope = _present({"x-ms-encryption-scope": options.encryption_scope})
        tags = urlencode(options.tags, quote_via=quote) or None
        given = {"x-ms-access-tier": options.access_tier, "x-ms-tags": tags}
        self._blob_headers = {**self._scope, **_present(given)}
        # with the attempt's, they replace the source's metadata, which would be copied otherwise
        self.copy_headers = {**self._blob_headers, "x-ms-requires-sync": "True"}
        self._begun: dict[str, Upload] = {}
        self._aborted: set[str] = set()

    def new_object_headers(self, checksum: int) -> dict[str, str]:
        return {"x-ms-blob-type": "BlockBlob", **self._blob_headers, **self._checksum(checksum)}

    # uploads in parts

    def create_upload(self, key: str, part_size: int) -> Upload:
        """Returns an upload with a new id; sends nothing: Azure begins it with the first block.

        Raises:
            InvalidRequestError: If Azure would change the key.
        """
        check_blob(self.root, key)
        name = random_suffix()
        upload = Upload(key, name, part_size, attempt=name)
        self._begun[upload.id] = upload
        return upload

    def put_part(
        self,
        upload: Upload,
        number: int,
        body: Body,
        *,
        checksum: int,
        progress: Progress | None = None,
    ) -> Part:
        self._check_open(upload)
        block = block_id(upload, number)
        url = self.object_url(upload.key, {"comp": "block", "blockid": block})
        headers = {**self._scope, **self._checksum(checksum)}
        with self.exchange("PUT", url, headers, body, progress, key=upload.key):
            return Part(number, sum(map(len, body)), block, checksum)

    def complete_upload(
        self, upload: Upload, parts: Sequence[Part], *, if_version: str | None = None
    ) -> ObjectInfo:
        self._check_open(upload)
        root = ElementTree.Element("BlockList")
        for part in parts:
            ElementTree.SubElement(root, "Uncommitted").text = part.tag
        body = [memoryview(ElementTree.tostring(root, "utf-8", xml_declaration=True))]
        checksum = self._checksum(CRC64NVME.of(body[0]))
        headers = {"Content-Type": "application/xml", **self._blob_headers, **checksum}
        headers |= self.write_headers(upload.attempt, if_version)
        url = self.object_url(upload.key, {"comp": "blocklist"})
        size = sum(part.size for part in parts)
        with self.exchange("PUT", url, headers, body, key=upload.key, is_long=True) as reply:
            tag = reply.headers.get("ETag")
        self._begun.pop(upload.id, None)
        return ObjectInfo(upload.key, size, self.tag_of(tag, upload.key))

    def copies_from(self, source: ObjectStore) -> bool:
        return isinstance(source, AzureStore) and self.access.reaches(source.access)

    def copy_part(
        self, source: CopySource, upload: Upload, number: int, start: int, stop: int
    ) -> Part:
        self._check_open(upload)
        tag = block_id(upload, number)
        url = self.object_url(upload.key, {"comp": "block", "blockid": tag})
        headers = {**self._scope, "x-ms-source-range": f"bytes={start}-{stop - 1}"}
        _, crc = self._copied(source, upload.key, url, headers)
        return Part(number, stop - start, tag, crc)

    def _copied(
        self, source: CopySource, key: str, url: str, headers: Mapping[str, str]
    ) -> tuple[str | None, int | None]:
        assert isinstance(source.store, AzureStore)
        with self._naming_source(source):
            origin, authorization = source.store.access.as_source(source.info.key)
            wanted = {
                **headers,
                "x-ms-copy-source": origin,
                "x-ms-source-if-match": source.info.version,
                **_present({"x-ms-copy-source-authorization": authorization}),
            }
            with self.exchange("PUT", url, wanted, key=key, is_long=True) as reply:
                status = reply.headers.get("x-ms-copy-status")
                if "x-ms-requires-sync" in headers and status != "success":  # not of a block
                    raise ServerError(
                        "the store responded before it had copied the blob (its "
                        f"x-ms-copy-status: {excerpt(status or 'missing')}), so it is unknown "
                        "whether the copy will be complete; copy again"
                    )
                spelled = reply.headers.get("x-ms-content-crc64")  # base64, little-endian
                crc = int.from_bytes(base64.b64decode(spelled), "little") if spelled else None
                return reply.headers.get("ETag"), crc

    def abort_upload(self, upload: Upload) -> None:
        """Discards the uncommitted blocks of a new blob, unless they may belong to other uploads.

        Deleting a blob that was never committed discards all of its blocks at once, as AzCopy does.
        Azure has no precondition that would spare a blob committed in the meantime, so the check is
        made last, and if another upload may be about to commit, nothing is deleted. The remaining
        blocks, and those that would replace an existing blob, are discarded by the next write of
        the blob, or after a week.
        """
        self._aborted.add(upload.id)
        self._begun.pop(upload.id, None)
        uploads = self._uploads_of(upload.key)
        if not uploads or not self._aborted.issuperset(uploads):
            return
        try:
            self.head(upload.key)
        except ObjectNotFoundError:
            self.delete(upload.key)

    def list_uploads(self, prefix: str, retry: Retry = once) -> Iterator[Upload]:
        """Yields uploads that have sent blocks of a new blob, and all open uploads of this process.

        Only keys that begin with `prefix` count. Uploads by other processes that would replace a
        blob are left out: finding them would take a request for each blob.
        """
        known = list(self._begun.values())  # a copy, as other threads begin and end uploads
        begun = {upload.id: upload for upload in known if upload.key.startswith(prefix)}
        ask = partial(self._page, prefix, "", include="uncommittedblobs")
        for blobs, _ in self._all_pages(prefix, ask, retry):
            for blob in blobs:
                if blob.size:
                    continue
                for upload_id in retry(partial(self._uploads_of, blob.key)):
                    yield begun.pop(upload_id, Upload(blob.key, upload_id, 0))
        yield from begun.values()

    def _uploads_of(self, key: str) -> list[str]:
        """Returns the ids of the uploads that have sent uncommitted blocks for a blob, if any."""
        url = self.object_url(key, {"comp": "blocklist", "blocklisttype": "uncommitted"})
        try:
            with self.exchange("GET", url, {}, key=key) as reply:
                page = unqualified(reply.read_all(), "BlockList")
                blocks = page.iterfind("UncommittedBlocks/Block")
                return sorted({_upload_of(text(block, "Name")) for block in blocks})
        except ObjectNotFoundError:
            return []  # completed or aborted since the listing

    def _check_open(self, upload: Upload) -> None:
        """Raises ObjectNotFoundError if this process aborted the upload: a part would revive it."""
        if upload.id in self._aborted:
            why = "the upload was aborted before, so nothing was sent; save again"
            raise ObjectNotFoundError(why, uri=self.uri(upload.key))

    # head, list and delete

    def head(self, key: str) -> ObjectInfo:
        # unlike S3, Azure names the reason of a failure in a header, also for HEAD
        with self.exchange("HEAD", self.object_url(key), {}, key=key) as reply:
            if reply.headers.get("x-ms-meta-hdi_isfolder") == "true":
                why = "this is a directory, not a blob; give the location of a blob"
                raise ObjectNotFoundError(why, uri=self.uri(key))
            return self._described(reply, key, whole_number(reply.headers.get("Content-Length")))

    def _page(
        self, prefix: str, delimiter: str, marks: Marks, include: str = ""
    ) -> tuple[Page, Marks | None]:
        """Requests the page of a listing that begins at `marks`.

        If `include` is "uncommittedblobs", blobs that have only uncommitted blocks are listed, too.

        Returns:
            The page, and the marks of the next page, which are None after the last one.
        """
        query = {
            "restype": "container",
            "comp": "list",
            "maxresults": _BLOBS_PER_PAGE,
            "prefix": prefix,
            "delimiter": delimiter,
            "include": include,
            "marker": marks[0] if marks else "",
        }
        given = {name: value for name, value in query.items() if value}
        url = f"{self.access.url}?{encode_query(given)}"
        with self.exchange("GET", url, {}, key=prefix) as reply:
            page = unqualified(reply.read_all(), "EnumerationResults")
            blobs, folders = list[ObjectInfo](), list[str]()
            for blob in page.iterfind("Blobs/Blob"):
                properties = blob.find("Properties")
                # accounts with a hierarchical namespace also list directories
                if properties is None or text(properties, "ResourceType") == "directory":
                    continue
                # a blob without committed content may have no length
                size = whole_number(text(properties, "Content-Length") or ("0" if include else ""))
                tag = text(properties, "Etag").strip('"')
                modified = http_date(text(properties, "Last-Modified"))
                blobs.append(ObjectInfo(_name(blob), size, f'"{tag}"', modified=modified))
            for folder in page.iterfind("Blobs/BlobPrefix"):
                folders.append(_name(folder))
            marker = page.findtext("NextMarker")
            return (blobs, folders), (marker,) if marker else None

    def _delete(self, key: str, if_version: str | None) -> None:
        headers = {"x-ms-delete-snapshots": "include", **_present({"If-Match": if_version})}
        try:
            with self.exchange("DELETE", self.object_url(key), headers, key=key):
                pass
        except ObjectNotFoundError:
            pass
        except PreconditionFailedError:
            # a missing blob also fails the condition
            with contextlib.suppress(ObjectNotFoundError):
                self.head(key)
                raise

    # building requests

    def object_url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        check_blob(self.root, key)
        url = f"{self.access.url}/{quote(key, safe=UNRESERVED)}"
        return f"{url}?{encode_query(query)}" if query else url

    def failure(
        self, status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
    ) -> StoreError:
        return from_answer(status, headers, body, action, uri)

    @property
    def renewable(self) -> tuple[type[StoreError], ...]:  # type: ignore[override]
        # Some refusals of an invalid signature have the code of a missing permission: all of them
        # in Azurite, in Azure those after a stored policy was replaced. Looking the credentials up
        # again costs little.
        is_given = isinstance(self.access.credentials.current, Secret)
        return (CredentialsError, AccessDeniedError) if is_given else (CredentialsError,)

    def _checksum(self, crc64: int) -> dict[str, str]:
        if not self._checksums:
            return {}
        # little-endian, unlike a CRC64NVME in a header of S3
        spelled = base64.b64encode(CRC64NVME.pack([crc64])).decode("ascii")
        return {"x-ms-content-crc64": spelled}


def block_id(upload: Upload, number: int) -> str:
    """Returns the identifier of an upload's block `number`; no other upload's block has it."""
    return base64.b64encode(f"{upload.id}{number:0{_NUMBER}}".encode("ascii")).decode("ascii")


def _upload_of(block: str) -> str:
    """Returns the id of the upload that sent a block; the block's own id if that is unknown."""
    try:
        name = base64.b64decode(block).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return block
    return name[:_UPLOAD_ID] if len(name) == _UPLOAD_ID + _NUMBER else block


def _present(headers: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if value is not None}


def _name(blob: Element) -> str:
    """Returns the name of a listed blob, decoded if Azure encoded it for XML; empty if missing."""
    element = blob.find("Name")
    if element is None:
        return ""
    name = element.text or ""
    return unquote(name) if element.get("Encoded") == "true" else name
