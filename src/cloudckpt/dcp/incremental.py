"""Incremental saves: do not send bytes that an earlier checkpoint of the run has.

The coordinator holds the base (:mod:`cloudckpt.checkpoint.references`) and says which save made it.
A rank that took part in that save remembers the locations of its own items and needs nothing else;
otherwise all ranks get a table of all items of the base. Only this, the digests and the amount of
data sent differ from other saves.
"""

from __future__ import annotations

import functools
import logging
import re
from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.base import Base, Digest, Digester, digest_of_bytes, kind_of
from cloudckpt.checkpoint.notes import Notes, read_notes
from cloudckpt.checkpoint.object_plan import Place
from cloudckpt.checkpoint.objects import METADATA, WrittenObject, natural_order
from cloudckpt.checkpoint.record import Extents, Record
from cloudckpt.checkpoint.references import Hold
from cloudckpt.checkpoint.torch_private import Collectives
from cloudckpt.checksum import BlockChecksums, ChecksumAlgorithm, block_size_for
from cloudckpt.config import Config
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.plan_cache import GroupRef, ref_to
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ObjectNotFoundError,
)
from cloudckpt.fork import module_lock
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.memory import bytes_of, is_plain
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.uri import CheckpointURI

__all__ = ["Contents", "agree_on_base", "digest_of", "newest_beside", "remember"]

logger = logging.getLogger("cloudckpt")

_MOST = 4  # runs and groups whose last save this process remembers


class Contents:
    """Collects the digests of a rank's items, and looks them up in an earlier checkpoint.

    Args:
        count: How many items the rank has.
        base: The items of the earlier checkpoint; None without one.
    """

    def __init__(self, count: int, base: Base | None) -> None:
        self._base = base
        self._high, self._low = array("q", bytes(8 * count)), array("q", bytes(8 * count))
        # maps the number of an object in the base to its number among the references
        self._numbers: dict[int, int] = {}

    def known(self, item: int, digest: Digest) -> Place | None:
        """Records an item's digest; returns the item's location in the base, or None.

        The object's number is -1 for the first of :attr:`references`, -2 for the next, and so on.
        """
        self._high[item], self._low[item] = digest
        found = None if self._base is None else self._base.find(digest)
        if found is None:
            return None
        number = self._numbers.setdefault(found.object, len(self._numbers))
        return found._replace(object=-1 - number)

    @property
    def references(self) -> tuple[WrittenObject, ...]:
        """The objects of other checkpoints that hold items of this one."""
        return tuple(self._base.objects[number] for number in self._numbers) if self._base else ()

    def extents(self, places: Extents, own: int) -> Extents:
        """Returns the locations of all items, with their digests.

        Args:
            places: The locations that :meth:`known` and the layout have returned.
            own: How many objects this rank itself writes; they are numbered first.
        """
        objects = torch.where(places.objects < 0, own - 1 - places.objects, places.objects)
        halves = (torch.frombuffer(half, dtype=torch.int64) for half in (self._high, self._low))
        return Extents(objects, places.offsets, places.lengths, *halves)


def digest_of(
    tensor: torch.Tensor, pool: StagingPool, algorithm: ChecksumAlgorithm | None = None
) -> tuple[Digest, tuple[int, ...]]:
    """Computes the digest and checksums of a strided tensor on any device in one pass.

    Args:
        tensor: The tensor.
        pool: Staging memory for tensors that are not row-major in host memory.
        algorithm: Algorithm of the checksums to compute along with the digest; None for no
            checksums.

    Returns:
        The digest, and the checksums of the blocks. The tensor may be written to before it is sent;
        bytes that match these checksums are the bytes of the digest.
    """
    kind, nbytes = kind_of(tensor.dtype, tensor.shape), tensor.nbytes
    block = block_size_for(nbytes)
    if 0 < nbytes <= block and is_plain(tensor):  # there may be many such tensors
        view = bytes_of(tensor)
        return digest_of_bytes(kind, view), () if algorithm is None else (algorithm.of(view),)
    digester = Digester(kind)
    checksums = None if algorithm is None else BlockChecksums(algorithm, block)
    for piece in _pieces_of(tensor, pool):
        if piece.ready is not None:
            piece.ready()
        if checksums is None:
            digester.add(piece.view)
        else:
            for first in range(0, piece.view.nbytes, block):  # the second read comes from the cache
                view = piece.view[first : first + block]
                digester.add(view)
                checksums.add(piece.start + first, view)
        if piece.lease is not None:
            piece.lease.release()
    return digester.result(), () if checksums is None else checksums.finish(nbytes)


