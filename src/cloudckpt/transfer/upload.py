"""Uploads objects that are written piece by piece: in parallel parts, whole or not at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from cloudckpt.config import Config, RetryPolicy
from cloudckpt.errors import (
    CloudCheckpointError,
    ObjectNotFoundError,
    StoreError,
    TensorChangedError,
    TransientStoreError,
)
from cloudckpt.stores.base import (
    ObjectInfo,
    ObjectStore,
    Part,
    Upload,
    random_suffix,
    whole_checksum,
)
from cloudckpt.transfer.boxes import padding
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.parts import PartCutter, PartPlan, Piece
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.stats import TransferStats

__all__ = ["NamedUpload", "ObjectUpload", "clear_away", "only_if_new", "put_whole", "written"]

T = TypeVar("T")
logger = logging.getLogger("cloudckpt")

_SWEEP_ABORTS = "cloudckpt sweep aborts it later"
_RULE_ABORTS = (
    "a lifecycle rule of the bucket for incomplete uploads aborts it later, if there is one; on a "
    "disk, cloudckpt sweep does"
)


class ObjectUpload:
    """An upload of one object; its key is random, unless it is a :class:`NamedUpload`.

    Its parts are sent by the threads of ``group`` while the producer continues to write; the thread
    that finishes the last part completes the object. A small object is sent by one PUT. If the
    group's ``run`` returns without an error, the object is complete.

    Attributes:
        key: The key of the object.
        position: Bytes written so far.
        info: The object in the store, once it is complete; None before.
        checksum: The checksum of the complete object, by ``algorithm``; None before, and if the
            store has copied the object and reports no checksum.
        is_doubtful: Whether a multipart upload failed when it was completed, but the store may have
            completed the object nevertheless, or may do so later.
        algorithm: The algorithm of the checksums that are sent.
    """

    _leftover_advice = _SWEEP_ABORTS
    _has_random_key = True

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        part_size: int,
        group: TaskGroup,
        config: Config,
        stats: TransferStats,
    ) -> None:
        """Prepares an upload; nothing is sent yet.

        Args:
            store: The store.
            key: The key of the object.
            part_size: Bytes of every part but the last.
            group: The threads that send the parts.
            config: Options.
            stats: Transfer counters.
        """
        self.key = key
        self.position = 0
        self.info: ObjectInfo | None = None
        self.is_doubtful = False
        self.checksum: int | None = None
        self._store = store
        self.algorithm = store.capabilities.checksum
        self._group = group
        self._retrier = Retrier(config.retry, group.cancellation, on_retry=stats.add_retry)
        self._stats = stats
        self._part_size = part_size
        self._cutter = PartCutter(part_size)
        # held back until a second part shows that one PUT is not enough
        self._first: PartPlan | None = None
        self._upload: Upload | None = None
        # see ObjectStore.complete_upload; a replaced version of an object may be kept and billed
        self._condition = only_if_new(store, config) if self._has_random_key else None
        self._may_have_twin = False
        self._changed = threading.Condition()
        self._sent: list[Part] = []
        self._summed = 0  # parts whose checksums are known
        self._expected: int | None = None

    def write(self, piece: Piece) -> None:
        """Appends a piece; blocks while the network is slower than the producer.

        Raises:
            StoreError: If a multipart upload can't be begun.
            TransferCancelledError: If a task of ``group`` has failed.
        """
        self.position += piece.view.nbytes
        for part in self._cutter.push(piece):
            self._send(part)

    def align(self) -> None:
        """Appends zeros up to a multiple of :data:`~cloudckpt.transfer.boxes.ALIGNMENT`."""
        if gap := padding(self.position):
            self.write(Piece(memoryview(bytes(gap))))

    def close(self) -> None:
        """Ends the object; the threads of ``group`` send the rest and complete it.

        Raises:
            StoreError: As :meth:`write`.
            TransferCancelledError: As :meth:`write`.
        """
        if (last := self._cutter.finish()) is not None:
            self._send(last)
        if self._upload is None:
            whole = self._first or PartPlan(1)
            self._group.submit(lambda: self._put(whole))
            return
        with self._changed:
            self._expected = -(-self.position // self._part_size)
            done = len(self._sent) == self._expected
        if done:
            self._group.submit(self._complete)

    def abandon(self) -> None:
        """Aborts the upload, and deletes the object at the key; errors are logged, not raised."""
        self.abort()
        delete_quietly(self._store, [self.key], self._retrier.policy, threads=1)

    def abort(self) -> None:
        """Aborts the upload unless it is complete; an object at the key stays.

        Errors are logged, not raised.
        """
        if self._upload is not None and self.info is None:
            _abort(self._store, self._upload, self._retrier.policy, self._leftover_advice)
        if self._may_have_twin:
            self._abort_twins()

    def _abort_twins(self) -> None:
        """Aborts other uploads of the key, begun by requests whose response was lost."""
        own = () if self._upload is None else (self._upload.id,)
        _abort_all(self._store, self.key, self._retrier.policy, apart_from=own)

    def _create(self) -> Upload:
        def create() -> Upload:
            try:
                return self._store.create_upload(self.key, self._part_size)
            except BaseException as error:
                # a request without a response, or interrupted, may have begun an upload
                if isinstance(error, TransientStoreError) or not isinstance(error, Exception):
                    self._may_have_twin = True
                raise

        return self._retrier.call(create)

    def _send(self, part: PartPlan) -> None:
        """Sends a part; holds the first part back until there is a second part."""
        if self._upload is None:
            if self._first is None:
                self._first = part
                return
            self._upload = self._create()
            first, self._first = self._first, None
            self._group.submit(lambda: self._put_part(first))
        self._group.submit(lambda: self._put_part(part))

    def _progress(self, count: int) -> None:
        self._group.cancellation.check()
        self._stats.add_bytes(count)

    def _deliver(
        self,
        part: PartPlan,
        send: Callable[[], T],
        made: Callable[[StoreError], T | None] | None = None,
    ) -> T:
        """Calls `send`, with retries, to send a part; returns its result.

        The memory must not have changed since its checksum was computed: an object with changed
        bytes would fail its checksum at every load. So the checksum is compared after each
        transient failure, and, if the store does not verify checksums, after the part was sent.

        Raises:
            TensorChangedError: If the memory has changed.
        """

        def attempt() -> T:
            try:
                return send()
            except TransientStoreError as error:
                self._refuse_changes(part, error)
                raise

        sent = self._retrier.call(attempt, made=made)
        if not self._store.capabilities.verifies:
            self._refuse_changes(part, None)
        return sent

    def _refuse_changes(self, part: PartPlan, error: TransientStoreError | None) -> None:
        piece = part.changed(self.algorithm)
        if piece is not None:
            raise TensorChangedError.of(
                piece.item, uri=self._store.uri(self.key), cause=error
            ) from error

    def _checksum(self, part: PartPlan) -> int:
        part.await_bytes()
        if any(piece.made is not None for piece in part.pieces):
            # the parts before this one are with other threads: tasks begin in their order
            with self._changed:
                while self._summed < part.number - 1:
                    self._changed.wait(0.2)
                    self._group.cancellation.check()
        with self._group.few:  # the call for each block releases the GIL
            return part.checksum(self.algorithm)

    def _put(self, part: PartPlan) -> None:
        checksum, attempt = self._checksum(part), random_suffix()
        body = [piece.view for piece in part.pieces]
        self.info = self._deliver(
            part,
            lambda: self._store.put(
                self.key,
                body,
                checksum=checksum,
                attempt=attempt,
                if_version=self._condition,
                progress=self._progress,
            ),
            lambda error: self._look(attempt, checksum),
        )
        self.checksum = checksum
        self._stats.add_requests(1)
        part.release()

    def _put_part(self, part: PartPlan) -> None:
        upload = self._upload
        assert upload is not None  # created before the first part was submitted
        checksum = self._checksum(part)
        with self._changed:
            self._summed += 1
            self._changed.notify_all()
        body = [piece.view for piece in part.pieces]
        sent = self._deliver(
            part,
            lambda: self._store.put_part(
                upload, part.number, body, checksum=checksum, progress=self._progress
            ),
        )
        part.release()
        self._took(sent)

    def _took(self, part: Part) -> None:
        """Records a part that the store has received; completes the object after the last one."""
        self._stats.add_requests(1)
        with self._changed:
            self._sent.append(part)
            done = len(self._sent) == self._expected
        if done:
            self._complete()

    def _complete(self) -> None:
        upload = self._upload
        assert upload is not None
        parts = sorted(self._sent, key=lambda part: part.number)
        checksum = whole_checksum(parts, self.algorithm)

        def look() -> ObjectInfo | None:
            return self._look(upload.attempt, checksum)

        def made(error: StoreError) -> ObjectInfo | None:
            # the store may still be assembling the object of an upload that no longer exists
            is_gone = isinstance(error, ObjectNotFoundError)
            info = self._retrier.wait_for(look) if is_gone else look()
            if info is not None:
                # discards leftovers of the upload
                _abort(self._store, upload, self._retrier.policy, self._leftover_advice)
            self.is_doubtful = info is None
            return info

        self.info = self._retrier.call(
            lambda: self._store.complete_upload(upload, parts, if_version=self._condition),
            made=made,
        )
        self.checksum = checksum
        self._stats.add_requests(2)
        self.abort()

    def _look(self, attempt: str, checksum: int | None) -> ObjectInfo | None:
        """Returns the object if the write named `attempt` made it; else None.

        If `checksum` and the checksum of the object are both known, they must be equal, too.
        """
        info = written(self._store, self.key, attempt, self.position, self._retrier.policy)
        known = None if info is None else info.checksum
        return info if checksum is None or known in (None, checksum) else None


class NamedUpload(ObjectUpload):
    """An upload to a key that the user chose, where other programs may write as well."""

    _leftover_advice = _RULE_ABORTS
    _has_random_key = False

    def abandon(self) -> None:
        """Aborts the upload; an object at the key, and other uploads to it, stay."""
        self.abort()

    def _abort_twins(self) -> None:
        logger.warning(
            "%s: the store did not answer the request to begin an upload, so an empty upload may "
            "be left: %s",
            self._store.uri(self.key),
            self._leftover_advice,
        )


def _abort(store: ObjectStore, upload: Upload, policy: RetryPolicy, advice: str) -> None:
    try:
        Retrier.for_cleanup(policy).call(lambda: store.abort_upload(upload))
    except CloudCheckpointError as error:
        logger.warning("an unfinished multipart upload could not be aborted: %s; %s", error, advice)


def _abort_all(
    store: ObjectStore, key: str, policy: RetryPolicy, *, apart_from: Sequence[str] = ()
) -> None:
    """Aborts all uploads of a key, except those with ids in ``apart_from``; logs errors.

    The key is random, so no other process has begun any.
    """
    try:
        for upload in store.list_uploads(key, Retrier.for_cleanup(policy).call):
            if upload.key == key and upload.id not in apart_from:
                _abort(store, upload, policy, _SWEEP_ABORTS)
    except CloudCheckpointError as error:
        logger.warning(
            "unfinished multipart uploads could not be listed, so some may be left: %s; run "
            "cloudckpt sweep a day later to abort them",
            error,
        )


def clear_away(store: ObjectStore, keys: Sequence[str], policy: RetryPolicy) -> None:
    """Removes objects and uploads that a dead process has left; errors are logged, not raised.

    Args:
        store: The store.
        keys: The keys; random ones, which no other process has written to.
        policy: How often and how long to retry.
    """
    for key in keys:
        _abort_all(store, key, policy)
    delete_quietly(store, keys, policy, threads=1)


def only_if_new(store: ObjectStore, config: Config) -> str | None:
    """Returns the ``if_version`` argument for writing an object at a random key.

    It is "", the condition that no object exists at the key, so that a repeated request creates no
    second version, which would be billed. It is None (no condition) if the store does not document
    that it honours this one (``create_only``), or if the user has turned conditions off.
    """
    return "" if store.capabilities.create_only and config.conditional_writes != "off" else None


def put_whole(
    store: ObjectStore,
    key: str,
    data: memoryview,
    retrier: Retrier,
    *,
    if_version: str | None = None,
) -> ObjectInfo:
    """Writes an object in one request, with retries; `if_version` as in :meth:`ObjectStore.put`.

    A try whose response was lost may itself have invalidated the condition. So an object that
    has this write's random name in its metadata counts as success; another writer's object, even of
    the same bytes, does not.

    Raises:
        PreconditionFailedError: If the condition does not hold.
        StoreError: If the store refuses the request or stays unreachable.
        TransferCancelledError: If the cancellation of `retrier` was set.
    """
    checksum, attempt = store.capabilities.checksum.of(data), random_suffix()
    return retrier.call(
        lambda: store.put(key, [data], checksum=checksum, attempt=attempt, if_version=if_version),
        made=lambda error: written(store, key, attempt, data.nbytes, retrier.policy),
    )


def written(
    store: ObjectStore, key: str, attempt: str, size: int, policy: RetryPolicy
) -> ObjectInfo | None:
    """Returns the object at `key` if one particular write made it; None if not, or if a read fails.

    Args:
        store: The store.
        key: The key.
        attempt: The random name that the write has stored with the object.
        size: The bytes that were sent. An object of another size does not count: some servers keep
            what arrived before the connection broke.
        policy: How often and how long to retry, with at most 3 tries in 10 s.
    """
    try:
        info = Retrier.for_cleanup(policy).call(lambda: store.written(key, attempt))
        return info if info is not None and info.size == size else None
    except StoreError as error:
        logger.warning("can't check whether an upload was done, so it counts as failed: %s", error)
        return None
