"""Deletes checkpoints and whole runs: first the commit objects, then the data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial

from cloudckpt.checkpoint.commit import no_longer_needed, trusted
from cloudckpt.checkpoint.committed import CommitObject, fetch
from cloudckpt.checkpoint.objects import CLAIM, METADATA
from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.runs.catalog import list_checkpoints
from cloudckpt.runs.sweeping import sweep
from cloudckpt.transfer.deleting import delete_all
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["delete", "delete_at", "delete_run"]


def delete(uri: URILike, *, config: Config | None = None) -> None:
    """Deletes a committed checkpoint.

    The commit object is deleted first, on the condition that no other save has replaced it
    meanwhile: so a reader never sees a checkpoint without its data, and a save in progress stays
    intact. Then the objects that it names are deleted, except those that other checkpoints refer
    to; these are deleted with the last checkpoint that refers to them. Other objects in the folder
    are not touched. If the deletion is interrupted, the remaining objects are invisible to readers.
    If the metadata is damaged, only the commit object is deleted, and a warning is logged.

    A save whose commit got no answer sends that request again. If this happens during the deletion,
    the commit object reappears; it is deleted once more after the data.

    Args:
        uri: The location of the checkpoint, for example ``s3://bucket/path``.
        config: Options; None reads them from the environment.

    Raises:
        InvalidURIError: If ``uri`` is not a valid location.
        CheckpointNotFoundError: If the location has no committed checkpoint.
        CheckpointReplacedError: If the checkpoint was replaced or deleted meanwhile; a new one is
            not deleted.
        ConfigError: If an option is invalid.
        StoreError: If the store refuses or stays unreachable.
    """
    delete_at(CheckpointURI.parse(uri), config_or_default(config))


def delete_at(
    location: CheckpointURI,
    config: Config,
    check: Callable[[], None] = lambda: None,
    deleted: Callable[[], object] = lambda: None,
) -> None:
    """Deletes a committed checkpoint as :func:`delete` does, after a check by the caller.

    Args:
        location: The location of the checkpoint.
        config: Options.
        check: Called before each try to delete the commit object. If it raises at the first try,
            nothing is deleted; later the commit object may be gone, if the answer was lost.
        deleted: Called when the commit object is deleted, before the data.

    Raises:
        CloudCheckpointError: The errors of :func:`delete` and of ``check``.
    """
    store, retrier = open_store(location, config), Retrier(config.retry)
    commit = location.key(METADATA)
    try:
        fetched = retrier.call(partial(fetch, store, commit))
    except ObjectNotFoundError as error:
        raise CheckpointNotFoundError(
            "there is no committed checkpoint to delete: check the location; cloudckpt sweep "
            "deletes what interrupted saves have left, and cloudckpt rm --recursive a whole run",
            uri=str(location),
        ) from error
    gone = trusted(fetched, store.uri(commit))

    def delete_commit() -> None:
        check()
        store.delete(commit, if_version=fetched.info.version)

    try:
        retrier.call(delete_commit)
    except PreconditionFailedError as error:
        raise CheckpointReplacedError(
            "the checkpoint was replaced or deleted after this deletion began; a new checkpoint "
            "here was kept: delete it if it is unneeded",
            uri=str(location),
        ) from error
    deleted()
    keys = no_longer_needed(store, location, gone, config)
    delete_all(
        store,
        keys,
        config.retry,
        threads=config.requests_at_once,
        what="objects of a deleted checkpoint",
    )
    with contextlib.suppress(ObjectNotFoundError, PreconditionFailedError, CheckpointReplacedError):
        again, name = retrier.call(partial(fetch, store, commit)), _attempt_of(gone)
        if name and name == _attempt_of(trusted(again, store.uri(commit))):
            retrier.call(partial(store.delete, commit, if_version=again.info.version))
    _remove_empty(location, {location.prefix, *map(os.path.dirname, keys)})


def delete_run(
    run: URILike,
    *,
    config: Config | None = None,
    deleted: Callable[[str], object] = lambda uri: None,
) -> None:
    """Deletes all checkpoints of a run, the leftovers of killed saves, and the run's claim.

    The claim is the object that names the job which may save into the run. No job may be saving
    into the run or beneath it. Objects of other programs stay, and so do leftovers of torch's own
    writers.

    Args:
        run: The folder of the run.
        config: Options; None reads them from the environment.
        deleted: Called with the URI of each committed checkpoint when its commit object is deleted,
            by this call or another process.

    Raises:
        InvalidURIError: If ``run`` is not a valid location.
        ConfigError: If ``run`` is a checkpoint, not a run.
        StoreError: If the store refuses or stays unreachable.
    """
    location, config = CheckpointURI.parse(run), config_or_default(config)
    summaries = list_checkpoints(location, config=config)
    for uri in [summary.uri for summary in summaries if summary.is_committed]:
        try:
            delete_at(CheckpointURI.parse(uri), config, deleted=partial(deleted, uri))
        except CheckpointNotFoundError:  # another process has deleted it
            deleted(uri)
    sweep(location, older_than=0, config=config)
    store, claim = open_store(location, config), location.key(CLAIM)
    delete_all(store, [claim], config.retry, threads=1, what="objects of a deleted run")
    inside = [CheckpointURI.parse(summary.uri).prefix for summary in summaries]
    _remove_empty(location, [*inside, location.prefix])


def _remove_empty(location: CheckpointURI, folders: Iterable[str]) -> None:
    for folder in folders if location.scheme == "file" else ():
        with contextlib.suppress(OSError):  # the folder holds other files
            os.rmdir(folder)


def _attempt_of(commit: CommitObject | None) -> str:
    """Returns the random name of the save that wrote a commit object; empty if unknown."""
    return "" if commit is None or commit.record is None else commit.record.attempt
