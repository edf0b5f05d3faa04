"""Detects ranks that have different values under one name, of which only one copy is saved.

Without this check, all but one of these values would be lost silently: the states of the ranks'
random generators, for example, or different experts that each rank counts from 0.

Items that several ranks have are compared by one 64-bit number from each rank. For each set of
ranks that share items, each rank of the set gets a random weight, and the weights of the set add up
to 0. A rank computes one digest of the items of each of its sets, multiplies it by its weight in
the set, and reports the sum of these products, modulo 2**64. If all copies are the same, the
numbers of all ranks add up to 0. Otherwise each rank reports a digest of each copy.

If the planner is custom, or torch's own save calls the writer, there are no such weights: each rank
then reports a digest of each of its items, together with what it has written.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.columns import column_of
from cloudckpt.checkpoint.likeness import digest_of_all
from cloudckpt.errors import KeyCollisionError
from cloudckpt.transfer.memory import PLAIN

__all__ = [
    "Copies",
    "Described",
    "Digests",
    "Shared",
    "are_alike",
    "first_few",
    "refuse_or_tell",
    "shared_of_ranks",
]

logger = logging.getLogger("cloudckpt")

_ALL = (1 << 64) - 1
_NAMED = 50  # entries that a message names
_RANKED = 5  # ranks that a message lists for each, and groups of them
_logged: set[str] = set()  # the keys that this process has logged already


Shared = list[tuple[int, list[int]]]
"""The items that a rank shares with others: for each set of ranks that share items, the rank's
random weight in the set, and the numbers of the shared items in the rank's own plan.
"""


def shared_of_ranks(
    groups: Iterable[Sequence[int]], ranks: Iterable[tuple[int, ...]], starts: Sequence[int]
) -> list[Shared]:
    """Returns, for each rank, the items that it shares with other ranks, with random weights.

    Args:
        groups: For each item that several ranks have, the numbers of its copies among the items of
            all ranks.
        ranks: For each entry of ``groups``, the ranks that have the copies, in the same order.
        starts: By rank, the number of its first item; the last entry is the number of all items.
    """
    by_set: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for group, of_group in zip(groups, ranks, strict=True):
        by_set.setdefault(of_group, []).append(group)
    by_rank: list[Shared] = [[] for _ in starts[1:]]
    for members, of_set in by_set.items():
        own = column_of(of_set) - column_of([starts[rank] for rank in members])
        columns = own.t().tolist()
        for rank, items, weight in zip(members, columns, _weights(len(members)), strict=True):
            by_rank[rank].append((weight, items))
    return by_rank


def are_alike(numbers: Iterable[int]) -> bool:
    """Whether all ranks have the same copies: their numbers add up to 0, modulo 2**64.

    Args:
        numbers: The result of :meth:`Copies.weighed` of each rank.
    """
    return not sum(numbers) & _ALL


def _weights(count: int) -> list[int]:
    others = [secrets.randbits(64) for _ in range(count - 1)]
    return [-sum(others) & _ALL, *others]


class Described(NamedTuple):
    """The digest of a rank's copy of an item.

    Attributes:
        name: The name of the item.
        offsets: The offsets of a tensor's chunk; None for other values.
        digest: The digest of the copy.
        kind: The name of the value's class; "tensor" for every tensor.
        mesh: The ranks of a DTensor's mesh; None for other values.
        is_kept: Whether the rank has written this copy, so that the checkpoint has it.
    """

    name: str
    offsets: tuple[int, ...] | None
    digest: int
    kind: str
    mesh: frozenset[int] | None = None
    is_kept: bool = False


class Copies(NamedTuple):
    """The items of this rank's plan that other ranks have as well, whose values a save compares.

    Attributes:
        sets: For each set of ranks that share items, this rank's random weight in it (see
            the module), and the items.
        samples: Whether only a sample of a large tensor is compared.
    """

    sets: Sequence[tuple[int, Sequence[WriteItem]]]
    samples: bool

    def weighed(self, planner: SavePlanner) -> int:
        """Returns this rank's weighted sum of digests; see :func:`are_alike`."""
        total = 0
        for weight, items in self.sets:
            values = (_value(item, planner) for item in items)
            total += weight * digest_of_all(values, samples=self.samples)
        return total & _ALL

    def described(self, planner: DefaultSavePlanner, plan: SavePlan) -> list[Described]:
        """Returns the digest of this rank's copy of each shared item.

        Args:
            planner: Provides the values.
            plan: The plan with the items that this rank writes.
        """
        items = [item for _, of_set in self.sets for item in of_set]
        return Digests(items, planner, planner.state_dict, self.samples).of_all(plan)


