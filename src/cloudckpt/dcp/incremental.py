"""What of a save need not be sent, as an earlier checkpoint of the run has it.

The coordinator holds the base (:mod:`cloudckpt.checkpoint.references`) and says which save has made
it. A rank that has taken part in that save remembers where its own items lie, and needs no more;
else all ranks get a table of what the base holds. Only this, the digests and what is sent differ
from any other save.
"""

from __future__ import annotations

import functools
from array import array

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.base import Base, Digest, Digester
from cloudckpt.checkpoint.objects import METADATA, WrittenObject, natural_order
from cloudckpt.checkpoint.shard import Place
from cloudckpt.checkpoint.written import Extents
from cloudckpt.config import Config
from cloudckpt.errors import ObjectNotFoundError
from cloudckpt.fork import ModuleLock
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.memory import bytes_of, is_plain
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.uri import CheckpointURI

__all__ = ["Contents", "digest_of", "newest_beside", "remember", "remembered"]

_MOST = 4  # runs and groups of which this process remembers its last save


class Contents:
    """The digests of what one rank saves, and what of it an earlier checkpoint has.

    Args:
        count: How many items there are.
        base: What the earlier checkpoint has; None if there is none.
    """

    def __init__(self, count: int, base: Base | None) -> None:
        self._base = base
        self._high, self._low = array("q", bytes(8 * count)), array("q", bytes(8 * count))
        self._numbers: dict[int, int] = {}  # of objects of the base: their numbers here

    def known(self, item: int, digest: Digest) -> Place | None:
        """Notes the digest of an item; where it is already, if it is.

        The number of the object is -1 for the first of :attr:`references`, and so on.
        """
        self._high[item], self._low[item] = digest
        found = None if self._base is None else self._base.find(digest)
        if found is None:
            return None
        number = self._numbers.setdefault(found.object, len(self._numbers))
        return found._replace(object=-1 - number)

    @property
    def references(self) -> tuple[WrittenObject, ...]:
        """The objects of other checkpoints that have items of this one."""
        return tuple(self._base.objects[number] for number in self._numbers) if self._base else ()

    def extents(self, places: Extents, own: int) -> Extents:
        """Where all items lie, with their digests.

        Args:
            places: As :meth:`known` and the layout have said.
            own: How many objects this rank itself writes: they come first.
        """
        objects = torch.where(places.objects < 0, own - 1 - places.objects, places.objects)
        halves = (torch.frombuffer(half, dtype=torch.int64) for half in (self._high, self._low))
        return Extents(objects, places.offsets, places.lengths, *halves)


def digest_of(tensor: torch.Tensor, pool: StagingPool) -> Digest:
    """That of a strided tensor of any device, which nobody may write to meanwhile.

    Args:
        tensor: The tensor.
        pool: Memory for what does not lie in row-major order in host memory.
    """
    digester = Digester.of_tensor(tensor.dtype, tensor.shape)
    if not tensor.numel():
        return digester.result()
    if is_plain(tensor):
        return digester.add(bytes_of(tensor)).result()
    for piece in pool.pieces(tensor):
        if piece.ready is not None:
            piece.ready()
        digester.add(piece.view)
        if piece.lease is not None:
            piece.lease.release()
    return digester.result()


_bases: dict[tuple[dist.ProcessGroup | None, CheckpointURI], tuple[CheckpointURI, Base]] = {}
_lock = ModuleLock()


def remember(group: dist.ProcessGroup | None, uri: CheckpointURI, base: Base) -> None:
    """Keeps where this rank's items of a committed checkpoint are, for the next save beside it."""
    with _lock:
        key = group, uri.parent
        _bases.pop(key, None)
        _bases[key] = uri, base
        while len(_bases) > _MOST:
            del _bases[next(iter(_bases))]


def remembered(
    group: dist.ProcessGroup | None, uri: CheckpointURI
) -> tuple[CheckpointURI, Base] | None:
    """The last checkpoint beside ``uri`` that these ranks have saved incrementally."""
    with _lock:
        return _bases.get((group, uri.parent))


def newest_beside(store: ObjectStore, uri: CheckpointURI, config: Config) -> CheckpointURI | None:
    """The newest committed checkpoint in the same folder, by the numbers in the names.

    Raises:
        StoreError: If the store refuses or stays unreachable.
    """
    retrier = Retrier(config.retry)
    parent = uri.parent.key("")
    listed = retrier.call(lambda: list(store.list_level(parent)))
    for name in sorted(
        (one for one in listed if isinstance(one, str)), key=natural_order, reverse=True
    ):
        beside = uri.beside(name)
        try:
            retrier.call(functools.partial(store.head, beside.key(METADATA)))
        except ObjectNotFoundError:
            continue
        return beside
    return None
