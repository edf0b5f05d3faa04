"""Copies checkpoints and whole runs elsewhere: across clouds, to and from local disks.

A copy is made like a save, with the same commit (:mod:`cloudckpt.checkpoint.commit`): its objects
get random names of their own, and become visible by one conditional write of ``.metadata``, last.
So two copies to one location, or a copy and a save, or a copy and a deletion of what is there,
can't mix. If a copy kept the names of its source, a second copy to the same location would have to
share the objects of the first, which may be deleting them at that moment.

If the ranks of a group copy a run together, each takes part of its checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from cloudckpt.checkpoint.objects import is_committed
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.arrivals import collective
from cloudckpt.dcp.meeting import Meeting, RankStatus
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
)
from cloudckpt.runs.catalog import list_checkpoints
from cloudckpt.runs.checkpoint_copy import Copied, Place, copy_checkpoint
from cloudckpt.runs.claim import copy_claim
from cloudckpt.runs.contents import inspect
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.runs.verifying import Progress, one_error
from cloudckpt.stores.registry import checkpoint_location
from cloudckpt.transfer.retry import retry_if_replaced
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["Copied", "copy", "detach", "planned"]

logger = logging.getLogger("cloudckpt")


@collective("cloudckpt.copy")
def copy(
    source: URILike,
    target: URILike,
    *,
    overwrite: bool | None = None,
    step_name: str | None = None,
    config: Config | None = None,
    target_config: Config | None = None,
    process_group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Copied:
    """Copies a committed checkpoint, or all committed checkpoints of a run.

    Within a cloud the store copies the data objects itself, if it can, and the checksums that it
    reports are compared. Otherwise the bytes pass through memory of at most ``memory_budget`` (or
    two parts of an upload if those are larger: for objects above 300 GB), and are compared with the
    checksums of the source on the way. The copy is committed last, in one write, like a save:
    nobody ever sees a part of it, and damaged data is never copied. Notes, metrics, structure and
    the kind of checksums stay; the data objects get new names. A copy that fails or is interrupted
    deletes what it has written.

    Of a run, each folder with a committed checkpoint is copied to a folder of the same name, and so
    is the claim, which says which of them are abandoned, if the target has none; other content
    (uncommitted checkpoints, other files) is not. A damaged checkpoint is skipped, and reported at
    the end. One that is deleted meanwhile, as a job that is still saving does with what it does not
    keep, is left out, which is logged. A checkpoint that the target already has is not copied
    again, so an interrupted copy of a run continues where it stopped.

    A folder is a checkpoint or a run, never both. As with ``cp``, a checkpoint that is copied to
    the folder of a run that is there goes beneath it, under its own name.

    Args:
        source: A checkpoint, or the folder of a run.
        target: The location of the copy, or of a checkpoint the folder of a run.
        overwrite: Whether a checkpoint at the target may be replaced; None does as the options of
            the target say.
        step_name: Of a run, copy only folders with such names, for example ``"step-{step}"``.
        config: Options.
        target_config: Options for the target, if they differ: its endpoint, for example.
        process_group: Ranks that divide the checkpoints of a run among themselves, if all of them
            call this; a single checkpoint is copied by the first one.
        progress: Called with the bytes that this rank has copied so far and will copy in all, from
            any thread.

    Raises:
        InvalidURIError: If ``source`` or ``target`` is not a valid location.
        ConfigError: If both are the same location.
        CheckpointNotFoundError: If there is no committed checkpoint to copy, or all were deleted
            meanwhile.
        CheckpointExistsError: If there is a checkpoint at the target and ``overwrite`` is off; also
            if the checkpoint to be replaced, or its replacement, was saved without collectives, or
            if the target of a run is a checkpoint.
        CheckpointCorruptError: If the source is damaged; nothing of it is visible at the target.
        CheckpointConflictError: If another writer has written to the target meanwhile.
        CommitUnknownError: If the store does not say whether the commit took place.
        CheckpointReplacedError: If the source was replaced meanwhile, again and again.
        StoreError: If a store refuses or stays unreachable.
    """

    def prepare() -> tuple[Place, Place]:
        origin, goal = _ends(source, target, config, target_config)
        if overwrite is not None:
            goal = replace(goal, config=replace(goal.config, overwrite=overwrite))
        return origin, goal

    meeting = Meeting(process_group)
    origin, goal = meeting.begin(
        prepare,
        lambda ends: RankStatus(
            location=f"the copy of {ends[0].uri} to {ends[1].uri}",
            options=f"overwrite={ends[1].config.overwrite}",
        ),
    )
    done = Progress(progress)
    pairs = meeting.broadcast_from_first(lambda: _pairs(origin, goal, step_name))
    if pairs[0].nbytes is None:
        from_, to = pairs[0].ends(origin, goal)
        return meeting.broadcast_from_first(
            lambda: retry_if_replaced(partial(copy_checkpoint, from_, to, done))
        )
    meeting.broadcast_from_first(
        lambda: copy_claim(origin.uri, origin.config, goal.uri, goal.config)
    )
    share = pairs[meeting.rank :: meeting.size]
    copies = meeting.begin(lambda: _copies(origin, goal, share, done))
    of_all = meeting.gathered(copies)
    copied = sum((one.copied for one in of_all), Copied())
    if damaged := [error for one in of_all for error in one.damaged]:
        raise _of_a_run(damaged, copied)
    deleted = [error for one in of_all for error in one.deleted]
    if deleted and not copied.checkpoints + copied.already_there:
        raise deleted[0]
    return copied


@dataclass(frozen=True)
class _Copies:
    """What became of the checkpoints of a run."""

    copied: Copied
    damaged: list[CheckpointCorruptError]
    deleted: list[CheckpointNotFoundError]


def _copies(origin: Place, goal: Place, pairs: Sequence[_Pair], done: Progress) -> _Copies:
    """Copies checkpoints of a run, one after the other."""
    done.total = sum(pair.nbytes or 0 for pair in pairs)
    copied, damaged, deleted = Copied(), list[CheckpointCorruptError](), []
    for pair in pairs:
        source, target = pair.ends(origin, goal)
        try:
            copied += retry_if_replaced(
                partial(copy_checkpoint, source, target, done, is_of_a_run=True)
            )
        except CheckpointCorruptError as error:
            damaged.append(error)
        except CheckpointNotFoundError as error:
            deleted.append(error)
            logger.warning("a checkpoint was deleted while its run was copied: %s", error.uri)
    return _Copies(copied, damaged, deleted)


def planned(
    source: URILike,
    target: URILike,
    *,
    step_name: str | None = None,
    config: Config | None = None,
) -> list[tuple[str, str, int]]:
    """What :func:`copy` would copy: of each checkpoint, from where, to where, and its bytes.

    Those that the target has already are among them. Errors are those of :func:`copy`, as far as
    they can be known before.
    """
    origin, goal = _ends(source, target, config, None)
    found = []
    for pair in _pairs(origin, goal, step_name):
        (here, to), nbytes = pair.ends(origin, goal), pair.nbytes
        if nbytes is None:
            if not to.config.overwrite and is_committed(to.store, to.uri, to.retrier):
                raise CheckpointExistsError("it exists, and overwrite is off", uri=str(to.uri))
            nbytes = inspect(here.uri, config=here.config).nbytes
        found.append((str(here.uri), str(to.uri), nbytes))
    return found


def _ends(
    source: URILike, target: URILike, config: Config | None, target_config: Config | None
) -> tuple[Place, Place]:
    options = replace(config_or_default(config), verify=True)
    return (
        Place(CheckpointURI.parse(source), options),
        Place(checkpoint_location(target), options if target_config is None else target_config),
    )


def detach(
    checkpoint_id: URILike,
    *,
    config: Config | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Copied:
    """Makes a checkpoint that shares bytes with others beside it stand alone.

    The shared bytes are copied into its own folder, as :func:`copy` does, and its commit object is
    replaced by one that names the copies. What it referred to is deleted if nothing else needs it.

    Args:
        checkpoint_id: ``s3://bucket/path`` or another location.
        config: Options.
        progress: As of :func:`copy`.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        CheckpointCorruptError: If the shared bytes are damaged; it stays as it is.
        CheckpointConflictError: If another writer has replaced it meanwhile.
        StoreError: If the store refuses or stays unreachable.
    """
    options = replace(config_or_default(config), verify=True)
    place = Place(CheckpointURI.parse(checkpoint_id), options)
    if not inspect(place.uri, config=place.config).shared:
        return Copied(already_there=1)
    return retry_if_replaced(partial(copy_checkpoint, place, place, Progress(progress)))


@dataclass(frozen=True)
class _Pair:
    """A checkpoint that is to be copied: from where, to where; its bytes as listed, if of a run."""

    source: str
    target: str
    nbytes: int | None = None

    def ends(self, origin: Place, goal: Place) -> tuple[Place, Place]:
        """Both locations, with the options of this rank."""
        source, target = CheckpointURI.parse(self.source), checkpoint_location(self.target)
        return replace(origin, uri=source), replace(goal, uri=target)


def _pairs(origin: Place, goal: Place, step_name: str | None) -> list[_Pair]:
    """The checkpoints of a run; or one, of which the listing has no size."""
    is_there = is_committed(goal.store, goal.uri, goal.retrier)
    if is_committed(origin.store, origin.uri, origin.retrier):
        name = origin.uri.prefix.rpartition("/")[2]
        beneath = name and not is_there and _is_run(goal)
        to = goal.uri.join(name) if beneath else goal.uri
        if origin.uri == to and origin.store is goal.store:
            raise ConfigError(
                "the source and the target of the copy are the same: choose another target",
                uri=str(to),
            )
        if beneath:
            logger.info("%s is a run: the copy is put into it, at %s", goal.uri, to)
        return [_Pair(str(origin.uri), str(to))]
    if origin.uri == goal.uri and origin.store is goal.store:
        raise ConfigError(
            "the source and the target of the copy are the same: choose another target",
            uri=str(goal.uri),
        )
    if is_there:
        raise CheckpointExistsError(
            "the target is a checkpoint, and a folder can't be a checkpoint and a run: choose "
            "another target, or delete it first",
            uri=str(goal.uri),
        )
    pattern = step_name or DEFAULT_PATTERN
    found = [
        _Pair(one.uri, str(goal.uri.join(CheckpointURI.parse(one.uri).folder)), one.nbytes)
        for one in list_checkpoints(origin.uri, step_name=pattern, config=origin.config)
        if one.is_committed and (step_name is None or one.step is not None)
    ]
    if not found:
        what = "" if step_name is None else f" called {step_name!r}"
        raise CheckpointNotFoundError(
            f"there is no committed checkpoint to copy, neither here nor in a folder{what} in it",
            uri=str(origin.uri),
        )
    return found


def _is_run(place: Place) -> bool:
    """Whether checkpoints are beneath a location."""
    try:
        found = list_checkpoints(place.uri, config=place.config)
    except AccessDeniedError:  # who may only write there
        return False
    return any(one.is_committed for one in found)


def _of_a_run(damaged: list[CheckpointCorruptError], copied: Copied) -> CheckpointCorruptError:
    error = one_error(damaged)
    error.message += (
        f" | {len(damaged)} damaged checkpoints of the run were not copied; "
        f"{copied.checkpoints + copied.already_there} were, or are there already"
    )
    return error
