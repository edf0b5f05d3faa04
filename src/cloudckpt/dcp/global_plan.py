"""What all ranks of a save write, planned together: torch's global plan, by columns.

torch's planner makes five Python objects for each chunk of each rank, gathers them on one rank, and
visits each several times: half a million chunks take fifteen seconds there. Here ranks send what
they would write as columns (``checkpoint/record.py``), and the coordinator finds duplicates, orders
and checks by sorting numbers. The result is what torch's planner makes of the same plans, down to
the order of the names; tests compare them. Anything unusual is left to torch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    WriteItem,
)

from cloudckpt.checkpoint.columns import (
    column_of,
    counted,
    pack_columns,
    repeated,
    unfilled,
    unpack_columns,
)
from cloudckpt.checkpoint.from_torch import NotInColumnsError, table_of_plan
from cloudckpt.checkpoint.manifest import Planned
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.structure import Structure, shown
from cloudckpt.checkpoint.table import Chunks, Paths, Table, entries_of
from cloudckpt.checkpoint.torch_private import validate_global_plan
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.dcp.copies import Shared, shared_of_ranks
from cloudckpt.errors import KeyCollisionError

__all__ = ["Part", "plan_together", "record_of"]

_END = 1 << 63
_INVALID = "Failed to validate global plan"  # as torch's planner begins its message


@dataclass(frozen=True)
class Part:
    """Which of its items a rank writes: their numbers, and torch's hint for each."""

    items: torch.Tensor
    hints: torch.Tensor

    def of(self, plan: SavePlan) -> SavePlan:
        """The rank's plan without the items that others write."""
        items: list[WriteItem] = []
        for number, hint in zip(self.items.tolist(), self.hints.tolist(), strict=True):
            item = plan.items[number]
            if item.tensor_data is not None:
                item = replace(item, index=replace(item.index, index=hint))
            items.append(item)
        return replace(plan, items=items)

    def __reduce__(self) -> tuple[Any, ...]:
        return _part, (self.items.numel(), pack_columns((self.items, self.hints)))


def _part(count: int, packed: bytes) -> Part:
    items, hints = unfilled(2, count)
    unpack_columns(packed, (items, hints))
    return Part(items, hints)


def plan_together(
    records: Sequence[Record], *, to_lowest_rank: bool, uri: str
) -> tuple[Planned, list[Part], list[Shared]]:
    """What torch's planner makes of the plans of all ranks.

    Args:
        records: By rank, what it would write.
        to_lowest_rank: Whether the lowest rank writes what several have, not the rank with the
            least to write.
        uri: The checkpoint, for messages.

    Returns:
        What is to be written, by rank its part of it, and by rank what others have, too.

    Raises:
        KeyCollisionError: If ranks have different things under one name.
        ValueError: If the chunks of a tensor overlap or don't fill it, as torch's planner says it.
    """
    items = _Items(records, uri)
    kept = items.kept(to_lowest_rank)
    table, rows, hints = items.ordered(kept)
    _validate(table, len(records))
    parts, of_ranks = [], []
    bounds = torch.searchsorted(kept, column_of(items.starts))
    for start, first, stop in zip(items.starts, bounds[:-1], bounds[1:], strict=False):
        parts.append(Part(kept[first:stop] - start, hints[first:stop]))
        of_ranks.append(rows[first:stop])
    structure = Structure.merged([record.structure for record in records], uri)
    shared = shared_of_ranks(items.groups, items.ranks_of_groups, items.starts)
    return Planned(table, tuple(of_ranks), records[0].checksum, structure), parts, shared


