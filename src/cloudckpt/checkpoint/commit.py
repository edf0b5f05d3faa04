"""The commit: one conditional write of ``.metadata``, which alone makes a checkpoint visible.

The steps of a save:

1. The current version of ``.metadata``, if any, is requested, first of all in the call
   (:mod:`cloudckpt.checkpoint.baseline`).
2. Each rank uploads its objects, whose names have a random part. Two attempts never write to the
   same key, nothing is renamed, and nothing is deleted yet.
3. The coordinator gathers from all ranks what they have written, which must be everything that the
   metadata promises (:mod:`cloudckpt.checkpoint.manifest`). :func:`publish` checks that its store
   has the other ranks' objects as they wrote them, and tests whether the store honours conditions
   if this is unknown. From the commit object that existed when the save began, it reads the names
   of the objects that the commit makes obsolete.
4. :func:`commit` writes ``.metadata`` on the condition that it still has that version, or is still
   missing. It is one PUT at any size: some stores ignore conditions on completing multipart
   uploads.
5. The objects that were replaced are deleted.

This rules out the following, where A and B are two jobs, or a process presumed dead and its
replacement:

- *Both begin, A commits, then B.* B's condition fails: B gets a conflict and deletes what it wrote
  itself, which A's checkpoint does not name. This holds wherever B pauses, and for however long:
  its condition was fixed when it began.
- *A lists what it replaces, B commits, A deletes B's objects.* A deletes only after its own commit,
  and the condition guarantees that this commit replaced exactly what A had listed.
- *A dies.* Before its commit nothing is visible, and the earlier checkpoint is intact. After it the
  new checkpoint is intact, and objects of the old one may remain that no metadata names.
- *The store carries out A's commit, and the answer is lost.* The retry is refused, because A itself
  has changed the version. So a try counts as failed only if the store itself says so
  (``StoreError.certain``). Each commit has a random name, which the store keeps as an attribute of
  the object ``.metadata``. After any other failure that name is read: if it is A's, the save has
  succeeded; if the store has refused a try and the name is another writer's, B was faster.
- *A gateway answers 503, and A's commit is carried out seconds later.* Even if no commit object
  exists yet, this can't be excluded: A raises :class:`CommitUnknownError`, and deletes nothing
  that its checkpoint would need.
- *A reader has the old metadata when step 5 deletes its objects.* It sees that the metadata was
  replaced and starts again (``transfer.retry.retry_if_replaced``); it never mistakes this for
  damage.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from cloudckpt.checkpoint.baseline import Baseline, conflict
from cloudckpt.checkpoint.committed import CommitObject, Fetched, fetch
from cloudckpt.checkpoint.objects import WrittenObject, look_for, trial_name
from cloudckpt.checkpoint.references import release
from cloudckpt.config import Config, Switch
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointReplacedError,
    CloudCheckpointError,
    CommitUnknownError,
    ConfigError,
    DifferentCheckpointsError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from cloudckpt.stores.base import ObjectInfo, ObjectStore, random_suffix
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI

__all__ = [
    "commit",
    "conditions_work",
    "honours_conditions",
    "no_longer_needed",
    "publish",
    "trusted",
]

logger = logging.getLogger("cloudckpt")

_NO_VERSION = '"00000000000000000000000000000000"'


def conditions_work(store: ObjectStore, setting: Switch, key: str, retrier: Retrier) -> bool:
    """Returns True if commits can rely on conditional writes, False if the user turned them off.

    Args:
        store: The store.
        setting: The user's setting. ``auto`` follows what is known about the store, and tests a
            store of which nothing is known, once; ``on`` trusts the store without a test.
        key: The key of an object for the test, which nothing else writes.
        retrier: Retries transient failures of the test.

    Raises:
        ConfigError: If the store ignores or refuses conditions, and ``setting`` is ``auto``.
        StoreError: If a request of the test fails, so that nothing is known.
    """
    if setting == "off":
        logger.warning(
            "%s: conditional writes are off, so concurrent writers of one checkpoint are not "
            "detected: let only one job at a time save here",
            store.root,
        )
        return False
    if setting == "on" or store.capabilities.conditional_writes:
        return True
    if store.capabilities.conditional_writes is None:
        try:
            retrier.call(lambda: store.put(key, [], checksum=store.capabilities.checksum.of(b"")))
            found = honours_conditions(store, key, b"", retrier)
        finally:
            delete_quietly(store, [key], retrier.policy, threads=1)
        store.capabilities = dataclasses.replace(store.capabilities, conditional_writes=found)
        if found:
            return True
    raise ConfigError(
        "the store ignores conditional writes (If-None-Match, If-Match) or refuses them, and they "
        "protect what is written from concurrent writers. If only one job at a time writes here, "
        "set Config(conditional_writes='off'); otherwise use another store",
        uri=store.root,
    )


def honours_conditions(store: ObjectStore, key: str, content: bytes, retrier: Retrier) -> bool:
    """Returns whether a store honours conditional writes, after trying them on an existing object.

    Two writes have conditions that do not hold, and one has a condition that holds.

    Args:
        store: The store.
        key: The key of the object, which is overwritten.
        content: Its bytes before and after the test.
        retrier: Retries transient failures.

    Raises:
        StoreError: If a request fails for another reason than a condition.
    """
    body = [memoryview(content)]
    checksum = store.capabilities.checksum.of(content)

    def put(if_version: str) -> None:
        store.put(key, body, checksum=checksum, if_version=if_version)

    try:
        for condition in ("", _NO_VERSION):
            try:
                retrier.call(functools.partial(put, condition))
            except PreconditionFailedError:
                continue
            return False
        # each try requests the version: an earlier try whose answer was lost may have changed it
        retrier.call(lambda: put(store.head(key).version))
    except (PreconditionFailedError, InvalidRequestError):
        return False  # a condition that holds failed, or conditions are refused
    return True


def commit(
    store: ObjectStore,
    baseline: Baseline,
    body: Sequence[memoryview],
    *,
    conditional: bool,
    retrier: Retrier,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Writes the commit object, which makes the checkpoint visible, in a single request.

    Before each try, ``check`` is called; an error that it raises ends the commit.

    A try certainly failed only if the store itself says so (``StoreError.certain``). The outcome of
    any other failure is unknown: a gateway may answer 503 although the request is carried out
    seconds later, after a HEAD request has seen no commit object. After such a try, this function
    returns only if the commit object in the store is this save's. It reports a conflict only if the
    store has refused a try, and the commit object is another writer's or was deleted: then this
    save's commit object can't appear any more. In all other cases the data must be kept. A commit
    object carries the random name of its commit. If the store drops that name, as stores without
    metadata do, the writer of the commit object is unknown.

    Args:
        store: The store.
        baseline: The commit object at the location when the save began; no other is replaced.
        body: The bytes of the new commit object.
        conditional: Whether the store ensures that no other commit object is replaced; otherwise
            other writers are not noticed.
        retrier: Retries transient failures.
        check: Called before each try.

    Raises:
        CheckpointConflictError: If another writer has committed, or has deleted the checkpoint.
            Nothing of this save is or will become visible.
        CommitUnknownError: If it can't be determined whether the commit took place, or still will.
        StoreError: If the commit certainly did not take place, and will not.
    """
    key, attempt, algorithm = baseline.key, random_suffix(), store.capabilities.checksum
    checksum = functools.reduce(lambda found, view: algorithm.of(view, found), body, 0)
    version = (baseline.version or "") if conditional else None
    uncertain = False

    def put() -> None:
        nonlocal uncertain
        check()
        try:
            store.put(key, body, checksum=checksum, attempt=attempt, if_version=version)
        except StoreError as error:
            uncertain = uncertain or not error.certain
            raise

    try:
        retrier.call(put)
    except CloudCheckpointError as error:
        overtaken = conditional and isinstance(error, PreconditionFailedError)
        if uncertain:
            found = _found(store, key, error, retrier)
            is_ours = found is not None and found.attempt == attempt
            if is_ours and found is not None and found.size == sum(map(len, body)):
                return  # some servers keep what arrived before the connection broke
            is_gone = found is None and baseline.version is not None
            is_theirs = found is not None and found.attempt and found.version != baseline.version
            if is_ours or not overtaken or not (is_gone or is_theirs):
                raise _unknown(store, key, error) from error
        if not overtaken:
            raise
        raise conflict(store.uri(key), error) from error


