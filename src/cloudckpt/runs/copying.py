"""Copies checkpoints, and whole runs, to another place: across clouds, to and from local disks.

A copy is made as a save is, and by the same commit (:mod:`cloudckpt.checkpoint.commit`): its
objects get names of their own, drawn at random, and become visible by one conditional write of
``.metadata``, last. So two copies to one place, or a copy and a save, or a copy and a deletion of
what is there, can't mix. Would a copy keep the names of its source, a second copy to the same place
would have to share the objects of the first one, which may be deleting them at that moment.

Where the ranks of a group copy together, each takes a part of the objects; the first one reads the
metadata of the source, and commits.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from cloudckpt.checkpoint.commit import Baseline, begin, publish_objects
from cloudckpt.checkpoint.manifest import Manifest
from cloudckpt.checkpoint.notes import stored_notes
from cloudckpt.checkpoint.objects import (
    METADATA,
    ObjectRecord,
    checked,
    commits_of_ranks,
    data_name,
    is_committed,
)
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting, Stance
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    ConfigError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ProcessGroupError,
)
from cloudckpt.gc_pause import paused_gc
from cloudckpt.runs.catalog import list_checkpoints
from cloudckpt.runs.contents import CheckpointPart, parts
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.runs.verifying import find_damages, one_error
from cloudckpt.stores.base import ObjectInfo, ObjectStore, random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.stores.registry import checkpoint_location
from cloudckpt.transfer.copying import copies_within
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.landing import Sink, Wanted
from cloudckpt.transfer.relay import MismatchError, Passage, relay
from cloudckpt.transfer.retry import Retrier, begun_anew, check_unchanged, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["Copied", "copy"]

logger = logging.getLogger("cloudckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What has been copied.

    Attributes:
        checkpoints: How many were.
        objects: Their data objects.
        nbytes: The bytes of these.
        by_store: The bytes of those that the store has copied by itself; others passed here.
        already_there: Checkpoints of a run of which the target had the same already.
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


def copy(
    source: URILike,
    target: URILike,
    *,
    overwrite: bool = False,
    step_name: str | None = None,
    config: Config | None = None,
    target_config: Config | None = None,
    process_group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Copied:
    """Copies a committed checkpoint, or all committed checkpoints of a run.

    Within a cloud the store copies the data objects by itself, if it can; what it tells of their
    checksums is compared. Else the bytes pass through memory of at most ``memory_budget`` (or of
    two parts of an upload, if these are more: of objects above 300 GB), and are compared with the
    checksums of the source on the way. The copy is committed last, in one write, as a save is:
    nobody ever sees a part of it, and what is damaged is never copied. Notes, metrics, structure
    and the kind of checksums stay; the names of the data objects are new. What fails or is
    interrupted deletes what it has written.

    Of a run, each folder in which there is a committed checkpoint is copied to a folder of the same
    name; what else is there (torn checkpoints, other files) is not. A damaged one is passed over,
    and told at the end. One of which the target has the same already is not copied again, so that
    an interrupted copy of a run goes on where it was.

    Args:
        source: A checkpoint, or the folder of a run.
        target: Where the checkpoint, or the run, will be.
        overwrite: Whether a checkpoint that is at the target may be replaced.
        step_name: Of a run, copy only what is called so, for example ``"step-{step}"``.
        config: Options.
        target_config: Options of the target, if they are others: its endpoint, for example.
        process_group: Ranks that divide the objects among each other, if all of them call this.
        progress: Called with the bytes that this rank has copied, and those that it is to copy, by
            any thread.

    Raises:
        InvalidURIError: If one is no location.
        ConfigError: If both are the same place.
        CheckpointNotFoundError: If there is no committed checkpoint to copy.
        CheckpointExistsError: If there is one at the target, and ``overwrite`` is off; also if one
            that was saved without collectives would be replaced, or would replace.
        CheckpointCorruptError: If the source is damaged; nothing of it is visible at the target.
        CheckpointConflictError: If somebody else has written to the target meanwhile.
        CommitUnknownError: If the store does not say whether the commit took place.
        CheckpointReplacedError: If the source was replaced meanwhile, again and again.
        StoreError: If a store refuses or stays unreachable.
    """
    config = replace(config if config is not None else Config(), verify=True)
    meeting = Meeting(process_group)
    origin, goal = meeting.begin(
        lambda: (
            _Place(CheckpointURI.parse(source), config),
            _Place(
                checkpoint_location(target),
                config if target_config is None else target_config,
            ),
        ),
        lambda ends: Stance(
            location=f"the copy of {ends[0].uri} to {ends[1].uri}", options=f"{overwrite=}"
        ),
    )
    done = _Progress(progress)
    pairs = meeting.told_by_first(lambda: _pairs(origin, goal, step_name))
    if pairs is None:
        one = _Copy(origin, goal, meeting, overwrite, done)
        return begun_anew(one.run)
    done.total = sum(pair.nbytes for pair in pairs) // meeting.size
    copied, damaged = Copied(), []
    for pair in pairs:
        one = _Copy(
            replace(origin, uri=origin.uri.join(pair.folder)),
            replace(goal, uri=goal.uri.join(pair.folder)),
            meeting,
            overwrite,
            done,
            is_of_a_run=True,
        )
        try:
            copied += begun_anew(one.run)
        except CheckpointCorruptError as error:
            damaged.append(error)
    if damaged:
        raise _of_a_run(damaged, copied)
    return copied


@dataclass(frozen=True)
class _Place:
    uri: CheckpointURI
    config: Config

    @property
    def store(self) -> ObjectStore:
        return open_store(self.uri, self.config)

    @property
    def retrier(self) -> Retrier:
        return Retrier(self.config.retry)

    def heads(self, keys: Sequence[str]) -> list[ObjectInfo]:
        """What the store has of objects, in their order.

        Raises:
            CheckpointCorruptError: If one is gone.
        """
        store = self.store
        found: dict[str, ObjectInfo | None] = dict.fromkeys(keys)
        group = TaskGroup(self.config.connections, name="cloudckpt-look", interrupt=store.interrupt)
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


@dataclass(frozen=True)
class _Pair:
    """A folder of a run that is to be copied, and its bytes as they are listed."""

    folder: str
    nbytes: int


def _pairs(origin: _Place, goal: _Place, step_name: str | None) -> list[_Pair] | None:
    """The folders of a run; None if the source is a checkpoint."""
    if origin.uri == goal.uri and origin.store is goal.store:
        raise ConfigError("the source and the target of the copy are the same", uri=str(goal.uri))
    if is_committed(origin.store, origin.uri, origin.retrier):
        return None
    pattern = step_name or DEFAULT_PATTERN
    found = [
        _Pair(CheckpointURI.parse(one.uri).prefix.rpartition("/")[2], one.nbytes)
        for one in list_checkpoints(origin.uri, step_name=pattern, config=origin.config)
        if one.is_committed and (step_name is None or one.step is not None)
    ]
    if not found:
        what = "" if step_name is None else f" called {step_name!r}"
        raise CheckpointNotFoundError(
            f"there is no committed checkpoint to copy: neither here, nor in a folder{what} of it",
            uri=str(origin.uri),
        )
    return found


def _of_a_run(damaged: list[CheckpointCorruptError], copied: Copied) -> CheckpointCorruptError:
    error = one_error(damaged)
    error.message += (
        f" | {len(damaged)} damaged checkpoints of the run were not copied; "
        f"{copied.checkpoints + copied.already_there} were, or are there already"
    )
    return error


class _Progress:
    """Adds up what threads have copied.

    Attributes:
        total: The bytes that there will be.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self.total = 0
        self._tell = tell
        self._lock = threading.Lock()
        self._done = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self.total = max(self.total, self._done)
            done, total = self._done, self.total
        self._tell(done, total)


