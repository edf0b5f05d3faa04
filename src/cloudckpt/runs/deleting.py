"""Deletes checkpoints: first what makes them visible, then their data."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Literal

from cloudckpt.checkpoint.commit import no_longer_needed, trusted
from cloudckpt.checkpoint.committed import CommitObject, fetch
from cloudckpt.checkpoint.objects import METADATA
from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ConfigError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.contents import inspect
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention
from cloudckpt.transfer.deleting import delete_all
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["delete", "delete_at", "unneeded"]


def delete(uri: URILike, *, config: Config | None = None) -> None:
    """Deletes a committed checkpoint.

    Its commit object goes first, on the condition that no other save has replaced it meanwhile: so
    nobody sees a checkpoint without its data, and a save in progress stays intact. Then go the
    objects that it names, except those that other checkpoints refer to; these are deleted with the
    last checkpoint that refers to them. Other objects beneath its location are not touched. If this
    is interrupted, what is left is invisible.

    A save that got no answer to its commit sends the same request once more. If the checkpoint was
    just being deleted, it reappears until its data is deleted; then it is deleted, too.

    Args:
        uri: ``s3://bucket/path`` or another location.
        config: Options.

    Raises:
        InvalidURIError: If it is not a valid location.
        CheckpointNotFoundError: If there is no committed checkpoint.
        CheckpointReplacedError: If another save has replaced it meanwhile; that one stays as it is.
        StoreError: If the store refuses or stays unreachable.
    """
    delete_at(CheckpointURI.parse(uri), config_or_default(config))


def delete_at(
    location: CheckpointURI, config: Config, check: Callable[[], None] = lambda: None
) -> None:
    """As :func:`delete`.

    Args:
        location: Where it is.
        config: Options.
        check: Called between reading the version to delete and deleting it; what it raises ends the
            deletion.
    """
    store, retrier = open_store(location, config), Retrier(config.retry)
    commit = location.key(METADATA)
    try:
        found = retrier.call(partial(fetch, store, commit))
    except ObjectNotFoundError as error:
        raise CheckpointNotFoundError(
            "there is no committed checkpoint to delete; what an interrupted save has left there "
            "is deleted by sweep",
            uri=str(location),
        ) from error
    gone = trusted(found, store.uri(commit))

    def delete_commit() -> None:
        check()
        store.delete(commit, if_version=found.info.version)

    try:
        retrier.call(delete_commit)
    except PreconditionFailedError as error:
        raise CheckpointReplacedError(
            "another save replaced it, or it was deleted, after this deletion began; what is "
            "there now was left alone",
            uri=str(location),
        ) from error
    keys = no_longer_needed(store, location, gone, config)
    delete_all(
        store,
        keys,
        config.retry,
        threads=config.requests_at_once,
        what="objects of a deleted checkpoint that are",
    )
    with contextlib.suppress(ObjectNotFoundError, PreconditionFailedError, CheckpointReplacedError):
        again = retrier.call(partial(fetch, store, commit))
        if gone is not None and _is_of_the_same_save(gone, trusted(again, store.uri(commit))):
            retrier.call(partial(store.delete, commit, if_version=again.info.version))
    if location.scheme == "file":
        for folder in {location.prefix, *map(os.path.dirname, keys)}:
            with contextlib.suppress(OSError):  # the folder holds other files
                os.rmdir(folder)


def _is_of_the_same_save(one: CommitObject, other: CommitObject | None) -> bool:
    """Whether two commit objects share an object that only one save has written."""
    if other is None:
        return False
    if one.record is not None and other.record is not None:
        return one.record.attempt == other.record.attempt
    return bool(one.metadata.storage_data == other.metadata.storage_data)


def unneeded(
    run: URILike,
    *,
    max_to_keep: int,
    keep_period: int | None = None,
    best_metric: str | None = None,
    best_mode: Literal["min", "max"] = "min",
    abandoned: bool = False,
    step_name: str = DEFAULT_PATTERN,
    config: Config | None = None,
) -> list[str]:
    """The committed checkpoints of a run that need not be kept, by step.

    The arguments are those of :class:`CheckpointManager`. Only steps on the line of the run count
    (:mod:`cloudckpt.runs.line`), of which the newest is always kept. The metadata of the run's
    newest must be readable: otherwise good checkpoints would be deleted in favour of a damaged one.
    Others whose notes can't be read are kept in addition, and logged. Abandoned steps are among the
    results only if ``abandoned``.

    Raises:
        CheckpointCorruptError: If the metadata of the newest is not readable.
        ConfigError: If an option is invalid, or no checkpoint has the metric.
        InvalidURIError: If it is not a valid location.
        StoreError: If the store refuses or stays unreachable.
    """
    kept = Retention(max_to_keep=max_to_keep, keep_period=keep_period, best_mode=best_mode)
    found = Run(run, step_name=step_name, config=config)
    history = found.history()
    for error in history.unread.values():
        if isinstance(error, StoreError):
            raise error
    found.log_unread(history.unread)
    steps, scores = [*history.line], None
    if best_metric is not None:
        scores = history.scores(best_metric)
        if scores and all(map(math.isnan, scores.values())):
            raise ConfigError(
                f"no checkpoint of this run has the metric {best_metric!r}, so none is the best: "
                "cloudckpt inspect shows what they have",
                uri=str(found.root),
            )
    unneeded = [str(found.uri(step)) for step in kept.unneeded(steps, scores)]
    if unneeded:
        try:
            newest = max([*steps, *history.abandoned, *history.unread])
            inspect(found.uri(newest), config=found.config)
        except CheckpointCorruptError as error:
            error.message += (
                "; it is the newest of the run, which is kept: delete it before those that are good"
            )
            raise
    if abandoned:
        unneeded += [str(found.uri(step)) for step in history.abandoned]
    return unneeded