def _found(
    store: ObjectStore, key: str, failure: CloudCheckpointError, retrier: Retrier
) -> ObjectInfo | None:
    """Returns the commit object that exists now, or None if the store says that it does not exist.

    Raises:
        CommitUnknownError: If the store refuses or does not answer, or if its "not found" is
            uncertain.
    """
    try:
        return retrier.call(lambda: store.head(key))
    except StoreError as error:
        if isinstance(error, ObjectNotFoundError) and error.certain:
            return None
        raise _unknown(store, key, failure) from error


def _unknown(store: ObjectStore, key: str, error: CloudCheckpointError) -> CommitUnknownError:
    return CommitUnknownError(
        "the store did not confirm the commit, which may have taken place or may still take "
        "place; check whether the new checkpoint is here before you go on. Its data was kept",
        uri=store.uri(key),
        cause=error,
    )


def _replaced(store: ObjectStore, baseline: Baseline, retrier: Retrier) -> CommitObject | None:
    """Returns the parsed commit object that this save replaces; None if it replaces none.

    A commit object that can't be parsed is logged, and also gives None.

    Raises:
        CheckpointConflictError: If that commit object was replaced or deleted since the save began.
        StoreError: If the store refuses or stays unreachable.
    """
    if baseline.version is None:
        return None
    uri = store.uri(baseline.key)
    try:
        fetched = retrier.call(functools.partial(fetch, store, baseline.key))
    except (ObjectNotFoundError, CheckpointReplacedError):
        fetched = None
    if fetched is None or fetched.info.version != baseline.version:
        raise conflict(uri)
    return trusted(fetched, uri)