class _Name(NamedTuple):
    """What all ranks say about a name, in agreement.

    Attributes:
        shape: Of the tensor; None if it is a value.
        dtype: Its element type.
        is_whole: Whether no two ranks may write parts of it.
        weight: What torch counts for it when it divides work: the bytes of the whole tensor.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    is_whole: bool
    weight: int

    def __str__(self) -> str:
        if self.shape is None:
            return "a value that is no tensor"
        return f"a tensor of {self.dtype} and shape {self.shape}"


_VALUE = _Name(None, None, False, 1)


def record_of(plan: SavePlan, structure: Structure, checksum: ChecksumAlgorithm) -> bytes:
    """What a rank is to write, as the bytes of a record without locations.

    Args:
        plan: A plan of torch's planner, or of one like it.
        structure: What flattening has lost of this rank's state dict.
        checksum: The algorithm of the store.

    Raises:
        NotInColumnsError: If columns can't express it.
    """
    table, whole = table_of_plan(plan)
    planned = Record(table=table, whole=whole, structure=structure, checksum=checksum)
    try:
        return planned.to_bytes()
    except (KeyError, ValueError) as exc:
        raise NotInColumnsError(str(exc)) from exc


class _Items:
    """The items of all ranks, one after the other, in the order in which torch looks at them.

    Attributes:
        starts: By rank, the number of its first item; and the number of all at the end.
        groups: Items that are the same part of the same name; known once :meth:`kept` was called.
        ranks_of_groups: The ranks that have them.
    """

    def __init__(self, records: Sequence[Record], uri: str) -> None:
        self.starts = [0]
        self._uri = uri
        self.groups: list[list[int]] = []
        self.ranks_of_groups: list[tuple[int, ...]] = []
        self._names: list[tuple[str, _Name]] = []
        self._properties_of: list[tuple[Any, ...] | None] = []  # by name, what tells them apart
        self._first_ranks: list[int] = []  # by name
        self._numbers: dict[str, int] = {}
        self._properties: dict[tuple[Any, ...], TensorProperties] = {}
        self._paths: list[tuple[int, Paths]] = []
        of_items: list[torch.Tensor] = []
        chunks: dict[int, list[tuple[torch.Tensor, Chunks]]] = {}
        known: dict[int, torch.Tensor] = {}  # ranks of most jobs have the same names
        for rank, record in enumerate(records):
            table = record.table
            assert table is not None
            names = known.get(id(table.entries))
            if names is None:
                names = self._named(table, record.whole, rank)
                known[id(table.entries)] = names
            self._paths.append((rank, table.paths or {}))
            of_items.append(names)
            for dims, of_dims in table.chunks.items():
                chunks.setdefault(dims, []).append((of_dims.rows + self.starts[-1], of_dims))
            self.starts.append(self.starts[-1] + names.numel())
        self._of_items = torch.cat(of_items)
        self._chunks = {
            dims: Chunks(
                torch.cat([rows for rows, _ in parts]),
                torch.cat([part.offsets for _, part in parts]),
                torch.cat([part.sizes for _, part in parts]),
            )
            for dims, parts in sorted(chunks.items())
        }

    def _named(self, table: Table, whole: Sequence[int], rank: int) -> torch.Tensor:
        """The number of the name of each item of a rank."""
        kinds: list[tuple[Any, ...]] = [
            one.__getstate__()  # type: ignore[no-untyped-call]
            for one in table.properties
        ]
        for key, one in zip(kinds, table.properties, strict=True):
            self._properties.setdefault(key, one)
        made: dict[Any, tuple[_Name, Any]] = {(None, 0, False): (_VALUE, None)}  # few are different
        names, known, alone, numbers = self._names, self._numbers, set(whole), list[int]()
        for place, (name, entry) in enumerate(table.entries.items()):
            like = entry.shape, entry.properties, place in alone
            if (found := made.get(like)) is None:
                dtype = table.properties[entry.properties].dtype
                nbytes = math.prod(entry.shape or ()) * dtype.itemsize
                one_like_it = _Name(entry.shape, dtype, place in alone, nbytes or 1)
                found = made[like] = one_like_it, kinds[entry.properties]
            said, key = found
            number = known.setdefault(name, len(known))
            if number == len(names):
                names.append((name, said))
                self._properties_of.append(key)
                self._first_ranks.append(rank)
            elif names[number][1][:2] == said[:2]:
                if said.is_whole:  # here; on the other rank it may be a part that is all of it
                    names[number] = (name, said)
            else:
                raise KeyCollisionError(
                    f"{name} is {names[number][1]} on rank {self._first_ranks[number]} and {said} "
                    f"on rank {rank}, of which only one would be saved. What belongs to a rank "
                    "needs a name of its own: wrap it in cloudckpt.per_rank(...); the parts of one "
                    "tensor are a DTensor",
                    uri=self._uri,
                    item=name,
                )
            numbers.append(number)
        counts = column_of([entry.count for entry in table.entries.values()])
        return repeated(column_of(numbers), counts)

    def kept(self, to_lowest_rank: bool) -> torch.Tensor:
        """The items that are written: of those that several ranks have, one each.

        torch gives them, in the order in which it meets them, to the rank that has the least to
        write so far: of what it has alone, as far as torch has come by then, and what it was given.
        """
        keeps = torch.ones(self.starts[-1], dtype=torch.bool, device="cpu")
        groups = sorted(self._duplicates())
        of_groups = [tuple(bisect_right(self.starts, i) - 1 for i in group) for group in groups]
        self.groups, self.ranks_of_groups = groups, of_groups
        for group, ranks in zip(groups, of_groups, strict=True):
            if len(set(ranks)) != len(ranks):
                raise self._invalid(int(self._of_items[group[0]]), "a rank has a part of it twice")
            keeps[column_of(group)] = False
        if to_lowest_rank:
            keeps[column_of([group[0] for group in groups])] = True
            return keeps.nonzero().view(-1)
        weights = column_of([name.weight for _, name in self._names])[self._of_items]
        alone = torch.cat([unfilled(1).zero_(), (weights * keeps).cumsum(0)]).tolist()
        given, starts = [0] * (len(self.starts) - 1), self.starts
        sets: dict[tuple[int, ...], set[int]] = {}
        for group, ranks in zip(groups, of_groups, strict=True):
            first = ranks[0]  # torch has come to nothing yet of what the ranks behind have alone
            met = alone[group[0]] - alone[starts[first]]
            given[first] += met
            # a set, as in torch, whose order decides between ranks that have as much
            members = sets.setdefault(ranks, set(ranks))
            chosen = min(members, key=given.__getitem__)
            given[first] -= met
            given[chosen] += int(weights[group[0]])
            keeps[group[ranks.index(chosen)]] = True
        return keeps.nonzero().view(-1)

    def _duplicates(self) -> Iterator[list[int]]:
        """The numbers of items that are the same part of the same name."""
        is_value = torch.ones(self.starts[-1], dtype=torch.bool, device="cpu")
        for of_dims in self._chunks.values():
            is_value[of_dims.rows] = False
            keys = [self._of_items[of_dims.rows], *of_dims.offsets.unbind(1)]
            for group, is_same in _groups(of_dims.rows, keys, of_dims.sizes.unbind(1)):
                if not is_same:
                    name = int(self._of_items[group[0]])
                    raise self._invalid(name, "two parts begin at one place and differ in size")
                yield group
        values = is_value.nonzero().view(-1)
        for group, _ in _groups(values, [self._of_items[values]]):
            yield group

    def _invalid(self, name: int, why: str) -> ValueError:
        return ValueError(f"{_INVALID}: key:{self._names[name][0]} {why}")

    def ordered(self, kept: torch.Tensor) -> tuple[Table, torch.Tensor, torch.Tensor]:
        """What is written, in torch's order: names by first occurrence, their chunks by rank.

        Args:
            kept: The items that are written.

        Returns:
            The table; and of each item that is written its row, and its number in its name.
        """
        of_kept = self._of_items[kept]
        names, counts = self._names, of_kept.bincount(minlength=len(self._names))
        firsts = torch.full((len(names),), kept.numel(), dtype=torch.int64, device="cpu")
        firsts.scatter_reduce_(0, of_kept, counted(0, kept.numel()), "amin")
        order = firsts.argsort(stable=True)
        places = unfilled(len(names))
        places[order] = counted(0, len(names))
        by_row = places[of_kept].argsort(stable=True)
        rows = unfilled(kept.numel())
        rows[by_row] = counted(0, kept.numel())
        starts = unfilled(len(names))
        starts[order] = counts[order].cumsum(0) - counts[order]
        properties = {key: number for number, key in enumerate(self._properties)}
        in_order: list[tuple[str, tuple[int, ...] | None, int, int]] = []
        for number, count in zip(order.tolist(), counts[order].tolist(), strict=True):
            name, said = names[number]
            if not count:
                continue  # no rank has a part of it
            if count > 1 and (said.is_whole or said.shape is None):
                raise self._invalid(number, "ranks have different parts of what is whole")
            key = self._properties_of[number]
            in_order.append((name, said.shape, 0 if key is None else properties[key], count))
        dims = sorted({len(shape) for _, shape, _, _ in in_order if shape is not None})
        table = Table(
            entries_of(in_order),
            list(self._properties.values()),
            {one: self._chunks_of(one, kept, by_row) for one in dims},
            _merged(self._paths, self._uri),
        )
        return table, rows, rows - starts[of_kept]

    def _chunks_of(self, dims: int, kept: torch.Tensor, by_row: torch.Tensor) -> Chunks:
        """The chunks of a number of dimensions, by row."""
        known = self._chunks[dims]
        place_of = torch.full((self.starts[-1],), -1, dtype=torch.int64, device="cpu")
        place_of[known.rows] = counted(0, known.rows.numel())
        places = place_of[kept[by_row]]
        rows = (places >= 0).nonzero().view(-1)
        places = places[rows]
        return Chunks(rows, known.offsets[places], known.sizes[places])


def _groups(
    items: torch.Tensor, keys: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()
) -> Iterator[tuple[list[int], bool]]:
    """Those of ``items`` whose keys are the same, if they are several, in ascending order.

    With each group: whether all groups have the same in the other columns, too.
    """
    if items.numel() < 2 or int(keys[0].bincount().max()) < 2:
        return
    order = counted(0, items.numel())
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    same = torch.ones(items.numel() - 1, dtype=torch.bool, device="cpu")
    for key in keys:
        same &= key[order].diff() == 0
    if not bool(same.any()):
        return
    unlike = torch.zeros_like(same)
    for other in others:
        unlike |= (other[order].diff() != 0) & same
    numbers, starts = items[order].tolist(), [0, *((~same).nonzero().view(-1) + 1).tolist()]
    for start, stop in itertools.pairwise([*starts, len(numbers)]):
        if stop - start > 1:
            yield numbers[start:stop], not bool(unlike[start : stop - 1].any())


def _merged(paths: Sequence[tuple[int, Paths]], uri: str) -> Paths:
    """All paths, as a ``ChainMap`` has them: in the order of the last rank's.

    Args:
        paths: With the rank that has them.
        uri: The checkpoint, for messages.

    Raises:
        KeyCollisionError: If ranks have different paths of one name.
    """
    distinct = {id(one): (rank, one) for rank, one in reversed(paths)}.values()  # of lowest ranks
    made: dict[str, tuple[str | int, ...]] = {}
    for _, one in distinct:
        made.update(one)
    if len(made) == sum(len(one) for _, one in distinct):
        return made  # no two ranks have the same name
    for first, one in reversed(distinct):
        for name, path in one.items() if not one.items() <= made.items() else ():
            if path != made[name]:
                rank = next(rank for rank, other in paths if other.get(name) == made[name])
                low, high = sorted(((first, path), (rank, made[name])))
                raise KeyCollisionError(
                    f"{name} is state_dict{shown(low[1])} on rank {low[0]} and state_dict"
                    f"{shown(high[1])} on rank {high[0]}, of which only one would be saved: rename "
                    "one of them",
                    uri=uri,
                    item=name,
                )
    return made


def _validate(table: Table, ranks: int) -> None:
    """Checks that the chunks of each tensor fill it and don't overlap.

    Raises:
        ValueError: As torch's planner raises it.
    """
    doubtful = set(_doubtful(table, ranks))
    if not doubtful:
        return
    in_order = [name for name in table.entries if name in doubtful]
    metadata = Metadata({name: table.metadata_of(name) for name in in_order})
    if errors := validate_global_plan([SavePlan([])] * ranks, metadata):
        summary = "; ".join(errors)
        summary = summary if len(summary) <= 500 else f"{summary[:500]}... (truncated)"
        raise ValueError(f"{_INVALID}: {summary}")


def _doubtful(table: Table, ranks: int) -> Iterator[str]:
    """The names of tensors whose chunks do not obviously fill them."""
    for dims, chunks in table.chunks.items():
        if not dims:
            continue
        tensors = [(n, e) for n, e in table.entries.items() if e.shape and len(e.shape) == dims]
        counts = column_of([entry.count for _, entry in tensors])
        names = repeated(counted(0, len(tensors)), counts)
        wanted = column_of([math.prod(entry.shape or ()) for _, entry in tensors])
        found = torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
        found.index_add_(0, names, chunks.sizes.prod(1))
        wrong = torch.zeros(len(tensors), dtype=torch.bool, device="cpu")
        if ranks > 1:
            wrong |= found != wanted
        wrong[names[_not_apart(names, chunks)]] = True
        for number in wrong.nonzero().view(-1).tolist():
            yield tensors[number][0]


def _not_apart(names: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """The chunks that may overlap others of their tensor.

    Chunks are separated dimension by dimension: those whose ranges don't touch can't overlap. Grids
    of any number of dimensions separate completely.
    """
    left = (names.bincount()[names] > 1).nonzero().view(-1)
    groups = names[left]
    for _ in range(2):  # what was divided in a later dimension may come apart in an earlier one
        for begins, sizes in zip(chunks.offsets.unbind(1), chunks.sizes.unbind(1), strict=True):
            if left.numel() < 2:
                return left[:0]
            order = begins[left].argsort(stable=True)
            order = order[groups[order].argsort(stable=True)]
            left, groups = left[order], groups[order]
            first, end = begins[left], begins[left] + sizes[left]
            span = int(end.max()) + 1
            is_new = torch.ones(left.numel(), dtype=torch.bool, device="cpu")
            distinct = torch.cat([column_of([0]), (groups[1:] != groups[:-1]).cumsum(0)])
            if span * left.numel() >= _END:
                return left  # numbers too large to compare at once
            reached = (end + distinct * span).cummax(0).values[:-1]
            is_new[1:] = first[1:] + distinct[1:] * span >= reached
            groups = is_new.cumsum(0)
            sizes_of = groups.bincount()
            several = sizes_of[groups] > 1
            left, groups = left[several], groups[several]
    return left
