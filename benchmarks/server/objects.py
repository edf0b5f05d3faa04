"""What the server keeps: buckets, objects and uploads, in memory."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from dataclasses import dataclass, field

from benchmarks.server.wire import ByteSource

SINK_PREFIX = "sink"
"""Buckets whose name starts so count large bodies and drop them; all others keep every byte."""

SINK_KEEPS_BELOW = 8 * 1024 * 1024
"""Bytes under which a sink bucket still keeps a body: metadata, small objects."""

_INLINE = 64 * 1024

_etags = itertools.count(1)


def next_etag() -> str:
    """Returns a new quoted ETag; hashing bodies would make the server the bottleneck."""
    return f'"{next(_etags):032x}"'


class Blob:
    """The bytes of one body: inline when small, else in a memory file that sendfile can send.

    A sunk blob knows its length alone.
    """

    def __init__(self, length: int, *, data: bytes | None = None, fd: int | None = None) -> None:
        self.length = length
        self.data = data
        self.fd = fd

    @property
    def sunk(self) -> bool:
        """Whether the bytes were dropped."""
        return self.length > 0 and self.data is None and self.fd is None

    @classmethod
    def receive(cls, source: ByteSource, length: int, *, sink: bool) -> Blob:
        """Reads a body of `length` bytes from `source`."""
        if sink and length >= SINK_KEEPS_BELOW:
            source.skip(length)
            return cls(length)
        if length <= _INLINE:
            buffer = bytearray(length)
            source.readinto(memoryview(buffer))
            return cls(length, data=bytes(buffer))
        fd = os.memfd_create("blob")
        blob = cls(length, fd=fd)
        os.ftruncate(fd, length)
        with mmap.mmap(fd, length) as mapped, memoryview(mapped) as view:
            source.readinto(view)
        return blob

    def __del__(self) -> None:
        if self.fd is not None:
            os.close(self.fd)


@dataclass(frozen=True)
class StoredObject:
    """A committed object: its bodies in order, and what HEAD says of it."""

    key: str
    blobs: tuple[Blob, ...]
    headers: tuple[tuple[str, str], ...] = ()
    etag: str = field(default_factory=next_etag)
    modified: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(blob.length for blob in self.blobs)

    @property
    def sunk(self) -> bool:
        """Whether any of its bytes were dropped."""
        return any(blob.sunk for blob in self.blobs)


@dataclass
class Upload:
    """An open multipart upload."""

    bucket: str
    key: str
    headers: tuple[tuple[str, str], ...]
    started: float = field(default_factory=time.time)
    parts: dict[int, tuple[str, Blob]] = field(default_factory=dict)
    """ETag and bytes by number."""


class PreconditionError(Exception):
    """A conditional write whose condition does not hold."""


class Buckets:
    """All objects and uploads. Buckets need no creation: each name exists."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, dict[str, StoredObject]] = {}
        self._uploads: dict[str, Upload] = {}
        self._upload_ids = itertools.count(1)

    def get(self, bucket: str, key: str) -> StoredObject | None:
        """Returns the object, or None."""
        return self._objects.get(bucket, {}).get(key)

    def put(
        self, bucket: str, stored: StoredObject, if_match: str | None, if_none_match: str | None
    ) -> None:
        """Commits an object if its conditions hold, in one step against other writers.

        Raises:
            PreconditionError: If the object exists and must not, or is another than `if_match`.
            KeyError: If `if_match` is given and there is no such object.
        """
        with self._lock:
            objects = self._objects.setdefault(bucket, {})
            present = objects.get(stored.key)
            if if_none_match == "*" and present is not None:
                raise PreconditionError
            if if_match is not None:
                if present is None:
                    raise KeyError(stored.key)
                if present.etag != if_match:
                    raise PreconditionError
            objects[stored.key] = stored

    def delete(self, bucket: str, key: str) -> None:
        """Deletes the object, if there is one."""
        with self._lock:
            self._objects.get(bucket, {}).pop(key, None)

    def in_order(self, bucket: str) -> list[StoredObject]:
        """Returns the bucket's objects in the order of their keys' UTF-8 bytes."""
        with self._lock:
            objects = list(self._objects.get(bucket, {}).values())
        return sorted(objects, key=lambda stored: stored.key.encode())

    def open_upload(self, bucket: str, key: str, headers: tuple[tuple[str, str], ...]) -> str:
        """Starts a multipart upload and returns its id."""
        with self._lock:
            upload_id = f"upload-{next(self._upload_ids):08d}"
            self._uploads[upload_id] = Upload(bucket, key, headers)
        return upload_id

    def upload(self, upload_id: str) -> Upload | None:
        """Returns the open upload, or None."""
        return self._uploads.get(upload_id)

    def close_upload(self, upload_id: str) -> Upload | None:
        """Forgets the upload, and returns it if it was open."""
        with self._lock:
            return self._uploads.pop(upload_id, None)

    def uploads(self, bucket: str) -> list[tuple[str, Upload]]:
        """Returns the bucket's open uploads with their ids."""
        with self._lock:
            return [(i, upload) for i, upload in self._uploads.items() if upload.bucket == bucket]

    def clear(self, bucket: str | None = None) -> None:
        """Drops every object and upload of `bucket`, or of all."""
        with self._lock:
            if bucket is None:
                self._objects.clear()
                self._uploads.clear()
                return
            self._objects.pop(bucket, None)
            self._uploads = {i: u for i, u in self._uploads.items() if u.bucket != bucket}
