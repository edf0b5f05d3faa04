"""Checks in the bucket itself, with test objects, which are all deleted at the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial

from cloudckpt.checkpoint.commit import honours_conditions
from cloudckpt.checkpoint.objects import probe_name
from cloudckpt.config import MIB, Config, RetryPolicy
from cloudckpt.doctor.findings import Finding, Values, failed, ok, skipped, warning
from cloudckpt.errors import AccessDeniedError, ConnectionLostError, ObjectNotFoundError, StoreError
from cloudckpt.stores.base import ObjectInfo, ObjectStore, Upload, random_suffix
from cloudckpt.stores.rest import RestStore
from cloudckpt.transfer.deleting import delete_each
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.upload import only_if_new, put_whole
from cloudckpt.uri import CheckpointURI

__all__ = ["NEEDS", "Trials"]

_BYTES = 4096  # size of a small test object
_CLEANUP = RetryPolicy(attempts=8, base=0.2, cap=2.0, deadline=30.0)

_WRONG = "do not save there: bypass proxies on the way, or use another store or a newer version"
# these do not show whether the checksum was verified
_NO_WORD = (AccessDeniedError, ConnectionLostError)

_BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
NEEDS = {
    "list": {"s3": "s3:ListBucket", "gs": "storage.objects.list", "az": f"{_BLOBS}/read"},
    "write": {"s3": "s3:PutObject", "gs": "storage.objects.create", "az": f"{_BLOBS}/write"},
    "read": {"s3": "s3:GetObject", "gs": "storage.objects.get", "az": f"{_BLOBS}/read"},
    "conditions": {
        "s3": "s3:PutObject and s3:GetObject",
        "gs": "storage.objects.create and storage.objects.delete",  # replacing an object needs both
        "az": f"{_BLOBS}/write",
    },
    "multipart": {
        "s3": "s3:PutObject, s3:AbortMultipartUpload and s3:ListBucketMultipartUploads",
        "gs": "storage.multipartUploads.create, storage.multipartUploads.abort and "
        "storage.multipartUploads.list",
        "az": f"{_BLOBS}/write and {_BLOBS}/delete",
    },
}
"""The permission that each check needs, by URI scheme; other checks need that of ``write``."""


class Trials:
    """Checks in one bucket that do what saves and loads do.

    Each check writes its own objects, so that a failed check does not affect the others.

    Attributes:
        keys: The keys of the test objects that may have been written.
    """

    def __init__(self, store: ObjectStore, uri: CheckpointURI, config: Config, size: int) -> None:
        """Prepares the checks; `size` is the bytes of the object that measures the speed."""
        self._store = store
        self._uri = uri
        self._config = config
        self._size = size
        # a name that `sweep` recognizes
        self._start = uri.key(probe_name("doctor", random_suffix()))
        self._content = os.urandom(_BYTES)
        self._written: str | None = None  # the key of an object to read
        self.keys: list[str] = []
        self._uploads: list[Upload] = []
        self._folders = _missing_folders(uri)

    def list(self, retrier: Retrier) -> Finding:
        """Checks that the location can be listed, and that the bucket is in the expected region."""
        before = self._region
        first = retrier.call(self._first)
        found = "the location can be listed" + ("" if first else "; it is empty")
        if self._region != before:
            found += f"; the bucket is in {self._region}, not in {before or 'the default region'}"
            advice = f"set AWS_REGION={self._region}, or correct S3Options(region=) if that is set"
            return warning(found, advice, {"region": self._region})
        return ok(found)

    def write(self, retrier: Retrier) -> Finding:
        """Checks that an object can be written in one request."""
        key = self._key("object")
        self._put(retrier, key)
        self._written = key
        return ok("an object was written")

    def read(self, retrier: Retrier) -> Finding:
        """Checks that the object of `write`, or else the first in the location, can be read."""
        store, start = self._store, _BYTES // 4
        if self._written is None:
            found = retrier.call(self._first)
            if found is None or not found.size:
                return skipped(
                    "nothing could be read: the location, or the first object in it, is empty"
                )
            part = memoryview(bytearray(min(found.size, _BYTES)))
            retrier.call(lambda: store.get_range(found.key, 0, [part]))
            return ok(f"a range of {store.uri(found.key)} was read")
        key, part = self._written, memoryview(bytearray(_BYTES // 2))
        data, _ = retrier.call(lambda: store.get(key, limit=_BYTES))
        retrier.call(lambda: store.get_range(key, start, [part]))
        if data != self._content or part != self._content[start : start + part.nbytes]:
            return failed("the bytes that were read differ from those that were written", _WRONG)
        if isinstance(store, RestStore) and not retrier.call(lambda: store.head(key)).attempt:
            return warning(
                "an object was read, but the store dropped its metadata",
                "use a version of the store that keeps it: without metadata, cloudckpt can't tell "
                "after a lost response whose commit was stored",
            )
        return ok("an object was read, as a whole and by a range")

    def conditions(self, retrier: Retrier) -> Finding:
        """Checks that writes are refused if their condition does not hold."""
        store, key = self._store, self._key("conditions")
        self._put(retrier, key)
        if not honours_conditions(store, key, self._content, retrier):
            found = "the store ignores or refuses conditions of writes (If-None-Match, If-Match)"
            if self._config.conditional_writes == "off":
                return warning(found, "let one job at a time write to a location")
            return failed(
                found,
                "use a newer version of the store; or, if one job at a time writes to a location, "
                "set CLOUDCKPT_CONDITIONAL_WRITES=off",
            )
        return ok("conditional writes work: of two concurrent writers, one commits")

    def checksums(self, retrier: Retrier) -> Finding:
        """Checks that the store refuses a write with a wrong checksum."""
        store, kind = self._store, self._store.capabilities.checksum.name
        if not store.capabilities.verifies:
            return skipped("no checksum is sent; blocks are verified when they are read")
        wrong = partial(
            store.put,
            self._key("wrong"),
            [memoryview(self._content)],
            checksum=store.capabilities.checksum.of(self._content) ^ 1,
            if_version=only_if_new(store, self._config),
        )
        values: Values = {"checksum": kind}
        try:
            wrong()
        except _NO_WORD:
            raise
        except StoreError:
            return ok(f"the store verifies {kind}: it rejected a wrong checksum", values)
        return failed(
            f"the store accepts objects with a wrong {kind}",
            "set CLOUDCKPT_CHECKSUM=off to send no checksums: cloudckpt still verifies every "
            "block when it reads",
            values=values,
        )

    def multipart(self, retrier: Retrier) -> Finding:
        """Checks that an upload in parts can be begun, listed and aborted."""
        store, key = self._store, self._key("parts")
        upload = retrier.call(lambda: store.create_upload(key, _BYTES))
        self._uploads.append(upload)
        body = [memoryview(self._content)]
        checksum = store.capabilities.checksum.of(self._content)
        retrier.call(lambda: store.put_part(upload, 1, body, checksum=checksum))
        listed = [each.id for each in store.list_uploads(key, retrier.call)]
        retrier.call(lambda: store.abort_upload(upload))
        if upload.id in [each.id for each in store.list_uploads(key, retrier.call)]:
            return failed(
                "an aborted upload still exists",
                "use a newer version of the store, or set a lifecycle rule that aborts old uploads",
            )
        if upload.id not in listed:
            return warning(
                "the store does not list unfinished uploads",
                "set a lifecycle rule that aborts the unfinished uploads of killed saves: "
                "`cloudckpt sweep` can't find them",
            )
        return ok("a part was written; its upload was listed and aborted")

    def speed(self, retrier: Retrier) -> Finding:
        """Measures the speed of an upload and a download over one connection."""
        store, block = self._store, bytearray(os.urandom(min(self._size, MIB)))
        data = memoryview(block * (self._size // len(block)))
        checksum, only = store.capabilities.checksum.of(data), only_if_new(store, self._config)

        def send() -> tuple[str, float]:
            key = self._key(f"speed{random_suffix()}")  # a new key for each try
            return key, _seconds(lambda: store.put(key, [data], checksum=checksum, if_version=only))

        key, up = retrier.call(send)  # without the pauses between tries
        down = retrier.call(lambda: _seconds(lambda: store.get_range(key, 0, [data])))
        rates = {"up": data.nbytes / up, "down": data.nbytes / down}
        texts = [f"{rate / 1e6:,.1f} MB/s {way}" for way, rate in rates.items()]
        return ok(f"{', '.join(texts)} over one connection, with {data.nbytes / MIB:g} MiB", rates)

    @property
    def start(self) -> str:
        """The prefix of the URIs of all test objects."""
        return self._store.uri(self._start)

    def clean(self) -> Finding:
        """Deletes all test objects, uploads and new folders; reports objects and uploads left."""
        store, left = self._store, dict[str, StoreError]()
        retrier = Retrier(_CLEANUP)
        for upload in self._uploads:
            try:
                retrier.call(partial(store.abort_upload, upload))
            except ObjectNotFoundError:
                continue
            except StoreError as error:
                left[f"{upload.key} (an unfinished upload)"] = error
        left |= delete_each(store, self.keys, _CLEANUP, threads=4)
        # objects that arrived late, and uploads whose id was lost; a refused write left nothing
        with contextlib.suppress(Exception):
            there = [found.key for found in store.list(self._start)]
            left = {key: why for key, why in left.items() if key in there or key not in self.keys}
            for key in there:
                if key not in left:
                    store.delete(key)
            for upload in store.list_uploads(self._start):
                store.abort_upload(upload)
        for folder in self._folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        if not left:
            return ok("all test objects were deleted")
        return failed(
            f"{', '.join(map(store.uri, left))} can't be deleted: {next(iter(left.values()))}",
            f"delete the objects that begin with {self.start} yourself",
        )

    @property
    def _region(self) -> str:
        """The region of the bucket; empty if it is unknown, or the store has no regions."""
        return self._store.access.region if isinstance(self._store, RestStore) else ""

    def _first(self) -> ObjectInfo | None:
        """Returns the first object in the location; None if it is empty."""
        return next(iter(self._store.list(self._uri.key(""))), None)

    def _key(self, name: str) -> str:
        """Returns the key of a new test object, and records that it must be deleted."""
        key = f"{self._start}.{name}"
        self.keys.append(key)
        return key

    def _put(self, retrier: Retrier, key: str) -> None:
        """Writes a test object on the condition that it is new, which some policies demand."""
        only = only_if_new(self._store, self._config)
        put_whole(self._store, key, memoryview(self._content), retrier, if_version=only)


def _seconds(call: Callable[[], object]) -> float:
    """Calls a function; returns the duration of the call in seconds."""
    began = time.perf_counter()
    call()
    return max(time.perf_counter() - began, 1e-9)


def _missing_folders(uri: CheckpointURI) -> tuple[str, ...]:
    """Returns the folders of a local location that do not exist yet, innermost first."""
    folders = []
    path = uri.prefix
    while uri.scheme == "file" and not os.path.isdir(path):
        folders.append(path)
        path = os.path.dirname(path)
    return tuple(folders)
