"""Copies within a store: in one request, or in parallel parts."""

from __future__ import annotations

import dataclasses

from cloudckpt.config import MIB
from cloudckpt.stores.base import Capabilities, ObjectInfo, ObjectStore, random_suffix
from cloudckpt.transfer.upload import ObjectUpload

__all__ = ["ObjectCopy", "copies_within", "copy_part_size"]

_PART = 256 * MIB  # a store copies some hundred MiB a second for each request
_PARTS_AIMED_AT = 9_000


def copies_within(source: ObjectStore, target: ObjectStore, size: int) -> bool:
    """Whether ``target`` can itself copy an object of ``size`` bytes from ``source``."""
    limits = target.capabilities
    return target.copies_from(source) and (size <= limits.max_copy_size or limits.copies_parts)


def copy_part_size(size: int, limits: Capabilities) -> int:
    """Bytes of the parts in which an object of ``size`` bytes is copied."""
    wanted = max(_PART, -(-size // _PARTS_AIMED_AT), limits.min_part_size)
    return min(wanted, limits.max_part_size)


class ObjectCopy(ObjectUpload):
    """One object that the store copies from another bucket, or from another key.

    It is made like an :class:`~cloudckpt.transfer.upload.ObjectUpload`: by its group's threads,
    with retries, whole or not at all; :meth:`start` replaces writing and closing. But the bytes are
    not seen here: to verify that the copy equals the source, compare ``info.checksum``, if the
    store reported it, with the source's. ``abandon`` removes the key, so only this copy may write
    it.
    """

    def start(self, source: ObjectStore, found: ObjectInfo) -> None:
        """Begins; ``found`` is the object in ``source``, at the version to copy.

        Raises:
            StoreError: If an upload for its parts can't be begun.
        """
        limits = self._store.capabilities
        self.position = found.size
        # in parts also for their number: each of them is as fast as a whole copy
        if not limits.copies_parts or found.size <= min(self._part_size, limits.max_copy_size):
            self._group.submit(lambda: self._copy(source, found))
            return
        starts = range(0, found.size, self._part_size)
        self._expected = len(starts)
        self._upload = self._create()
        for number, start in enumerate(starts, 1):
            self._submit_part(source, found, number, start)

    def _submit_part(self, source: ObjectStore, found: ObjectInfo, number: int, start: int) -> None:
        upload = self._upload
        assert upload is not None
        stop = min(start + self._part_size, found.size)

        def copy_part() -> None:
            part = self._retrier.call(
                lambda: self._store.copy_part(source, found, upload, number, start, stop)
            )
            self._progress(part.size)
            self._took(part)

        self._group.submit(copy_part)

    def _copy(self, source: ObjectStore, found: ObjectInfo) -> None:
        attempt = random_suffix()
        self.info = self._retrier.call(
            lambda: self._store.copy(
                source, found, self.key, attempt=attempt, if_absent=self._create_only
            ),
            made=lambda error: self._look(attempt, found.checksum),
        )
        self._whole = self.info.checksum
        self._stats.add_requests(1)
        self._progress(found.size)

    def _complete(self) -> None:
        super()._complete()
        assert self.info is not None
        self.info = dataclasses.replace(self.info, checksum=self._whole)
