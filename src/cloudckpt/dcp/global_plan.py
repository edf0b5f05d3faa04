"""Makes the global plan of a save from columns of numbers, with the same result as torch's planner.

torch's planner makes five Python objects for each chunk of each rank, gathers them on one rank, and
visits each several times: half a million chunks take fifteen seconds there. Here ranks send their
plans as columns (``checkpoint/record.py``), and the coordinator removes duplicates, orders and
checks by sorting numbers. The result equals that of torch's planner for the same plans, down to the
order of the names; tests compare them. Plans of custom planners are left to these.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from cloudckpt.checkpoint.columns import column_of, counted, repeated, unfilled
from cloudckpt.checkpoint.from_torch import NotInColumnsError, table_of_plan
from cloudckpt.checkpoint.manifest import Planned
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.structure import Structure, shown
from cloudckpt.checkpoint.table import Chunks, Form, Paths, Table, numbered, rows_by_dims
from cloudckpt.checkpoint.torch_private import is_filled
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.dcp.copies import Shared, shared_of_ranks
from cloudckpt.errors import IncompleteSaveError, KeyCollisionError

__all__ = ["plan_together", "record_of"]

_END = 1 << 63


def plan_together(
    records: Sequence[Record], *, to_lowest_rank: bool, compares: bool = False, uri: str
) -> tuple[Planned, list[list[int]], list[Shared]]:
    """Merges the plans of all ranks like torch's planner: each item is written by one rank.

    Args:
        records: By rank, the record of its plan.
        to_lowest_rank: Whether an item that several ranks have is written by the lowest of them; if
            False, by the one that has the least to write.
        compares: Whether the ranks compare the items that several of them have.
        uri: The checkpoint, for messages.

    Returns:
        A tuple: the plan of all ranks; a list that has, for each rank, the numbers of the items of
        its plan that it writes; and a list of the items that each rank compares with other ranks,
        with empty entries if ``compares`` is False.

    Raises:
        KeyCollisionError: If ranks have different types, shapes or paths under one name.
        IncompleteSaveError: If the chunks of a tensor overlap or don't fill it, or a rank has an
            item twice.
    """
    items = _Items(records, uri)
    kept = items.kept(to_lowest_rank)
    table, rows = items.ordered(kept)
    _validate(table, len(records), uri)
    parts, of_ranks = [], []
    bounds = torch.searchsorted(kept, column_of(items.starts))
    for start, first, stop in zip(items.starts, bounds[:-1], bounds[1:], strict=False):
        parts.append((kept[first:stop] - start).tolist())
        of_ranks.append(rows[first:stop])
    structure = Structure.merged([record.structure for record in records], uri)
    shared: list[Shared] = [[] for _ in records]
    if compares:
        shared = shared_of_ranks(items.groups, items.ranks_of_groups, items.starts)
    return Planned(table, tuple(of_ranks), records[0].checksum, structure), parts, shared


def record_of(plan: SavePlan, structure: Structure, checksum: ChecksumAlgorithm) -> bytes:
    """Returns the plan of a rank, encoded as a :class:`Record` without locations.

    Args:
        plan: A plan of torch's planner, or of one that makes the same classes.
        structure: The keys and empty dicts of this rank's state dict that torch's paths lose.
        checksum: The checksum algorithm of the store.

    Raises:
        NotInColumnsError: If a :class:`Record` can't express the plan.
    """
    table, whole = table_of_plan(plan)
    planned = Record(table=table, whole=whole, structure=structure, checksum=checksum)
    try:
        return planned.to_bytes()
    except (KeyError, ValueError) as exc:
        raise NotInColumnsError(str(exc)) from exc


class _Items:
    """The items of all ranks, one rank after the other, in the order in which torch visits them.

    Attributes:
        starts: By rank, the number of its first item; the last entry is the number of all items.
        groups: The duplicates, set by :meth:`kept`: for each item that several ranks have, the
            numbers of its copies.
        ranks_of_groups: For each entry of ``groups``, the ranks that have the copies.
    """

    def __init__(self, records: Sequence[Record], uri: str) -> None:
        tables = [record.table for record in records if record.table is not None]
        self._uri = uri
        self.starts = [0, *itertools.accumulate(table.count for table in tables)]
        self.groups: list[list[int]] = []
        self.ranks_of_groups: list[tuple[int, ...]] = []
        self._paths = [(rank, table.paths or {}) for rank, table in enumerate(tables)]
        self._bounds = column_of([0, *itertools.accumulate(len(table.names) for table in tables)])
        numbers: dict[str, int] = defaultdict(itertools.count().__next__)
        forms: dict[Form, int] = defaultdict(itertools.count().__next__)
        known: dict[int, torch.Tensor] = {}  # ranks of most jobs have the same names
        names_of, forms_of = [], []
        for table in tables:
            if (names := known.get(id(table.names))) is None:
                names = known[id(table.names)] = column_of([numbers[name] for name in table.names])
            names_of.append(names)
            forms_of.append(column_of([forms[form] for form in table.forms])[table.form_of])
        self._names, self._forms = list(numbers), list(forms)
        of_ranks, forms_of_ranks = torch.cat(names_of), torch.cat(forms_of)
        self._take_forms(of_ranks, forms_of_ranks)
        whole = [one.whole + start for one, start in zip(records, self._bounds, strict=False)]
        self._is_whole = torch.zeros(len(self._names), dtype=torch.bool, device="cpu")
        self._is_whole[of_ranks[torch.cat(whole)]] = True
        counts = torch.cat([table.counts for table in tables])
        self._of_items = repeated(of_ranks, counts)
        every_dims = [form.dims for form in self._forms]
        self._rows = rows_by_dims(
            column_of(every_dims)[forms_of_ranks], counts, sorted({*every_dims})
        )
        self._values = self._rows.pop(-1, unfilled(0))
        self._chunks = {
            one: Chunks(
                torch.cat([table.chunks[one].offsets for table in tables if one in table.chunks]),
                torch.cat([table.chunks[one].sizes for table in tables if one in table.chunks]),
            )
            for one in self._rows
        }

    def _take_forms(self, names: torch.Tensor, forms: torch.Tensor) -> None:
        """Records the form (type and shape) of each name, from the lowest rank that has the name.

        Args:
            names: The numbers of the names that ranks have, one rank after the other.
            forms: The number of the form of each.

        Raises:
            KeyCollisionError: If ranks have different types or shapes under one name.
        """
        firsts = torch.full((len(self._names),), names.numel(), dtype=torch.int64, device="cpu")
        firsts.scatter_reduce_(0, names, counted(0, names.numel()), "amin")
        self._form_of = forms[firsts]
        kinds: dict[str, int] = defaultdict(itertools.count().__next__)
        kind = column_of([kinds[_kind(form)] for form in self._forms])
        unlike = kind[forms] != kind[self._form_of[names]]
        if not bool(unlike.any()):
            return
        first_unlike = int(unlike.nonzero()[0])
        number = int(names[first_unlike])
        name, first = self._names[number], int(firsts[number])
        ranks = torch.searchsorted(self._bounds, column_of([first, first_unlike]), right=True) - 1
        raise KeyCollisionError(
            f"{name} is {_kind(self._forms[int(forms[first])])} on rank {int(ranks[0])}, but "
            f"{_kind(self._forms[int(forms[first_unlike])])} on rank {int(ranks[1])}, and only one "
            "of them would be saved. Wrap a value that belongs to one rank in "
            "cloudckpt.per_rank(...), or give it its own name; make the parts of one tensor a "
            "DTensor",
            uri=self._uri,
            item=name,
        )

    def kept(self, to_lowest_rank: bool) -> torch.Tensor:
        """Returns the numbers of the items to write: one copy of each duplicate, and all others.

        With ``to_lowest_rank``, the lowest rank that has a duplicate writes it. Otherwise, as in
        torch, duplicates are assigned one after another, each to the rank that has the least to
        write so far. Counted are the duplicates assigned to the rank, and those of its other items
        that torch has visited by then.

        Raises:
            IncompleteSaveError: If a rank has the same item twice.
        """
        keeps = torch.ones(self.starts[-1], dtype=torch.bool, device="cpu")
        members, sizes = self._duplicates()
        keeps[members] = False
        ranks = torch.searchsorted(column_of(self.starts), members, right=True) - 1
        items, of_items = members.tolist(), ranks.tolist()
        bounds = [0, *itertools.accumulate(sizes.tolist())]
        groups = [(items[a:b], (*of_items[a:b],)) for a, b in itertools.pairwise(bounds)]
        groups.sort()
        self.groups = [group for group, _ in groups]
        self.ranks_of_groups = [of_group for _, of_group in groups]
        sets = {of_group: set(of_group) for of_group in self.ranks_of_groups}
        for group, of_group in groups:
            if len(sets[of_group]) != len(of_group):
                name = self._names[int(self._of_items[group[0]])]
                why = "has the same part twice on one rank: plan each part once"
                raise _incomplete(name, why, self._uri)
        if to_lowest_rank:
            keeps[column_of([group[0] for group in self.groups])] = True
            return keeps.nonzero().view(-1)
        weights = column_of(list(map(_weight, self._forms)))[self._form_of][self._of_items]
        alone = torch.cat([unfilled(1).zero_(), (weights * keeps).cumsum(0)]).tolist()
        given, starts = [0] * (len(self.starts) - 1), self.starts
        for group, of_group in groups:
            # of the later ranks, torch has visited no items yet that they alone have
            first = of_group[0]
            met = alone[group[0]] - alone[starts[first]]
            given[first] += met
            # a set, as in torch: its order decides between ranks with equally much to write
            chosen = min(sets[of_group], key=given.__getitem__)
            given[first] -= met
            given[chosen] += int(weights[group[0]])
            keeps[group[of_group.index(chosen)]] = True
        return keeps.nonzero().view(-1)

    def _duplicates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the items that several ranks have, group after group, and the groups' sizes.

        Raises:
            IncompleteSaveError: If chunks of a tensor begin at the same offsets and differ in size.
        """
        duplicates = [_groups(self._values, [self._of_items[self._values]])]
        for dims, of_dims in self._chunks.items():
            rows = self._rows[dims]
            keys = [self._of_items[rows], *of_dims.offsets.unbind(1)]
            places, sizes = _groups(counted(0, rows.numel()), keys)
            first = repeated(places[sizes.cumsum(0) - sizes], sizes)
            unlike = (of_dims.sizes[places] != of_dims.sizes[first]).any(1).nonzero()
            if unlike.numel():
                name = self._names[int(self._of_items[rows[places[int(unlike[0])]]])]
                why = (
                    "has two parts that begin at the same offsets and differ in size: make the "
                    "parts of one tensor a DTensor, so that all ranks divide it alike"
                )
                raise _incomplete(name, why, self._uri)
            duplicates.append((rows[places], sizes))
        return torch.cat([members for members, _ in duplicates]), torch.cat(
            [sizes for _, sizes in duplicates]
        )

    def ordered(self, kept: torch.Tensor) -> tuple[Table, torch.Tensor]:
        """Orders the written items as torch does: names by first occurrence, their chunks by rank.

        Args:
            kept: The items that are written.

        Returns:
            The table, and the row of each written item in it.

        Raises:
            IncompleteSaveError: If a rank saves a tensor or value whole, and ranks also save other
                parts of it.
        """
        of_kept = self._of_items[kept]
        counts = of_kept.bincount(minlength=len(self._names))
        firsts = torch.full((len(self._names),), kept.numel(), dtype=torch.int64, device="cpu")
        firsts.scatter_reduce_(0, of_kept, counted(0, kept.numel()), "amin")
        # some names have no part on any rank
        order = firsts.argsort(stable=True)[: int((counts > 0).sum())]
        places = unfilled(len(self._names))
        places[order] = counted(0, order.numel())
        by_row = places[of_kept].argsort(stable=True)
        rows = unfilled(kept.numel())
        rows[by_row] = counted(0, kept.numel())
        is_value = column_of([form.shape is None for form in self._forms]).bool()[self._form_of]
        several = ((counts > 1) & (self._is_whole | is_value))[order].nonzero().view(-1)
        if several.numel():
            name = self._names[int(order[several[0]])]
            why = (
                "is saved whole by some rank, but ranks also save other parts of it: make the "
                "parts of one tensor a DTensor, or give them their own names"
            )
            raise _incomplete(name, why, self._uri)
        table = Table(
            numbered([*map(self._names.__getitem__, order.tolist())]),
            self._forms,
            self._form_of[order],
            counts[order],
            {dims: self._chunks_of(dims, kept[by_row]) for dims in self._chunks},
            _merged(self._paths, self._uri),
        )
        return table, rows

    def _chunks_of(self, dims: int, items: torch.Tensor) -> Chunks:
        """Returns the chunks, among these items, of tensors with ``dims`` dimensions."""
        place_of = torch.full((self.starts[-1],), -1, dtype=torch.int64, device="cpu")
        place_of[self._rows[dims]] = counted(0, self._rows[dims].numel())
        places = place_of[items]
        places, known = places[places >= 0], self._chunks[dims]
        return Chunks(known.offsets[places], known.sizes[places])


