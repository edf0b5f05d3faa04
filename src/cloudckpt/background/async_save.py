"""``async_save``: torch's function on URIs, which reuses its stager and saving process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageWriter

from cloudckpt._arguments import suggesting
from cloudckpt.api import our_writer, writer_for
from cloudckpt.background.groups import exists
from cloudckpt.background.save import SaveFuture
from cloudckpt.background.saver import AsyncSaver, status_of
from cloudckpt.config import BackgroundOptions, Config
from cloudckpt.dcp.meeting import Meeting, check_together, collective
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter
from cloudckpt.fork import module_lock
from cloudckpt.uri import URILike

__all__ = ["async_save", "close_async_savers"]

_lock = module_lock()
# the group itself keeps it alive, since ids may be reused
_Key = tuple[int, dist.ProcessGroup | None, AsyncCheckpointerType, BackgroundOptions]
"""The key of a saver: the ID of the process that made the saver, the group that saves (None: the
process alone), the kind of checkpointer, and the options.
"""
_savers: dict[_Key, AsyncSaver] = {}
_closing: list[AsyncSaver] = []


@collective("cloudckpt.async_save")
@suggesting
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
    """Copies the state dict and saves the copy in the background, like torch's ``async_save``.

    All ranks must make each call. The memory of the copy, and the saving process if one is used,
    are kept for the next call with the same group, type of checkpointer and options. They are
    released by :func:`close_async_savers` and at the end of the interpreter, which waits for saves
    in progress; by a call with another type or options for the same group; and, if the group was
    destroyed, by the first call with another group. While a save uses them, they stay until a call
    after its end.

    The future reports background failures, on every rank. A staged copy that is still being read is
    never overwritten by the next save: see :class:`~cloudckpt.config.BackgroundOptions` for what
    the next save does instead.

    Args:
        state_dict: The state dict; the ``state_dict()`` of each ``Stateful`` value is saved.
        checkpoint_id: ``s3://bucket/path`` or another location; required without a writer.
        storage_writer: A writer of this package; it saves to ``checkpoint_id`` if that is given,
            too. None to make one with ``config`` and ``base``.
        planner: As in torch.
        process_group: The ranks that save together; any backend works.
        async_checkpointer_type: Whether a thread or a separate process sends.
        async_stager: A custom stager; None for cloudckpt's own.
        no_dist: As in torch.
        use_collectives: Must be on: all ranks commit together.
        config: Options; by default those of the environment. Not together with a writer.
        base: As in :func:`cloudckpt.save`.

    Returns:
        A future of the metadata, with the guarantees and errors of :func:`cloudckpt.save`; its
        result is None if the save was skipped, as ``BackgroundOptions(when_busy=...)`` allows. Or
        torch's ``AsyncSaveResponse`` if the stager itself is asynchronous.

    Raises:
        SaveInProgressError: If the previous save does not end within ``patience`` seconds on some
            rank.
        ConfigError: If the arguments do not fit together, or differ between ranks.
        CloudCheckpointError: If a rank can't begin for another reason; on all ranks.
        SaveProcessError: If the saving process can't be started.
        AsyncSaveError: If no thread can be started, as the interpreter is ending or a limit of the
            process is reached.
    """

    def prepare() -> tuple[OurWriter, BackgroundOptions]:
        check_together(use_collectives)
        if storage_writer is None or config is not None or base is not None:
            writer = writer_for(checkpoint_id, storage_writer, config, base)
        else:  # a save in progress may use it: it is redirected once that has ended
            writer = our_writer(storage_writer)
        if isinstance(writer, CloudStorageWriter):
            return writer, writer.config.background
        return writer, BackgroundOptions()

    # the options select the saver of these ranks, and a rank that fails here may not know them
    meeting = Meeting.of(process_group, no_dist)
    writer, options = meeting.begin(
        prepare, lambda made: status_of(async_checkpointer_type, made[1])
    )
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


def close_async_savers() -> None:
    """Waits for the saves of :func:`async_save`, and releases its memory and processes.

    It waits up to ``BackgroundOptions(patience=...)`` for each save. After that time, a save in a
    saving process fails, as the process is ended; a save in a thread goes on. If a call is
    interrupted, another call finishes the work.
    """
    _retire(lambda group: True)
    with _lock:
        savers = list(_closing)
    _close(savers)


def _retire(is_meant: Callable[[dist.ProcessGroup | None], bool]) -> None:
    """Moves this process's savers for which ``is_meant(group)`` is true to ``_closing``.

    Later calls then no longer use these savers.
    """
    with _lock:
        own = [key for key in _savers if key[0] == os.getpid()]  # not a forking parent's
        _closing.extend(_savers.pop(key) for key in own if is_meant(key[1]))


def _close(savers: list[AsyncSaver]) -> None:
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
    key = os.getpid(), together, kind, options
    with _lock:
        saver = _savers.get(key)
    if saver is None:  # on all ranks, even if the former saver is still busy
        _retire(lambda of: of is together or (of is not None and not exists(of)))
    with _lock:
        unused = [former for former in _closing if former.is_idle]
    _close(unused)
    if saver is None:
        # not with the lock held: it waits for the other ranks
        made = AsyncSaver(
            process_group=group, no_dist=no_dist, kind=kind, options=options, have_met=True
        )
        with _lock:
            saver = _savers.setdefault(key, made)
    return saver
