"""Copies checkpoints and whole runs elsewhere: across clouds, to and from local disks.

A copy commits like a save (:mod:`cloudckpt.checkpoint.commit`): its objects get new random names,
and become visible by one conditional write of ``.metadata``, last. So two copies to one location, a
copy and a save, or a copy and a deletion of the target, can't mix their objects. If copies kept the
names of the source, two copies to the same location would write the same objects, and one that
fails would delete objects that the other one needs.

If the ranks of a group copy a run together, each takes part of its checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.meeting import Meeting, RankStatus, collective
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ConfigError,
)
from cloudckpt.format_utils import check_target
from cloudckpt.runs.catalog import Run, list_checkpoints
from cloudckpt.runs.checkpoint_copy import Copied, copy_checkpoint
from cloudckpt.runs.claim import copy_claim
from cloudckpt.runs.contents import inspect
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.runs.verifying import Progress, merged_error
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
    reports are compared. Otherwise the bytes pass through at most ``memory_budget`` bytes of memory
    (or two upload parts if those are larger: for objects above 300 GB), and are compared with the
    checksums of the source on the way. The copy is committed last, in one write, like a save: a
    reader never sees a partial copy, and damaged data is never committed. Notes, metrics, structure
    and checksum algorithm are those of the source; the data objects get new names. A copy that
    fails or is interrupted deletes the objects that it has written.

    Of a run, each folder with a committed checkpoint is copied to a folder of the same name. The
    run's claim, which decides which steps are abandoned, is copied, too. If another job has claimed
    the target itself, its claim stays, with a warning, and none of its steps are replaced unless
    ``overwrite`` is True. Uncommitted checkpoints and other files are not copied.
    A damaged checkpoint is skipped, and reported at the end. A checkpoint that is deleted during
    the copy, for example by the retention of a running job, is left out and logged. A checkpoint
    that the target already has, with equal checksums, is not copied again, so the same call
    continues an interrupted copy of a run.

    A folder is a checkpoint or a run, never both. If ``source`` is a checkpoint and ``target`` an
    existing run, the copy is put into the run under the name of the source's folder, as with
    ``cp``.

    Args:
        source: The location of a checkpoint, or the folder of a run.
        target: The location of the copy; for a checkpoint also the folder of an existing run.
        overwrite: Whether a checkpoint at the target may be replaced; None uses
            ``Config.overwrite`` of the target's options.
        step_name: Of a run, copy only folders named by this pattern, such as ``"step-{step}"``;
            None copies all.
        config: Options; None reads them from the environment.
        target_config: Options for the target, if they differ, for example in the endpoint; None
            uses ``config``.
        process_group: The ranks that divide the checkpoints of a run among themselves; all of them
            must call this function. A single checkpoint is copied by the first rank. None: this
            process copies alone.
        progress: Called with the bytes that this rank has copied so far and the bytes that it will
            copy in all, from any thread.

    Returns:
        How much all ranks together have copied.

    Raises:
        InvalidURIError: If ``source`` or ``target`` is not a valid location.
        ConfigError: If both are the same location, an option is invalid, or the target's store
            does not support conditional writes.
        DifferentCheckpointsError: If the ranks were given different locations.
        CheckpointNotFoundError: If there is no committed checkpoint to copy, or all were deleted
            meanwhile.
        CheckpointExistsError: If there is a checkpoint at the target and ``overwrite`` is off, or
            if the source is a run and the target a checkpoint.
        CheckpointCorruptError: If the source is damaged; a damaged checkpoint is not visible at the
            target.
        CheckpointConflictError: If another writer has written to the target meanwhile.
        CommitUnknownError: If the store does not say whether the commit took place.
        CheckpointReplacedError: If the source was replaced meanwhile, again and again.
        StoreError: If a store refuses or stays unreachable.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """
    meeting = Meeting(process_group)
    origin, goal = meeting.begin(
        lambda: _ends(source, target, config, target_config, overwrite),
        lambda ends: RankStatus(
            location=f"the copy of {ends[0].root} to {ends[1].root}",
            options=(f"overwrite={ends[1].config.overwrite}",),
        ),
    )
    copies = meeting.broadcast_from_first(lambda: _copies(origin, goal, step_name))
    if copies[0].source != origin.root:  # the source is a run
        is_taken = meeting.broadcast_from_first(lambda: copy_claim(origin, goal))
        keeps = is_taken and overwrite is None
        goal = Run(goal.root, config=replace(goal.config, overwrite=False)) if keeps else goal
    share = copies[meeting.rank :: meeting.size]
    of_all = meeting.gathered(lambda: _carry_out(share, origin, goal, Progress(progress)))
    copied = sum((one for one, _ in of_all), Copied())
    failed = [error for _, errors in of_all for error in errors]
    if damaged := [error for error in failed if isinstance(error, CheckpointCorruptError)]:
        error = merged_error(damaged)
        if len(copies) > 1:
            error.message += (
                f" | damaged checkpoints that were not copied: {len(damaged)}; copied, or already "
                f"at the target: {copied.checkpoints + copied.already_there}"
            )
        raise error
    if failed and not copied.checkpoints + copied.already_there:
        raise failed[0]
    return copied