@dataclass(frozen=True)
class _Plan:
    """What the first rank tells the others.

    Attributes:
        shares: The data objects that each rank copies.
        commits: The commit objects of the source, as they were read.
        is_there: Whether the target has the same checkpoint already.
    """

    shares: Sequence[Sequence[Passage]] = ()
    commits: Sequence[ObjectInfo] = ()
    is_there: bool = False


class _Nothing(Sink):
    """Takes bytes that are only looked at."""

    def deliver(self, start: int, data: torch.Tensor) -> None:
        pass


class _Copy:
    """One checkpoint on its way; all ranks make the same calls."""

    def __init__(
        self,
        source: _Place,
        target: _Place,
        meeting: Meeting,
        overwrite: bool,
        progress: _Progress,
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
        self._commits: list[_Commit] = []  # on the first rank

    def run(self) -> Copied:
        """Copies it, if that was not done before.

        Raises:
            CheckpointReplacedError: If the source was replaced meanwhile; this can be called again.
        """
        plan = self._meeting.told_by_first(self._plan)
        if plan.is_there:
            return Copied(already_there=1)
        share = plan.shares[self._rank]
        if not self._is_of_a_run:
            self._progress.total = sum(passage.size for passage in share)
        try:
            by_store = self._meeting.begin(lambda: self._send(share, plan.commits))
            by_store = sum(self._meeting.gathered(by_store))
        except ProcessGroupError:
            if self._rank == 0:  # the others can't know whether it will commit
                self._discard(share)
            raise
        except BaseException:
            self._discard(share)
            raise
        self._meeting.told_by_first(lambda: self._commit(share))
        passages = [passage for share in plan.shares for passage in share]
        nbytes = sum(passage.size for passage in passages)
        return Copied(checkpoints=1, objects=len(passages), nbytes=nbytes, by_store=by_store)

    def _plan(self) -> _Plan:
        """Reads the source, and looks what is at the target."""
        source, target = self._source, self._target
        found = list(parts(source.uri, source.config))
        if self._is_of_a_run and _has_the_same(target, found, source):
            return _Plan(is_there=True)
        baselines = self._baselines(found)
        objects = {one.source: one for part in found for one in self._objects(part)}
        attempt = random_suffix()
        shares = [
            [
                replace(one, target=target.uri.key(data_name(rank, ordinal, attempt)))
                for ordinal, one in enumerate(share)
            ]
            for rank, share in enumerate(divided(list(objects.values()), self._world))
        ]
        sent = {passage.source: passage for share in shares for passage in share}
        self._commits = []
        for part, baseline in zip(found, baselines, strict=True):
            part.sources()  # else metadata and manifest contradict each other
            notes = source.retrier.call(partial(stored_notes, source.store, part.commit))
            renamed = {
                passage.source.removeprefix(source.uri.key("")): ObjectRecord(
                    passage.target.removeprefix(target.uri.key("")),
                    passage.size,
                    passage.checksum or 0,
                )
                for passage in (sent[one.source] for one in self._objects(part))
            }
            self._commits.append(_Commit.of(part, renamed, baseline, notes, target.uri))
        return _Plan(shares, [part.commit for part in found])

    def _baselines(self, found: Sequence[CheckpointPart]) -> list[Baseline]:
        """What is at the target.

        Raises:
            CheckpointExistsError: If there is a checkpoint, and it is not to be replaced.
        """
        uri, store, retrier = self._target.uri, self._target.store, self._target.retrier
        source = self._source.uri
        names = [part.commit.key.removeprefix(source.key("")) for part in found]
        begun = [begin(store, uri.key(name), overwrite=True, retrier=retrier) for name in names]
        if names != [METADATA]:
            head = begin(store, uri.key(METADATA), overwrite=True, retrier=retrier)
            if head.version or commits_of_ranks(store, uri.key(""), retrier):
                raise CheckpointExistsError(
                    "there is a checkpoint, and one that was saved without collectives can't "
                    "replace it in one step: delete it first, or choose another location",
                    uri=str(uri),
                )
        elif not self._overwrite and is_committed(store, uri, retrier):
            raise CheckpointExistsError(
                "there is a checkpoint already: choose another location, or allow to replace it "
                "(overwrite=True, --overwrite)",
                uri=str(uri),
            )
        return begun

    def _objects(self, part: CheckpointPart) -> list[Passage]:
        """The data objects of the source, without names at the target."""
        uri, manifest = self._source.uri, part.manifest
        if manifest is not None:
            records = {item.object.name: item.object for item in manifest.items.values()}
            kind = manifest.checksum
            return [
                Passage(uri.key(name), "", record.size, record.checksum, kind)
                for name, record in records.items()
            ]
        entries = (part.metadata.storage_data or {}).values()
        names = dict.fromkeys(checked(entry.relative_path, str(uri)) for entry in entries)
        kind = self._source.store.capabilities.checksum
        infos = self._source.heads([uri.key(name) for name in names])
        return [Passage(info.key, "", info.size, info.checksum, kind) for info in infos]

    def _send(self, share: Sequence[Passage], commits: Sequence[ObjectInfo]) -> int:
        """Copies objects; once more those that were damaged on the way.

        Returns:
            The bytes that the store has copied by itself.

        Raises:
            CheckpointReplacedError: If the source was replaced meanwhile.
            CheckpointCorruptError: If it is damaged.
        """
        left = {passage.target: passage for passage in self._by_store(share)}
        by_store = 0

        def arrived(passage: Passage) -> None:
            nonlocal by_store
            del left[passage.target]
            by_store += passage.size if passage.found is not None else 0

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
            except (AccessDeniedError, InvalidRequestError) as error:
                if all(passage.found is None for passage in left.values()):
                    raise
                logger.warning("the store does not copy by itself, so bytes pass here: %s", error)
                left = {key: replace(passage, found=None) for key, passage in left.items()}
            except (ObjectNotFoundError, PreconditionFailedError) as error:
                what = "an object of the source is gone, or was replaced, while it was copied"
                damaged = CheckpointCorruptError(what, uri=error.uri, cause=error)
                self._refuse_replaced(commits, damaged)
                raise damaged from error
            except CheckpointCorruptError as error:
                self._refuse_replaced(commits, error)
                if not isinstance(error, MismatchError):
                    raise
                self._look_for_damages(error)
                tries += 1
                if tries == 2:
                    raise

    def _by_store(self, share: Sequence[Passage]) -> list[Passage]:
        """The objects, with what the source has of those that the target can copy by itself.

        Of local files nobody could tell whether they were copied as they were: they are streamed.
        """
        source, target = self._source, self._target
        within = [
            passage
            for passage in share
            if source.uri.scheme != "file"
            and copies_within(source.store, target.store, passage.size)
        ]
        infos = source.heads([passage.source for passage in within])
        sized = {info.key: info for info in infos}
        return [replace(passage, found=sized.get(passage.source)) for passage in share]

    def _refuse_replaced(
        self, commits: Sequence[ObjectInfo], error: CheckpointCorruptError
    ) -> None:
        """Raises CheckpointReplacedError if the source was replaced meanwhile."""
        source = self._source
        for commit in commits:
            check_unchanged(source.store, commit, str(source.uri), source.config.retry, error)

    def _look_for_damages(self, error: MismatchError) -> None:
        """Finds out which blocks of an object are damaged, if they are."""
        source = self._source
        wanted = [
            Wanted(stored, 0, stored.nbytes, _Nothing(None), True)
            for part in parts(source.uri, source.config)
            for stored in part.sources()
            if source.store.uri(stored.key) == error.uri
        ]
        if found := find_damages(source.store, source.uri, wanted, source.config):
            raise one_error(found) from error

    def _commit(self, share: Sequence[Passage]) -> None:
        """Makes the copy visible; of one without collectives the part of the first rank last."""
        target = self._target
        own = {passage.target.removeprefix(target.uri.key("")) for passage in share}
        written: list[_Commit] = []
        try:
            for commit in reversed(self._commits):
                publish_objects(
                    target.store,
                    target.uri,
                    target.config,
                    baseline=commit.baseline,
                    attempt=random_suffix(),
                    metadata=commit.metadata,
                    objects=commit.objects,
                    own=own,
                    manifest=commit.manifest_of_it,
                    notes=commit.notes,
                )
                written.append(commit)
        except CommitUnknownError:
            raise
        except Exception:  # it has deleted its own; nobody has seen those without the first rank's
            keys = [commit.baseline.key for commit in written]
            keys += [target.uri.key(one.name) for each in self._commits for one in each.objects]
            delete_quietly(
                target.store, keys, target.config.retry, threads=target.config.connections
            )
            raise
        finally:
            forget_listings()

    def _discard(self, share: Sequence[Passage]) -> None:
        keys, config = [passage.target for passage in share], self._target.config
        delete_quietly(self._target.store, keys, config.retry, threads=config.connections)


@dataclass(frozen=True)
class _Commit:
    """A commit object of the copy, and what it names.

    Attributes:
        baseline: What is in its place.
        metadata: What it will hold.
        objects: The data objects.
        manifest: The manifest, if the source has one.
        notes: The notes, as they are stored.
    """

    baseline: Baseline
    metadata: Metadata
    objects: Sequence[ObjectRecord]
    manifest: Manifest | None
    notes: bytes

    @classmethod
    def of(
        cls,
        part: CheckpointPart,
        renamed: Mapping[str, ObjectRecord],
        baseline: Baseline,
        notes: bytes,
        uri: CheckpointURI,
    ) -> _Commit:
        """That of the source, with new names of the objects, which are given by the old ones."""
        metadata, manifest = part.metadata, part.manifest
        with paused_gc():
            metadata.storage_data = {
                index: replace(entry, relative_path=renamed[entry.relative_path].name)
                for index, entry in (metadata.storage_data or {}).items()
            }
            if manifest is not None:
                items = {
                    key: replace(item, object=renamed[item.object.name])
                    for key, item in manifest.items.items()
                }
                manifest = replace(manifest, items=items)
        stored = metadata.storage_meta or StorageMeta()
        metadata.storage_meta = replace(stored, checkpoint_id=str(uri), load_id=None)
        return cls(baseline, metadata, list(renamed.values()), manifest, notes)

    def manifest_of_it(self) -> Manifest | None:
        return self.manifest


def divided(passages: Sequence[Passage], ranks: int) -> list[list[Passage]]:
    """A share of the objects for each rank, of about the same bytes; the same on every call."""
    shares: list[list[Passage]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for passage in sorted(passages, key=lambda one: (-one.size, one.source)):
        nbytes, rank = heapq.heappop(loads)
        shares[rank].append(passage)
        heapq.heappush(loads, (nbytes + passage.size, rank))
    return shares


def _has_the_same(target: _Place, found: Sequence[CheckpointPart], source: _Place) -> bool:
    """Whether the target has a copy of a checkpoint already: its checksums and notes are equal.

    What has no checksums is not known to be the same.
    """
    try:
        there = list(parts(target.uri, target.config))
    except CheckpointNotFoundError:
        return False
    if len(there) != len(found):
        return False
    for ours, theirs in zip(found, there, strict=True):
        if ours.manifest is None or theirs.manifest is None:
            return False
        same_notes = stored_notes(source.store, ours.commit) == stored_notes(
            target.store, theirs.commit
        )
        if not same_notes or _content(ours.manifest) != _content(theirs.manifest):
            return False
    below = target.uri.key("")
    listed = target.retrier.call(lambda: list(target.store.list(below)))
    sizes = {info.key.removeprefix(below): info.size for info in listed}
    objects = (
        item.object for part in there if part.manifest for item in part.manifest.items.values()
    )
    return all(sizes.get(record.name) == record.size for record in objects)


def _content(manifest: Manifest) -> object:
    """What two manifests have in common if one is of a copy of the other."""
    items = {
        key: replace(item, object=replace(item.object, name=""))
        for key, item in manifest.items.items()
    }
    return items, manifest.checksum, manifest.structure