def _pieces_of(tensor: torch.Tensor, pool: StagingPool) -> Iterable[Piece]:
    if not tensor.numel():
        return ()
    return (Piece(bytes_of(tensor)),) if is_plain(tensor) else pool.pieces(tensor)


class Writer(Protocol):
    """A writer whose save needs a base, such as
    :class:`~cloudckpt.dcp.writer.CloudStorageWriter`.
    """

    uri: CheckpointURI

    def hold_base(self, last: CheckpointURI | None) -> Hold | None: ...


def agree_on_base(
    ranks: Collectives,
    members: dist.ProcessGroup | None,
    writer: Writer,
    *,
    is_planned: bool,
) -> Base | None:
    """Agrees on the base of a save; returns its items that this rank needs, or None without a base.

    A rank that took part in the save that made the base remembers them itself. If some rank did
    not, or the plan is new, so that items may have moved between ranks, every rank gets the items
    of all ranks.

    Args:
        ranks: The saving ranks; all of them call this.
        members: Their process group.
        writer: This rank's writer.
        is_planned: Whether the plan is new.
    """
    known = _remembered(members, writer.uri)

    @portable_errors(str(writer.uri))
    def own() -> tuple[str, str]:
        if known is None or is_planned:
            return "", ""
        uri, base = known
        return uri.folder, base.attempt

    @portable_errors(str(writer.uri))
    def held(told: list[tuple[str, str]]) -> tuple[bool, Base | None]:
        hold = writer.hold_base(None if known is None else known[0])
        if hold is None:
            return False, None
        # a copy made by another tool has the random name of the same save, but another folder
        all_know = all(one == (hold.base.folder, hold.attempt) for one in told)
        return True, None if all_know else hold.contents

    is_held, base = ranks.all_reduce("base", own, held)
    if base is None and is_held:
        assert known is not None
        return known[1]
    return base


_Steps = tuple[GroupRef, CheckpointURI, tuple[str, ...]]
"""A group, and the steps in a folder, by the text around the numbers in their names."""

_bases: dict[_Steps, tuple[CheckpointURI, Base]] = {}
_lock = module_lock()


def remember(
    members: dist.ProcessGroup | None, uri: CheckpointURI, attempt: str, written: Record
) -> None:
    """Keeps the locations of this rank's items in a checkpoint, for the next save beside it.

    Args:
        members: The group that saved it.
        uri: The checkpoint.
        attempt: The random name of the save.
        written: The record of what this rank has written; nothing is kept if it has no digests.
    """
    if not written.extents.has_digests:
        return
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
    """Returns the last step beside ``uri`` that these ranks have saved incrementally."""
    with _lock:
        return _bases.get(_steps(members, uri))


def _steps(members: dist.ProcessGroup | None, uri: CheckpointURI) -> _Steps:
    return ref_to(members), uri.parent, _around_numbers(uri.folder)


def newest_beside(
    store: ObjectStore, uri: CheckpointURI, config: Config, notes: Notes | None = None
) -> CheckpointURI | None:
    """Returns the newest committed step in the same folder, by the numbers in the names.

    A step's name differs from this checkpoint's in the numbers only, or, if that has no number, has
    any. A folder such as ``best`` would stay a base for long, and keep what it shares. A checkpoint
    that is to be replaced may be its own base. If the notes of the save name its job, only steps of
    that job count, and steps that it continues: those of abandoned trainings may be deleted soon.

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
            logger.warning(
                "%s: %s can't be the base of this incremental save, so everything is uploaded: %s",
                uri,
                beside,
                error,
            )
            continue
        return beside
    return None


def _around_numbers(name: str) -> tuple[str, ...]:
    """Returns the text before, between and after the numbers in a name."""
    return tuple(re.split("[0-9]+", name))