@dataclass(frozen=True)
class _Copy:
    """A checkpoint to copy, its target, and its size in bytes (0 if not copied with a run)."""

    source: CheckpointURI
    target: CheckpointURI
    nbytes: int = 0


def _carry_out(
    copies: Sequence[_Copy], origin: Run, goal: Run, done: Progress
) -> tuple[Copied, list[CloudCheckpointError]]:
    """Copies checkpoints one after the other.

    Returns:
        How much was copied, and the errors of the checkpoints that are damaged or were deleted.
    """
    done.total = sum(each.nbytes for each in copies)
    copied, failed = Copied(), list[CloudCheckpointError]()
    for each in copies:
        source, to = Run(each.source, config=origin.config), Run(each.target, config=goal.config)
        is_of_a_run = source.root != origin.root
        try:
            copied += retry_if_replaced(
                partial(copy_checkpoint, source, to, done, skips_same=is_of_a_run)
            )
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            failed.append(error)
            if isinstance(error, CheckpointNotFoundError):
                logger.warning("a checkpoint was deleted before it was copied: %s", error.uri)
    return copied, failed


def planned(
    source: URILike,
    target: URILike,
    *,
    step_name: str | None = None,
    config: Config | None = None,
) -> list[tuple[str, str, int]]:
    """Lists the checkpoints that :func:`copy` would copy, as (source, target, bytes).

    The arguments are as in :func:`copy`. If the source is a run, the bytes are the size of all
    objects in the checkpoint's folder, otherwise the size of its entries. Checkpoints that the
    target already has are included.

    Raises:
        CloudCheckpointError: The errors of :func:`copy` that can be detected without copying.
    """
    origin, goal = _ends(source, target, config)
    copies = _copies(origin, goal, step_name)
    if copies[0].source == origin.root:  # the source is a checkpoint
        check_target(copies[0].target, goal.config)
        copies = [replace(copies[0], nbytes=inspect(origin.root, config=origin.config).nbytes)]
    return [(str(each.source), str(each.target), each.nbytes) for each in copies]


def _ends(
    source: URILike,
    target: URILike,
    config: Config | None,
    target_config: Config | None = None,
    overwrite: bool | None = None,
) -> tuple[Run, Run]:
    """Returns the source and the target of a copy, each with its options.

    The options of the source always verify checksums. ``target_config`` and ``overwrite`` are those
    of :func:`copy`.
    """
    options = replace(config_or_default(config), verify=True)
    to = config_or_default(options if target_config is None else target_config)
    to = to if overwrite is None else replace(to, overwrite=overwrite)
    return Run(source, config=options), Run(checkpoint_location(target), config=to)