def _kind(form: Form) -> str:
    """Returns the type and shape that all ranks must agree on, as text."""
    if form.shape is None:
        return "not a tensor"
    return f"a tensor of {form.dtype} and shape {form.shape}"


def _weight(form: Form) -> int:
    """Returns the size by which torch divides work: the bytes of the whole tensor; at least 1.

    A value that is not a tensor counts as 1.
    """
    return 1 if form.shape is None else math.prod(form.shape) * form.dtype.itemsize or 1


def _groups(items: torch.Tensor, keys: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ``items`` whose keys other items have, too, in groups of equal keys.

    Args:
        items: The numbers of items.
        keys: Columns with an entry for each item; its key is its entries in all of them.

    Returns:
        The items of all groups, and the size of each group.
    """
    if items.numel() < 2 or int(keys[0].bincount().max()) < 2:
        return items[:0], unfilled(0)
    order = counted(0, items.numel())
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    is_first = torch.zeros(items.numel(), dtype=torch.bool, device="cpu")
    is_first[0] = True
    for key in keys:
        is_first[1:] |= key[order].diff() != 0
    sizes = is_first.cumsum(0).bincount()[1:]
    return items[order[repeated(sizes, sizes) > 1]], sizes[sizes > 1]


def _merged(paths: Sequence[tuple[int, Paths]], uri: str) -> Paths:
    """Merges the paths of all ranks, in torch's order: those of the last rank come first.

    Args:
        paths: Ranks with their paths.
        uri: The checkpoint, for messages.

    Raises:
        KeyCollisionError: If ranks have different paths for one name.
    """
    # of the lowest ranks that have them
    distinct = {id(one): (rank, one) for rank, one in reversed(paths)}.values()
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
                    f"{name} is state_dict{shown(low[1])} on rank {low[0]}, but state_dict"
                    f"{shown(high[1])} on rank {high[0]}, and only one of them would be saved: "
                    "rename one of them",
                    uri=uri,
                    item=name,
                )
    return made


def _incomplete(name: str, why: str, uri: str) -> IncompleteSaveError:
    return IncompleteSaveError(f"{name} {why}", uri=uri, item=name)


def _validate(table: Table, ranks: int, uri: str) -> None:
    """Checks that the chunks of each tensor fill it and don't overlap.

    Raises:
        IncompleteSaveError: If torch's planner would refuse the chunks of a tensor.
    """
    names = list(table.names)
    for number in sorted(itertools.chain.from_iterable(_doubtful(table, ranks))):
        name = names[number]
        metadata = Metadata({name: table.metadata_of(name)})
        if not is_filled([SavePlan([])] * ranks, metadata):
            why = (
                "has parts on the ranks that overlap, or do not cover it. Give the same keys on "
                "all ranks, for example those of "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model), and save "
                "nothing inside an `if rank == ...:`"
            )
            raise _incomplete(name, why, uri)


def _doubtful(table: Table, ranks: int) -> Iterator[list[int]]:
    """Yields lists of the numbers of tensors that torch's check may refuse.

    The chunks of such a tensor may overlap or, with several ranks, have gaps. There is one list for
    all tensors with the same number of dimensions.
    """
    elements = column_of([math.prod(form.shape or ()) for form in table.forms])
    for dims, chunks in table.chunks.items():
        if not dims:
            continue
        tensors = (table.dims == dims).nonzero().view(-1)
        names = repeated(counted(0, tensors.numel()), table.counts[tensors])
        filled = torch.zeros(tensors.numel(), dtype=torch.int64, device="cpu")
        filled.index_add_(0, names, chunks.sizes.prod(1))
        wrong = torch.zeros(tensors.numel(), dtype=torch.bool, device="cpu")
        if ranks > 1:
            wrong |= filled != elements[table.form_of[tensors]]
        wrong[names[_not_apart(names, chunks)]] = True
        yield tensors[wrong].tolist()


def _not_apart(names: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Returns the numbers of the chunks that may overlap other chunks of the same tensor.

    Chunks that lie apart in some dimension can't overlap. For chunks in a regular grid, the result
    is empty.

    Args:
        names: The number of each chunk's tensor.
        chunks: The chunks.
    """
    remaining = (names.bincount()[names] > 1).nonzero().view(-1)
    groups = names[remaining]
    for _ in range(2):  # chunks separated in a later dimension may then separate in an earlier one
        for begins, sizes in zip(chunks.offsets.unbind(1), chunks.sizes.unbind(1), strict=True):
            if remaining.numel() < 2:
                return remaining[:0]
            order = begins[remaining].argsort(stable=True)
            order = order[groups[order].argsort(stable=True)]
            remaining, groups = remaining[order], groups[order]
            first, end = begins[remaining], begins[remaining] + sizes[remaining]
            span = int(end.max()) + 1
            is_new = torch.ones(remaining.numel(), dtype=torch.bool, device="cpu")
            distinct = torch.cat([column_of([0]), (groups[1:] != groups[:-1]).cumsum(0)])
            if span * remaining.numel() >= _END:
                return remaining  # numbers too large to compare at once
            reached = (end + distinct * span).cummax(0).values[:-1]
            is_new[1:] = first[1:] + distinct[1:] * span >= reached
            groups = is_new.cumsum(0)
            sizes_of = groups.bincount()
            several = sizes_of[groups] > 1
            remaining, groups = remaining[several], groups[several]
    return remaining
