"""The copy of one checkpoint: a save whose bytes come from another location."""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from cloudckpt.checkpoint.baseline import Baseline, begin
from cloudckpt.checkpoint.commit import publish
from cloudckpt.checkpoint.draft import Draft
from cloudckpt.checkpoint.objects import (
    OF_RANKS,
    ObjectRecord,
    WrittenObject,
    checked,
    data_name,
)
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CommitUnknownError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ProcessGroupError,
)
from cloudckpt.runs.contents import ReadContent, read_content
from cloudckpt.runs.verifying import find_damages, one_error
from cloudckpt.stores.base import ObjectInfo, ObjectStore, random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.transfer.copying import CopyTask, MismatchError, copies_within, relay
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.landing import Sink, Wanted
from cloudckpt.transfer.retry import Retrier, check_unchanged, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = ["CheckpointCopy", "Copied", "Place", "Progress", "divided"]

logger = logging.getLogger("cloudckpt")

# of a store's own copy: if an object is really gone or refused, streaming it fails as well
_NOT_COPIED = (
    AccessDeniedError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What has been copied.

    Attributes:
        checkpoints: How many checkpoints.
        objects: How many data objects.
        nbytes: Their bytes.
        by_store: The bytes that the store copied itself; the rest passed through this machine.
        already_there: Checkpoints of a run that the target already had, identical.
    """

    checkpoints: int = 0
    objects: int = 0
    nbytes: int = 0
    by_store: int = 0
    already_there: int = 0

    def __add__(self, other: Copied) -> Copied:
        return Copied(
            checkpoints=self.checkpoints + other.checkpoints,
            objects=self.objects + other.objects,
            nbytes=self.nbytes + other.nbytes,
            by_store=self.by_store + other.by_store,
            already_there=self.already_there + other.already_there,
        )


@dataclass(frozen=True)
class Place:
    """The location of a checkpoint, existing or to come, and the options to reach it."""

    uri: CheckpointURI
    config: Config

    @property
    def store(self) -> ObjectStore:
        """The store of this location."""
        return open_store(self.uri, self.config)

    @property
    def retrier(self) -> Retrier:
        """For single requests."""
        return Retrier(self.config.retry)

    def heads(self, keys: Sequence[str]) -> list[ObjectInfo]:
        """The store's information on each object, in their order.

        Raises:
            CheckpointCorruptError: If an object is gone.
        """
        store = self.store
        found: dict[str, ObjectInfo | None] = dict.fromkeys(keys)
        group = TaskGroup(
            self.config.requests_at_once, name="cloudckpt-look", interrupt=store.interrupt
        )
        retrier = Retrier(self.config.retry, group.cancellation)

        def look(key: str) -> None:
            try:
                found[key] = retrier.call(lambda: store.head(key))
            except ObjectNotFoundError as error:
                raise CheckpointCorruptError(
                    "an object of the checkpoint is gone", uri=store.uri(key), cause=error
                ) from error

        def submit() -> None:
            for key in found:
                group.submit(partial(look, key))

        group.run(submit)
        return [info for info in found.values() if info is not None]


class Progress:
    """Adds up what threads have copied.

    Attributes:
        total: The bytes to be copied in all.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self.total = 0
        self._tell = tell
        self._lock = threading.Lock()
        self._done = 0

    def add(self, count: int) -> None:
        """Counts bytes, and reports the sum so far."""
        with self._lock:
            self._done += count
            self.total = max(self.total, self._done)
            done, total = self._done, self.total
        self._tell(done, total)


@dataclass(frozen=True)
class _Plan:
    """What the first rank broadcasts to the others.

    Attributes:
        shares: The data objects that each rank copies.
        commit: The commit object of the source, as it was read; None if there is nothing to copy.
        is_there: Whether the target has the same checkpoint already.
    """

    shares: Sequence[Sequence[CopyTask]] = ()
    commit: ObjectInfo | None = None
    is_there: bool = False


class _Nothing(Sink):
    """Discards bytes that are read only to verify them."""

    def deliver(self, start: int, data: torch.Tensor) -> None:
        pass


class CheckpointCopy:
    """The copy of one checkpoint; all ranks make the same calls."""

    def __init__(
        self,
        source: Place,
        target: Place,
        meeting: Meeting,
        overwrite: bool,
        progress: Progress,
        *,
        is_of_a_run: bool = False,
    ) -> None:
        self._source = source
        self._target = target
        self._meeting = meeting
        self._rank, self._world = meeting.rank, meeting.size
        self._overwrite = overwrite
        self._progress = progress
        self._is_of_a_run = is_of_a_run
        self._is_detached = source.uri == target.uri
        self._made: _Commit | None = None  # on the first rank

    def run(self) -> Copied:
        """Copies it, unless the target already has it.

        Raises:
            CheckpointReplacedError: If the source was replaced meanwhile; this can be called again.
        """
        plan = self._meeting.broadcast_from_first(self._plan)
        if plan.is_there:
            return Copied(already_there=1)
        share = plan.shares[self._rank]
        if not self._is_of_a_run:
            self._progress.total = sum(task.size for task in share)
        has_sent = False
        try:
            by_store = self._meeting.begin(lambda: self._send(share, plan.commit))
            has_sent = True
            by_store = sum(self._meeting.gathered(by_store))
        except BaseException as error:
            # the first rank commits once it has heard of all; others can't know whether it has
            if self._rank == 0 or not (has_sent or isinstance(error, ProcessGroupError)):
                self._discard(share)
            raise
        self._meeting.broadcast_from_first(lambda: self._commit(share))
        tasks = [task for share in plan.shares for task in share]
        nbytes = sum(task.size for task in tasks)
        return Copied(checkpoints=1, objects=len(tasks), nbytes=nbytes, by_store=by_store)

    def _plan(self) -> _Plan:
        """Reads the source, and checks what is at the target."""
        source, target = self._source, self._target
        part = read_content(source.uri, source.config)
        if self._is_of_a_run and _has_the_same(target, part):
            return _Plan(is_there=True)
        baseline = self._baseline(part)
        objects = {one.source: one for one in self._objects(part)}
        attempt = random_suffix()
        shares = [
            [
                replace(one, target=target.uri.key(data_name(rank, ordinal, attempt)))
                for ordinal, one in enumerate(share)
            ]
            for rank, share in enumerate(divided(list(objects.values()), self._world))
        ]
        places = {
            task.source: (rank, ordinal)
            for rank, share in enumerate(shares)
            for ordinal, task in enumerate(share)
        }
        known = {one.name: one for one in part.said.objects}
        renamed: dict[str, WrittenObject] = {}
        if self._is_detached:
            renamed = {name: one for name, one in known.items() if not one.folder}
        names = {source.uri.key(name): name for name in known}
        for task in self._objects(part):
            name = names.get(task.source, task.source.removeprefix(source.uri.key("")))
            rank, ordinal = places[task.source]
            record = known.get(name) or WrittenObject(0, 0, "", task.size, 0, 0, 0)
            own = replace(record, rank=rank, ordinal=ordinal, attempt=attempt, folder="")
            renamed[name] = own
        draft = Draft.of_copy(part.said, renamed, attempt)
        self._made = _Commit(baseline, draft, part.said.notes, attempt)
        return _Plan(shares, part.commit)

    def _baseline(self, part: ReadContent) -> Baseline:
        """What is at the target now.

        Raises:
            CheckpointExistsError: If there is a checkpoint that must not be replaced.
        """
        uri, store, retrier = self._target.uri, self._target.store, self._target.retrier
        source = self._source.uri
        name = part.commit.key.removeprefix(source.key(""))
        key = uri.key(name)
        look = partial(retrier.call, partial(store.look, key))
        begun = begin(look, key, uri.object(name), overwrite=True)
        if not self._overwrite and begun.version:
            raise CheckpointExistsError(
                "a checkpoint already exists here: choose another location, or allow it to be "
                "replaced (overwrite=True, --overwrite)",
                uri=str(uri),
            )
        return begun

    def _objects(self, part: ReadContent) -> list[CopyTask]:
        """The data objects of the source, not yet named at the target."""
        uri, kind = self._source.uri, part.said.checksum
        if kind is not None:
            return [
                CopyTask(uri.key(one.name), "", one.size, one.checksum, kind)
                for one in part.said.objects
                if one.folder or not self._is_detached
            ]
        needed: dict[str, int] = {}  # by key, the bytes that must be there
        for entry in (part.metadata.storage_data or {}).values():
            key = uri.key(checked(entry.relative_path, str(uri)))
            needed[key] = max(needed.get(key, 0), entry.offset + entry.length)
        kind = self._source.store.capabilities.checksum
        infos = self._source.heads(list(needed))
        for info in infos:
            if info.size < needed[info.key]:
                raise CheckpointCorruptError(
                    f"an object has {info.size} bytes, and the checkpoint needs the first "
                    f"{needed[info.key]}: it was cut off",
                    uri=self._source.store.uri(info.key),
                )
        return [CopyTask(info.key, "", info.size, info.checksum, kind) for info in infos]

    def _send(self, share: Sequence[CopyTask], commit: ObjectInfo | None) -> int:
        """Copies objects.

        Returns:
            The bytes that the store copied itself.

        Raises:
            CheckpointReplacedError: If the source was replaced meanwhile.
            CheckpointCorruptError: If it is damaged.
        """
        try:
            return self._sent(share)
        except CheckpointCorruptError as error:
            source = self._source
            if commit is not None:
                check_unchanged(source.store, commit, str(source.uri), source.config.retry, error)
            raise

    def _sent(self, share: Sequence[CopyTask]) -> int:
        """Copies objects; those damaged in transit are copied once more."""
        left = {task.target: task for task in self._by_store(share)}
        by_store = 0

        def arrived(task: CopyTask) -> None:
            nonlocal by_store
            del left[task.target]
            by_store += task.size if task.found is not None else 0

        stats = TransferStats(str(self._target.uri), self._rank)
        tries = 0
        while True:
            try:
                relay(
                    self._source.store,
                    self._target.store,
                    list(left.values()),
                    self._target.config,
                    stats,
                    moved=self._progress.add,
                    arrived=arrived,
                )
                return by_store
            except _NOT_COPIED as error:
                if all(task.found is None for task in left.values()):
                    raise
                logger.warning("the store does not copy by itself, so bytes pass here: %s", error)
                left = {key: replace(task, found=None) for key, task in left.items()}
            except MismatchError as error:
                self._look_for_damages(error)
                tries += 1
                if tries == 2:
                    raise

    def _by_store(self, share: Sequence[CopyTask]) -> list[CopyTask]:
        """The objects, with the source's information on those that the target can copy itself.

        Local files are streamed: nothing would show whether they were copied unchanged.
        """
        source, target = self._source, self._target
        within = [
            task
            for task in share
            if source.uri.scheme != "file" and copies_within(source.store, target.store, task.size)
        ]
        infos = source.heads([task.source for task in within])
        found = {info.key: info for info in infos}
        return [replace(task, found=found.get(task.source)) for task in share]

    def _look_for_damages(self, error: MismatchError) -> None:
        """Finds out which blocks of an object are damaged, if any."""
        source = self._source
        wanted = [
            Wanted(stored, 0, stored.nbytes, _Nothing(None), True)
            for stored in read_content(source.uri, source.config).sources(
                source.store, source.config
            )
            if source.store.uri(stored.key) == error.uri
        ]
        if found := find_damages(source.store, source.uri, wanted, source.config):
            raise one_error(found) from error

    def _commit(self, share: Sequence[CopyTask]) -> None:
        """Makes the copy visible."""
        target = self._target
        own = {task.target.removeprefix(target.uri.key("")) for task in share}
        commit = self._made
        assert commit is not None
        try:
            publish(
                target.store,
                target.uri,
                target.config,
                baseline=commit.baseline,
                attempt=random_suffix(),
                objects=commit.objects,
                own=own,
                kept=commit.kept,
                data=partial(commit.draft.data, commit.notes),
            )
        except CommitUnknownError:
            raise
        except Exception:  # the failed commit has deleted its own object
            keys = [
                target.uri.key(one.name) for one in commit.objects if one.name not in commit.kept
            ]
            delete_quietly(
                target.store, keys, target.config.retry, threads=target.config.requests_at_once
            )
            raise
        finally:
            forget_listings()

    def _discard(self, share: Sequence[CopyTask]) -> None:
        keys, config = [task.target for task in share], self._target.config
        delete_quietly(self._target.store, keys, config.retry, threads=config.requests_at_once)


@dataclass(frozen=True)
class _Commit:
    """A commit object of the copy, and what it names.

    Attributes:
        baseline: What is at its location now.
        draft: What it will hold.
        notes: The notes, as they are stored.
        attempt: The random name of the copy, part of the names of all that it has written.
    """

    baseline: Baseline
    draft: Draft
    notes: bytes
    attempt: str

    @property
    def kept(self) -> frozenset[str]:
        """The names of objects that existed before."""
        return frozenset(one.name for one in self.draft.objects if one.attempt != self.attempt)

    @property
    def objects(self) -> list[ObjectRecord]:
        """The data objects."""
        return [ObjectRecord(one.name, one.size, one.checksum) for one in self.draft.objects]


def divided(tasks: Sequence[CopyTask], ranks: int) -> list[list[CopyTask]]:
    """A share of the objects for each rank, of about equal bytes; the same on every call."""
    shares: list[list[CopyTask]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for task in sorted(tasks, key=lambda one: (-one.size, one.source)):
        nbytes, rank = heapq.heappop(loads)
        shares[rank].append(task)
        heapq.heappush(loads, (nbytes + task.size, rank))
    return shares


def _has_the_same(target: Place, ours: ReadContent) -> bool:
    """Whether the target already has a copy of a checkpoint, with equal checksums and notes.

    Content without checksums is not known to be the same.
    """
    try:
        theirs = read_content(target.uri, target.config)
        if not ours.has_checksums or not theirs.has_checksums:
            return False
        if ours.said.notes != theirs.said.notes or _content(ours) != _content(theirs):
            return False
    except (CheckpointNotFoundError, CheckpointReplacedError):
        return False
    except CheckpointCorruptError as error:
        logger.warning("what is at the target of the copy is damaged: %s", error)
        return False
    store, objects = target.store, theirs.said.objects
    sizes: dict[str, int] = {}
    for folder in {one.folder for one in objects}:  # of the checkpoint, and beside it
        place = target.uri.beside(folder) if folder else target.uri
        listed = store.list(place.key(OF_RANKS), target.retrier.call)
        sizes |= {info.key: info.size for info in listed}
    return all(sizes.get(target.uri.key(record.name)) == record.size for record in objects)


def _content(part: ReadContent) -> object:
    """The content that two commit objects share if one is of a copy of the other."""
    objects = {one.name: (one.size, one.checksum) for one in part.said.objects}
    places = {
        (index.fqn, index.offset): (objects.get(place.relative_path), place.offset, place.length)
        for index, place in (part.metadata.storage_data or {}).items()
    }
    entries = dict(part.metadata.state_dict_metadata)
    return entries, places, part.said.checksum, part.said.structure