def trusted(fetched: Fetched, uri: str) -> CommitObject | None:
    """Parses a deleted or replaced commit object; logs a warning and returns None if that fails."""
    try:
        return CommitObject.parse(fetched, uri)
    except (CloudCheckpointError, MemoryError) as error:
        logger.warning(
            "%s: the metadata of this deleted or replaced checkpoint is unreadable, so its objects "
            "stay; cloudckpt sweep deletes those that cloudckpt wrote, a day later (cause: %s)",
            uri, error,
        )  # fmt: skip
        return None


def no_longer_needed(
    store: ObjectStore,
    uri: CheckpointURI,
    gone: CommitObject | None,
    config: Config,
    *,
    needed: Collection[str] = (),
) -> Sequence[str]:
    """Returns the keys of a deleted or replaced checkpoint's objects that are no longer needed.

    If this can't be determined, the function returns no keys and logs a warning: a later sweep
    deletes the objects that cloudckpt wrote. The function also deletes the marks by which the
    checkpoint has protected objects of other checkpoints (:mod:`cloudckpt.checkpoint.references`).

    Args:
        store: The store.
        uri: The checkpoint.
        gone: The checkpoint's commit object, already deleted or replaced. None if there was none,
            or it can't be parsed: then no keys are returned.
        config: Options.
        needed: The keys named by the checkpoint that replaced it; empty if it was deleted.
    """
    if gone is None:
        return ()
    try:
        if gone.record is not None:
            return release(store, uri, gone, config, needed=needed)
        names = gone.names(str(uri))
    except (CloudCheckpointError, MemoryError) as error:
        logger.warning(
            "%s: the objects of this deleted or replaced checkpoint stay, as it is unknown which "
            "are needed; run cloudckpt sweep a day later to delete those that are not (cause: %s)",
            uri, error,
        )  # fmt: skip
        return ()
    return sorted({uri.key(name) for name in names} - set(needed))


def _elsewhere(uri: CheckpointURI, record: WrittenObject, what: str) -> DifferentCheckpointsError:
    """Returns the error for an object that a rank has uploaded, but the coordinator does not see.

    The same URI may lead ranks to different stores, for example if one node has another
    AWS_ENDPOINT_URL, or if a local path is on the disks of two nodes.
    """
    return DifferentCheckpointsError(
        f"rank {record.rank} wrote {record.name} ({record.size} bytes), which {what} for the "
        "rank that commits: unless another program deleted it, ranks write to different stores. "
        "Compare what selects the store on all ranks: endpoint_url, AWS_ENDPOINT_URL and similar "
        "variables, the account; for a path, the mount. Nothing was committed",
        uri=str(uri),
    )


