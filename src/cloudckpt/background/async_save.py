"""``async_save``: torch's own, on a URI, with a stager and a saving process that are kept."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageWriter

from cloudckpt.api import our_writer, writer_for
from cloudckpt.background.save import SaveFuture
from cloudckpt.background.saver import AsyncSaver, alike
from cloudckpt.config import BackgroundOptions, Config
from cloudckpt.dcp.arrivals import collective
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter, check_together
from cloudckpt.fork import ModuleLock
from cloudckpt.uri import URILike

__all__ = ["async_save", "close_async_savers"]

_lock = ModuleLock()
_savers: dict[tuple[Any, ...], AsyncSaver] = {}
_closing: list[AsyncSaver] = []


@collective("cloudckpt.async_save")
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: URILike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    config: Config | None = None,
    base: URILike | None = None,
) -> SaveFuture | AsyncSaveResponse:
    """Copies the state dict and saves the copy in the background; as torch's ``async_save``.

    The memory of the copy, and the saving process if that is asked for, are kept for the next call
    with the same group, kind and options: until :func:`close_async_savers` or the end of the
    interpreter, which waits for saves under way. The first call for a group is collective.

    What goes wrong in the background is told by the future, on every rank. A save whose staged
    copy is still being read is never overwritten by the next: see
    :class:`~cloudckpt.config.BackgroundOptions` for what that one does meanwhile.

    Args:
        state_dict: The state dict; ``Stateful`` values are asked for theirs.
        checkpoint_id: ``s3://bucket/path`` or another location.
        storage_writer: A writer of this package instead of one for ``checkpoint_id``.
        planner: As in torch.
        process_group: The ranks that save together; any backend will do.
        async_checkpointer_type: Whether a thread sends, or a process beside the trainer.
        async_stager: A stager of the caller's.
        no_dist: As in torch.
        use_collectives: Must be on: all ranks commit together.
        config: Options, if no writer is given.
        base: As of :func:`cloudckpt.save`.

    Returns:
        A future of the metadata, with the guarantees and errors of :func:`cloudckpt.save`; or
        torch's ``AsyncSaveResponse`` if the stager itself is asynchronous.

    Raises:
        SaveInProgressError: If the save before does not end within ``patience`` on some rank.
        ConfigError: If the arguments do not fit together, or the ranks were given different ones.
        CloudCheckpointError: If a rank can't begin for another reason; on all ranks.
        SaveProcessError: If the saving process can't be started.
    """

    def prepare() -> tuple[OurWriter, BackgroundOptions]:
        check_together(use_collectives)
        if storage_writer is None or config is not None or base is not None:
            writer = writer_for(checkpoint_id, storage_writer, config, base)
        else:  # a save under way may use it: it is led elsewhere when that has ended
            writer = our_writer(storage_writer)
        return writer, _options_of(writer)

    # the saver of these ranks is found by the options, which a rank that fails here may not know
    meeting = Meeting.of(process_group, no_dist)
    writer, options = meeting.begin(prepare, lambda made: alike(async_checkpointer_type, made[1]))
    saver = _saver_for(process_group, no_dist, async_checkpointer_type, options)
    pending = saver.save(
        state_dict,
        writer,
        checkpoint_id=checkpoint_id if writer is storage_writer else None,
        planner=planner,
        stager=async_stager,
    )
    if pending.is_staged_in_background:
        return AsyncSaveResponse(pending.staged, pending.written)  # type: ignore[arg-type]
    return pending.written


def _options_of(writer: OurWriter) -> BackgroundOptions:
    if isinstance(writer, CloudStorageWriter):
        return writer.config.background
    return BackgroundOptions()


def close_async_savers() -> None:
    """Waits for the saves of :func:`async_save`, and gives back its memory and processes.

    Another call does what is left to do if one was interrupted.
    """
    with _lock:
        own = [key for key in _savers if key[0] == os.getpid()]  # not a forking parent's
        _closing.extend(_savers.pop(key) for key in own)
        savers = list(_closing)
    for saver in savers:
        saver.close()
        with _lock:
            if saver in _closing:  # another thread may have closed it, too
                _closing.remove(saver)


def _saver_for(
    group: dist.ProcessGroup | None,
    no_dist: bool,
    kind: AsyncCheckpointerType,
    options: BackgroundOptions,
) -> AsyncSaver:
    alone = no_dist or not (dist.is_available() and dist.is_initialized())
    together = None if alone else group if group is not None else dist.group.WORLD
    # by the objects themselves, which are kept alive: an address might be another object's later
    key = (os.getpid(), together, kind, options)
    with _lock:
        if (known := _savers.get(key)) is not None:
            return known
    # not with the lock held: it waits for the other ranks
    made = AsyncSaver(
        process_group=group, no_dist=no_dist, kind=kind, options=options, have_met=True
    )
    with _lock:
        return _savers.setdefault(key, made)