def detach(
    checkpoint_id: URILike,
    *,
    config: Config | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Copied:
    """Copies into a checkpoint's own folder the objects of other checkpoints that it refers to.

    The bytes are copied as by :func:`copy`, and the checkpoint's commit object is replaced by one
    that names the copies. The shared objects are deleted if no other checkpoint needs them.

    Args:
        checkpoint_id: The location of the checkpoint, for example ``s3://bucket/path``.
        config: Options; None reads them from the environment.
        progress: Called with the bytes copied so far and the bytes to copy in all, from any thread.

    Returns:
        How much was copied; ``already_there`` is 1 if the checkpoint refers to no other checkpoint.

    Raises:
        InvalidURIError: If ``checkpoint_id`` is not a valid location.
        CheckpointNotFoundError: If the location has no committed checkpoint.
        CheckpointCorruptError: If the shared bytes are damaged; the checkpoint stays unchanged.
        ConfigError: If an option is invalid, or the store does not support conditional writes.
        CheckpointConflictError: If another writer has replaced the checkpoint meanwhile.
        CheckpointReplacedError: If the checkpoint was replaced meanwhile, again and again.
        CommitUnknownError: If the store does not say whether the commit took place.
        StoreError: If the store refuses or stays unreachable.
    """
    checkpoint = Run(checkpoint_id, config=replace(config_or_default(config), verify=True))
    if not inspect(checkpoint.root, config=checkpoint.config).shared:
        return Copied(already_there=1)
    return retry_if_replaced(partial(copy_checkpoint, checkpoint, checkpoint, Progress(progress)))


def _copies(origin: Run, goal: Run, step_name: str | None) -> list[_Copy]:
    """Lists the copies to make: of the source if that is a checkpoint, else of a run's checkpoints.

    Raises:
        ConfigError: If the source and the target are the same, or ``step_name`` is not valid.
        CheckpointExistsError: If the source is a run, and the target a checkpoint.
        CheckpointNotFoundError: If there is no committed checkpoint to copy.
    """
    is_there, is_checkpoint, to = goal.is_checkpoint(), origin.is_checkpoint(), goal.root
    if is_checkpoint and origin.root.folder and not is_there and _is_run(goal):
        to = goal.root.join(origin.root.folder)
        logger.info("%s is a run: the copy is put into it, at %s", goal.root, to)
    if origin.root == to and origin.store is goal.store:
        raise ConfigError(
            "the source and the target of the copy are the same: choose another target",
            uri=str(to),
        )
    if is_checkpoint:
        return [_Copy(origin.root, checkpoint_location(to))]
    if is_there:
        raise CheckpointExistsError(
            "the target is a checkpoint, so a run can't be copied to it: choose another target, or "
            "delete that checkpoint first",
            uri=str(goal.root),
        )
    pattern = step_name or DEFAULT_PATTERN
    copies = [
        _Copy(source, checkpoint_location(goal.root.join(source.folder)), summary.nbytes)
        for summary in list_checkpoints(origin.root, step_name=pattern, config=origin.config)
        if summary.is_committed and (step_name is None or summary.step is not None)
        for source in [CheckpointURI.parse(summary.uri)]
    ]
    if not copies:
        what = "" if step_name is None else f" named like {step_name!r}"
        raise CheckpointNotFoundError(
            f"there is no committed checkpoint to copy, neither here nor in a subfolder{what}: "
            "check the location",
            uri=str(origin.root),
        )
    return copies


def _is_run(folder: Run) -> bool:
    """Returns whether a folder has a run's claim or committed checkpoints in direct subfolders.

    False if access is denied.
    """
    try:
        return folder.owner() is not None or any(one.is_committed for one in folder.summaries())
    except AccessDeniedError:  # credentials that allow only writes to the target
        return False