def _gone(uri: CheckpointURI, record: WrittenObject, what: str) -> CheckpointCorruptError:
    """Returns the error for an object of an earlier save that is missing or has another size."""
    return CheckpointCorruptError(
        f"an object of an earlier save, which this checkpoint refers to, {what}: nothing was "
        "committed. Save again, which uploads that data, and verify the earlier checkpoints",
        uri=uri.object(record.name),
    )


def publish(
    store: ObjectStore,
    uri: CheckpointURI,
    config: Config,
    *,
    baseline: Baseline,
    attempt: str,
    objects: Collection[WrittenObject],
    own: Collection[str],
    data: Callable[[], Sequence[memoryview]],
    kept: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> None:
    """Commits a checkpoint, if all of its data objects are in the store.

    After the commit, it deletes the objects of the replaced checkpoint that are no longer needed.
    If it is certain that nothing was committed, it deletes the objects of this save, except those
    in ``kept``.

    Args:
        store: The store of ``uri``.
        uri: The checkpoint.
        config: Options.
        baseline: The commit object when the save began.
        attempt: The random name of this save.
        objects: All data objects of the checkpoint, also those of earlier saves.
        own: The names of the objects that this rank itself wrote to ``store``. All other objects
            are looked up in the store, to check that it has them.
        data: Returns the bytes of the commit object.
        kept: The names of the objects of earlier saves; they stay if this fails.
        check: Called before each try of the commit; an error that it raises ends the save. An
            error other than CheckpointConflictError and StoreError becomes a CommitUnknownError.

    Raises:
        DifferentCheckpointsError: If another rank has written to another store.
        CheckpointCorruptError: If an object in ``kept`` is missing or has another size.
        CheckpointConflictError: If another writer has committed here since the save began, or has
            deleted the checkpoint.
        CommitUnknownError: If the store's answers leave open whether the commit took place, or it
            failed unexpectedly.
        ConfigError: If the store does not honour conditional writes, which are not turned off.
        IncompleteSaveError: If the save began more than ``LONGEST_SAVE`` seconds ago.
        StoreError: If the commit did not take place, and will not.
    """
    named = {uri.key(record.name) for record in objects}
    kept = set(kept)
    sent = [record.name for record in objects if record.name not in kept]

    def delete(keys: Iterable[str]) -> None:
        delete_quietly(store, sorted(keys), config.retry, threads=config.requests_at_once)

    def discard() -> None:
        delete(map(uri.key, sent))

    retrier = Retrier(config.retry)
    try:
        body = data()
        earlier = [record for record in objects if record.name in kept]
        known = kept.union(own)
        others = [record for record in objects if record.name not in known]
        look_for(store, uri, others, config, functools.partial(_elsewhere, uri))
        look_for(store, uri, earlier, config, functools.partial(_gone, uri))
        trial = uri.key(trial_name(attempt))
        conditional = conditions_work(store, config.conditional_writes, trial, retrier)
        replaced = _replaced(store, baseline, retrier)
        baseline.check_age(str(uri))
    except BaseException:
        discard()  # nothing can have become visible yet
        raise
    try:
        commit(store, baseline, body, conditional=conditional, retrier=retrier, check=check)
    except (CheckpointConflictError, StoreError):
        discard()  # only these two errors say for certain that nothing became visible
        raise
    except CommitUnknownError:
        raise
    except Exception as error:
        raise CommitUnknownError(
            "the commit failed unexpectedly and may have taken place; its data was kept. Check "
            "whether the new checkpoint is here before you go on",
            uri=str(uri),
            cause=error,
        ) from error
    try:
        delete(no_longer_needed(store, uri, replaced, config, needed=named))
    except Exception:
        logger.exception(
            "%s is committed, but objects of the checkpoint that it replaced may remain: run "
            "cloudckpt sweep a day later",
            uri,
        )
