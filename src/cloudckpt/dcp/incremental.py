"""Incremental saves: do not send bytes that an earlier checkpoint of the run has.

The coordinator protects the earlier checkpoint, the *base*, from deletion
(:mod:`cloudckpt.checkpoint.references`), and each rank reports to it which checkpoint the rank has
saved last. If that is the base on all ranks, and the plan of this save is not new, each rank still
has the locations of its own items in the base. Otherwise the coordinator sends the locations of all
items of the base to all ranks. An incremental save differs from others only in this, in the digests
that it stores, and in the amount of data that it sends.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import replace

import torch.distributed as dist

from cloudckpt.checkpoint.base import Base
from cloudckpt.checkpoint.notes import Notes, read_notes
from cloudckpt.checkpoint.objects import METADATA, natural_order
from cloudckpt.checkpoint.references import Hold, check_beside
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.dcp.save_plan import GroupRef, ref_to
from cloudckpt.dcp.saving import Contents
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ObjectNotFoundError,
)
from cloudckpt.fork import module_lock
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.uri import CheckpointURI

__all__ = ["agree_on_base", "newest_beside", "remember"]

logger = logging.getLogger("cloudckpt")

_MOST = 4  # runs and groups whose last save this process remembers


def agree_on_base(meeting: Meeting, writer: CloudStorageWriter, *, is_planned: bool) -> None:
    """Agrees on the base of an incremental save: the checkpoint whose bytes are not sent again.

    Sets ``writer.contents`` on every rank, and ``writer.hold`` on the coordinator.

    A rank that took part in the save of the base remembers where its items are. If some rank did
    not, or the plan is new, so that items may have moved between ranks, every rank gets the
    locations of all items.

    Args:
        meeting: The meeting of the saving ranks; all of them call this.
        writer: This rank's writer.
        is_planned: Whether this save has made a new plan.

    Raises:
        BaseException: On all ranks, see :meth:`Meeting.combined_by_first`; for example a
            ConfigError if the given base is not in the same folder as the checkpoint.
    """
    known = _remembered(meeting.group, writer.uri)

    def own() -> tuple[str, str]:
        if known is None or is_planned:
            return "", ""
        uri, base = known
        return uri.folder, base.attempt

    def held(last_saves: list[tuple[str, str]]) -> tuple[bool, Base | None]:
        hold = writer.hold = _hold(writer, None if known is None else known[0])
        if hold is None:
            return False, None
        # a copy made by another tool has the random name of the same save, but another folder
        all_know = all(last_save == (hold.base.folder, hold.attempt) for last_save in last_saves)
        return True, None if all_know else hold.contents

    is_held, base = meeting.combined_by_first("base", own, held, writer.checkpoint_id)
    if base is None and is_held:
        assert known is not None
        base = known[1]
    writer.contents = functools.partial(Contents, base=base)


def _hold(writer: CloudStorageWriter, last: CheckpointURI | None) -> Hold | None:
    """Chooses the base of a save, and protects it from deletion until the commit.

    Called on the rank that commits. If the user gave the writer a base, no other step is tried.
    Otherwise the base is ``last`` or, if that can't be protected, the newest earlier step in the
    same folder.

    Args:
        writer: The writer.
        last: The last step that this process has saved in the same folder; None if none is known.

    Returns:
        The hold, which protects the base; None if no step exists that can be protected: the save
        then sends everything.

    Raises:
        ConfigError: If the given base is not in the same folder as the checkpoint.
    """
    if writer.base is not None:
        check_beside(writer.uri, writer.base)
        return _held(writer, writer.base)
    return (_held(writer, last) if last else None) or _held(writer, None)


def _held(writer: CloudStorageWriter, base: CheckpointURI | None) -> Hold | None:
    """Returns a hold on a base, which protects it from deletion.

    Args:
        writer: The writer.
        base: The base; None for the :func:`newest_beside` step.

    Returns:
        The hold. None, after a warning, if the base can't be held; None without a warning if there
        is no earlier step, or the location has no folder.
    """
    uri, config = writer.uri, writer.config
    why: object = "it was not saved with Config(incremental=True), or is being replaced or deleted"
    try:
        store = open_store(uri, config)
        base = base or newest_beside(store, uri, config, writer.notes)
        if base is None or not uri.folder:
            return None
        if (hold := Hold.of(store, uri, base, config, writer.attempt)) is not None:
            return hold
    except CloudCheckpointError as error:
        why = error
    _tell_no_base(uri, base, why)
    return None


def _tell_no_base(uri: CheckpointURI, base: CheckpointURI | None, why: object) -> None:
    logger.warning(
        "%s: %s can't be the base of this incremental save, which uploads everything unless "
        "another base is found: %s",
        uri, base or "an earlier checkpoint", why,
    )  # fmt: skip


_Steps = tuple[GroupRef, CheckpointURI, tuple[str, ...]]
"""Identifies a sequence of steps: the group that saves them, their parent folder, and their names
without the numbers.
"""

_bases: dict[_Steps, tuple[CheckpointURI, Base]] = {}
_lock = module_lock()


def remember(members: dist.ProcessGroup | None, writer: CloudStorageWriter, attempt: str) -> None:
    """Keeps the locations of this rank's items in memory, for the next save in the same folder.

    Args:
        members: The group that saved the checkpoint; None if this process saved it alone.
        writer: This rank's writer, after it has written its items, with their digests.
        attempt: The random name of the save.
    """
    written, uri = writer.written, writer.uri
    assert written is not None
    base = Base(replace(written, attempt=attempt), uri.folder)
    with _lock:
        key = _steps(members, uri)
        _bases.pop(key, None)
        _bases[key] = uri, base
        while len(_bases) > _MOST:
            del _bases[next(iter(_bases))]


def _remembered(
    members: dist.ProcessGroup | None, uri: CheckpointURI
) -> tuple[CheckpointURI, Base] | None:
    """Returns the last step that these ranks saved in the folder of ``uri``, and its items.

    These are the items that this rank wrote. Returns None if this process remembers no such step.
    """
    with _lock:
        return _bases.get(_steps(members, uri))


def _steps(members: dist.ProcessGroup | None, uri: CheckpointURI) -> _Steps:
    return ref_to(members), uri.parent, _around_numbers(uri.folder)


def newest_beside(
    store: ObjectStore, uri: CheckpointURI, config: Config, notes: Notes | None = None
) -> CheckpointURI | None:
    """Returns the newest committed step in the parent folder of ``uri``, by the steps' numbers.

    An incremental save uses this step as its base. Returns None if there is no such step. A step
    whose notes are damaged is left out, with a warning.

    A folder counts as a step if its name differs from the folder name of ``uri`` in the numbers
    only; if ``uri`` has no number there, any folder with a number in its name counts. A folder such
    as ``best`` does not count: it stays for long, and the data that later steps share with it would
    stay as well. The base may be the checkpoint that the save replaces. If the notes of the save
    name its job, only steps of the training that this job continues count: steps of abandoned
    trainings may be deleted soon.

    Raises:
        StoreError: If the store refuses or stays unreachable.
    """
    retrier = Retrier(config.retry)
    parent = uri.parent.key("")
    listed = list(store.list_level(parent, retrier.call))
    own = _around_numbers(uri.folder)
    steps = [
        name
        for name in listed
        if isinstance(name, str)
        and (_around_numbers(name) == own or (len(own) == 1 < len(_around_numbers(name))))
    ]
    for name in sorted(steps, key=natural_order, reverse=True):
        beside = uri.beside(name)
        try:
            if notes is None or not notes.job:
                retrier.call(functools.partial(store.head, beside.key(METADATA)))
            elif not notes.is_same_training(read_notes(store, beside, retrier)):
                continue
        except (ObjectNotFoundError, CheckpointNotFoundError):
            continue
        except CheckpointCorruptError as error:
            _tell_no_base(uri, beside, error)
            continue
        return beside
    return None


def _around_numbers(name: str) -> tuple[str, ...]:
    """Returns the text before, between and after the numbers in a name."""
    return tuple(re.split("[0-9]+", name))