@dataclass(eq=False)
class Digests:
    """Makes a digest of each item that a rank has, also of those that another rank saves.

    Attributes:
        items: The items, as the planner has planned them for this rank.
        planner: The planner. It may be custom.
        values: The state dict, by flat names.
        samples: Whether only a sample of a large tensor is read.
    """

    items: Iterable[WriteItem]
    planner: SavePlanner
    values: Mapping[Any, Any]
    samples: bool

    def __post_init__(self) -> None:
        self._left = {item.index: item for item in self.items}
        self._made: list[Described] = []
        self._meshes: dict[int, frozenset[int]] = {}

    def add(self, item: WriteItem, data: Any) -> None:
        """Makes the digest of an item, unless it was made before.

        Args:
            item: The item; nothing is done for an item that is not in :attr:`items`.
            data: The data that the planner has returned for the item.
        """
        if self._left.pop(item.index, None) is not None:
            self._add(item, _value(item, self.planner, lambda: data))

    def of_all(self, plan: SavePlan) -> list[Described]:
        """Returns the digests of all items; asks the planner for data that was not added.

        Args:
            plan: The plan with the items that this rank writes.
        """
        for item in self._left.values():
            self._add(item, _value(item, self.planner))
        self._left = {}
        kept = {(item.index.fqn, item.index.offset) for item in plan.items}
        return [one._replace(is_kept=(one.name, one.offsets) in kept) for one in self._made]

    def _add(self, item: WriteItem, value: Any) -> None:
        name, offsets = item.index.fqn, item.index.offset
        given, mesh = self.values.get(name), None
        if isinstance(given, DTensor):
            ranks = given.device_mesh.mesh.flatten().tolist()
            mesh = self._meshes.setdefault(id(given.device_mesh), frozenset(ranks))
        offset_key = None if offsets is None else tuple(offsets)
        class_name = "tensor" if item.tensor_data is not None else type(value).__name__
        digest = digest_of_all([value], samples=self.samples)
        self._made.append(Described(name, offset_key, digest, class_name, mesh))


def _value(item: WriteItem, planner: SavePlanner, data: Callable[[], Any] | None = None) -> Any:
    """Returns this rank's copy of an item, or None if the planner fails to return it.

    The planner's error is not raised: it also occurs on the rank that saves the item.

    Args:
        item: The item.
        planner: The planner.
        data: Returns the data that the planner has already returned for the item; None to ask the
            planner.
    """
    with contextlib.suppress(Exception):
        if _saves_unchanged(planner):
            return _saved(item, planner)
        made = planner.resolve_data(item) if data is None else data()
        if not isinstance(made, io.BytesIO):
            return made
        with contextlib.suppress(Exception):  # pickles of equal values may differ
            return torch.load(io.BytesIO(made.getvalue()), weights_only=False)  # of this process
        return made.getvalue()
    return None


def _saved(item: WriteItem, planner: DefaultSavePlanner) -> Any:
    value, data = planner.state_dict[item.index.fqn], item.tensor_data
    if data is None:
        return value
    local = value._local_tensor if isinstance(value, DTensor) else value
    if type(local) in PLAIN and local.shape == data.chunk.sizes:
        return local
    return planner.lookup_object(item.index)


def _saves_unchanged(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether a planner saves the values of its state dict unchanged, as torch's does."""
    names = ("resolve_data", "lookup_object", "transform_object")
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(getattr(planner, name), "__func__", None) is getattr(DefaultSavePlanner, name)
        for name in names
    )


def refuse_or_tell(by_rank: Sequence[Sequence[Described]], uri: str, *, refuses: bool) -> None:
    """Raises an error, or logs a warning, if ranks have different values under one name.

    Args:
        by_rank: The digests of each rank's copies.
        uri: The checkpoint.
        refuses: Whether each difference is an error. If False, differences are logged, once for
            each name; only those between DTensors on meshes without a common rank are errors, as
            these tensors are parts of different models.

    Raises:
        KeyCollisionError: If ranks have different values under one name, and this is an error.
    """
    groups: dict[tuple[str, Any], dict[tuple[str, int], list[int]]] = {}
    meshes: dict[str, set[frozenset[int]]] = {}
    copies = [(rank, copy) for rank, of_rank in enumerate(by_rank) for copy in of_rank]
    for rank, copy in sorted(copies, key=lambda entry: not entry[1].is_kept):
        of_place = groups.setdefault((copy.name, copy.offsets), {})
        of_place.setdefault((copy.kind, copy.digest), []).append(rank)
        if copy.mesh is not None:
            meshes.setdefault(copy.name, set()).add(copy.mesh)
    unlike: dict[str, str] = {}
    for (name, _), by_digest in groups.items():
        if len(by_digest) > 1:
            parted = (f"{_shown(ranks)} ({kind})" for (kind, _), ranks in by_digest.items())
            unlike.setdefault(name, f"{name}: {first_few(parted, ', ')}")
    apart = [name for name in unlike if _lie_apart(meshes.get(name, ()))]
    refuses = refuses or bool(apart)
    news = apart or [name for name in unlike if refuses or name not in _logged]
    if not news:
        return
    first = news[0]
    text = (
        f"{len(news)} {'entry differs' if len(news) == 1 else 'entries differ'} between ranks, "
        "but a checkpoint keeps one copy of each, that of the rank named first. Ranks with the "
        f"same copy: {first_few((unlike[name] for name in news), '; ', _NAMED)}. If each rank has "
        "its own value, wrap it in cloudckpt.per_rank(value), or put the rank, the stage or the "
        f"expert into its name, for example {{f'{first}.{{rank}}': ...}}; if all ranks share it, "
        "make it equal before the save, for example by a broadcast. Config(replicas='trust') turns "
        "this comparison off"
    )
    if refuses:
        raise KeyCollisionError(text, uri=uri, item=first)
    _logged.update(news)
    logger.warning("%s: %s", uri, text)


def _lie_apart(meshes: Iterable[frozenset[int]]) -> bool:
    """Whether there are two meshes that have no rank in common."""
    return any(one.isdisjoint(other) for one, other in itertools.combinations(meshes, 2))


def _shown(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first_few(map(str, ranks), ' ')}"


def first_few(texts: Iterable[str], separator: str, most: int = _RANKED) -> str:
    """Returns the first ``most`` texts joined by ``separator``, and the number of further texts."""
    shown = list(texts)
    if len(shown) > most:
        shown[most:] = [f"and {len(shown) - most} more"]
    return separator.join(shown)
