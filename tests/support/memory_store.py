"""``memory://name``: a store in the process of a test, known to URIs once this is imported."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cloudckpt import uri as uris
from cloudckpt.errors import ObjectNotFoundError, PreconditionFailedError, RangeNotSatisfiableError
from cloudckpt.stores import registry
from cloudckpt.stores.base import (
    MOST_READ,
    ObjectInfo,
    ObjectStore,
    Part,
    Upload,
    nbytes,
    once,
    random_suffix,
)
from cloudckpt.stores.capabilities import Capabilities


class MemoryObject(NamedTuple):
    """An object: its bytes, version and attempt, and when it was written, in seconds since 1970."""

    data: bytes
    version: str
    modified: float
    attempt: str = ""


@dataclass
class _Bucket:
    objects: dict[str, MemoryObject] = field(default_factory=dict)
    uploads: dict[str, tuple[Upload, dict[int, bytes]]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_buckets: dict[str, _Bucket] = {}


class MemoryStore(ObjectStore):
    """Objects in a dict that all stores of the same name in this process share."""

    capabilities = Capabilities(
        conditional_writes=True,
        create_only=True,
        min_part_size=1,
        max_part_size=5 * 1024**3,
        max_parts=10_000,
        max_put_size=5 * 1024**3,
        max_copy_size=5 * 1024**3,
        copies_parts=True,
    )

    def __init__(self, name):
        self.root = f"memory://{name}"
        self._bucket = _buckets.setdefault(name, _Bucket())

    def put(self, key, body, *, checksum, attempt="", if_version=None, progress=None):
        data = b"".join(body)
        if progress is not None:
            progress(len(data))
        with self._bucket.lock:
            held = self._bucket.objects.get(key)
            if if_version is not None and if_version != (held.version if held else ""):
                raise self._refusal("the object was replaced, or exists already", key)
            version = str(next(self._bucket.versions))
            self._bucket.objects[key] = MemoryObject(data, version, time.time(), attempt)
        return ObjectInfo(key, len(data), version)

    def create_upload(self, key, part_size):
        with self._bucket.lock:
            number = str(next(self._bucket.versions))
            upload = Upload(key, number, part_size, time.time(), attempt=random_suffix())
            self._bucket.uploads[upload.id] = (upload, {})
        return upload

    def put_part(self, upload, number, body, *, checksum, progress=None):
        data = b"".join(body)
        if progress is not None:
            progress(len(data))
        with self._bucket.lock:
            self._parts(upload)[number] = data
        return Part(number, len(data), str(number), checksum)

    def complete_upload(self, upload, parts, *, if_version=None):
        with self._bucket.lock:
            held = self._parts(upload)
            data = b"".join(held[part.number] for part in parts)
            # not the method of a subclass: nothing is sent
            info = MemoryStore.put(
                self,
                upload.key,
                [memoryview(data)],
                checksum=0,
                attempt=upload.attempt,
                if_version=if_version,
            )
            del self._bucket.uploads[upload.id]
        return info

    def copies_from(self, source):
        return isinstance(source, MemoryStore)

    def copy(self, source, key, **options):
        data, checksum = self._copied(source, 0, source.info.size)
        info = self.put(key, [data], checksum=checksum, **options)
        return replace(info, checksum=checksum)

    def copy_part(self, source, upload, number, start, stop):
        data, checksum = self._copied(source, start, stop)
        return self.put_part(upload, number, [data], checksum=checksum)

    def _copied(self, source, start, stop):
        """Bytes of another object, and their checksum."""
        source, found = source.store, source.info
        data = memoryview(bytearray(stop - start))
        if data.nbytes:
            source.get_range(found.key, start, [data], if_version=found.version)
        elif source.head(found.key) != found:
            raise PreconditionFailedError("the object was replaced", uri=source.uri(found.key))
        return data, self.capabilities.checksum.of(data)

    def abort_upload(self, upload):
        with self._bucket.lock:
            self._bucket.uploads.pop(upload.id, None)

    def list_uploads(self, prefix, retry=once):
        with self._bucket.lock:
            held = [upload for upload, _ in self._bucket.uploads.values()]
        return (upload for upload in held if upload.key.startswith(prefix))

    def get(self, key, *, limit=MOST_READ):
        data, version, *_ = self._held(key)
        self.check_size(key, len(data), limit)
        return bytearray(data), ObjectInfo(key, len(data), version)

    def get_range(self, key, start, into, *, if_version=None, progress=None):
        data, version, *_ = self._held(key)
        if if_version is not None and version != if_version:
            raise PreconditionFailedError("the object was replaced", uri=self.uri(key))
        if start + nbytes(into) > len(data):
            raise RangeNotSatisfiableError(
                f"the range from {start} is longer than the object of {len(data)} bytes",
                uri=self.uri(key),
            )
        for view in into:
            view[:] = data[start : start + view.nbytes]
            start += view.nbytes
            if progress is not None:
                progress(view.nbytes)
        return ObjectInfo(key, len(data), version)

    def head(self, key):
        data, version, _, attempt = self._held(key)
        return ObjectInfo(key, len(data), version, attempt=attempt)

    def list(self, prefix, retry=once):
        with self._bucket.lock:
            held = sorted(self._bucket.objects.items())
        return (
            ObjectInfo(key, len(data), version, modified=modified)
            for key, (data, version, modified, _) in held
            if key.startswith(prefix)
        )

    def list_level(self, prefix, retry=once):
        below = [(info.key.removeprefix(prefix), info) for info in self.list(prefix)]
        yield from (info for name, info in below if "/" not in name)
        yield from dict.fromkeys(name.partition("/")[0] for name, _ in below if "/" in name)

    def delete(self, key, *, if_version=None):
        with self._bucket.lock:
            held = self._bucket.objects.get(key)
            if if_version is not None and held is not None and held.version != if_version:
                raise self._refusal("the object was replaced", key)
            self._bucket.objects.pop(key, None)

    def close(self):
        """Does nothing: the objects belong to the process."""

    def _refusal(self, message, key):
        return PreconditionFailedError(message, uri=self.uri(key), certain=True)

    def _held(self, key):
        with self._bucket.lock:
            if key not in self._bucket.objects:
                raise ObjectNotFoundError(
                    "there is no such object", uri=self.uri(key), certain=True
                )
            return self._bucket.objects[key]

    def _parts(self, upload):
        if upload.id not in self._bucket.uploads:
            raise ObjectNotFoundError("there is no such upload", uri=self.uri(upload.key))
        return self._bucket.uploads[upload.id][1]


uris._SCHEMES |= {"memory"}
registry._OPENERS["memory"] = lambda: lambda uri, config: MemoryStore(uri.bucket)
