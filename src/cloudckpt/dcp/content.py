"""Replaces the ``Stateful`` and ``per_rank`` values of a state dict by what is saved for them.

A checkpoint has one value under one name, so a value of each rank is saved under a name for each:
``{"loader": per_rank(3)}`` becomes ``{"loader": {"rank_0": 3}}`` on the first rank. Any reader can
load these names; a load by cloudckpt puts each rank's value back into its ``PerRank``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.lazy import record_behind
from cloudckpt.checkpoint.structure import Path, Structure, containers, shown
from cloudckpt.checkpoint.torch_private import flatten_state_dict
from cloudckpt.errors import ConfigError, UnsupportedValueError

__all__ = ["Content", "PerRank", "per_rank", "without_ranks"]

T = TypeVar("T")

_OF_RANK = re.compile(r"rank_(\d+)")
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = frozenset((*_ATOMS, torch.Tensor, torch.nn.Parameter, DTensor))


class PerRank(Generic[T]):
    """A value of a state dict of which each rank has its own, made by :func:`cloudckpt.per_rank`.

    Attributes:
        value: The value of this rank. After a load, the value that this rank has saved; if the
            checkpoint has no value of this rank, it stays as it was, which the load logs as a
            warning.
        is_loaded: Whether the last load has set ``value`` to what this rank had saved.
        all: After a load, the saved values by the rank that saved them: of all ranks if the ranks
            that saved are not exactly those that load; otherwise only this rank's.
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self.is_loaded = False
        self.all: dict[int, T] = {}

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a per_rank value can be an entry of a dict or a list, not of an object or a "
            "tuple, and only cloudckpt saves it: use cloudckpt.save, async_save, a "
            "checkpointer or a manager"
        )


def per_rank(value: T) -> PerRank[T]:
    """Marks a value of a state dict as this rank's own: each rank saves and loads its own value.

    It may be an entry anywhere in the dicts and lists of a state dict, or of the ``state_dict()``
    of a ``Stateful``. The value may be anything that a state dict can hold: numbers, tensors,
    dicts, a ``Stateful``. To load, put a ``per_rank`` under the same key; afterwards its ``value``
    and ``all`` have the loaded values, see :class:`PerRank`. Values that are loaded in place, such
    as a model's tensors, are also filled.

    >>> state = {"model": model, "rng": cloudckpt.per_rank(torch.get_rng_state())}  # doctest: +SKIP
    >>> cloudckpt.load(state, checkpoint_id="s3://bucket/run/step-9")  # doctest: +SKIP
    >>> torch.set_rng_state(state["rng"].value)  # doctest: +SKIP

    Args:
        value: The value of this rank.

    Returns:
        The marked value, to be put into the state dict.
    """
    return PerRank(value)


def without_ranks(name: str) -> str:
    """Returns a name in a checkpoint without its ``rank_N`` parts."""
    return ".".join(part for part in name.split(".") if not _OF_RANK.fullmatch(part))


class Content:
    """The values that are saved for a state dict, or loaded for it.

    Attributes:
        state: The state dict, with each ``Stateful`` replaced by its ``state_dict()``, and each
            ``PerRank`` by a dict with this rank's value under the rank's name.
        notes: After :meth:`fit`, messages about values of other ranks.
        left_alone: After :meth:`fit`, the values that this rank keeps, and why.
        others: After :meth:`fit`, the names of other ranks' values.
    """

    def __init__(
        self,
        state_dict: Mapping[Any, Any],
        rank: int,
        *,
        path: Path = (),
        sorts: bool = False,
        own: list[_Own] | None = None,
    ) -> None:
        """Replaces the values of a state dict.

        Args:
            state_dict: The state dict.
            rank: This rank, in the group that saves or loads.
            path: The path of this state dict in an outer one.
            sorts: Whether ``state_dict()`` is called in the order of the keys.
            own: Collects the ``PerRank`` values.

        Raises:
            UnsupportedValueError: If a container contains itself, or a tuple holds a value that has
                to be replaced: a tuple is saved as one value.
        """
        self.notes: list[str] = []
        self.left_alone: dict[str, str] = {}
        self.others: set[str] = set()
        self._state_dict, self._rank = state_dict, rank
        self._own: list[_Own] = [] if own is None else own
        self._inner: dict[Path, Content] = {}
        self._made: dict[int, bool] = {}  # whether a container is rebuilt, by its id
        for container in containers(state_dict):  # inner ones first
            self._made[id(container)] = any(map(self._is_replaced, _entries_of(container)))
        self._path = path
        keys = sorted(state_dict) if sorts else [*state_dict]
        is_made = self._made[id(state_dict)]
        self.state: dict[Any, Any] = {
            key: self._of(state_dict[key], (*path, str(key))) if is_made else state_dict[key]
            for key in keys
        }

    def _is_replaced(self, value: Any) -> bool:
        return self._made.get(id(value), False) or _stands_for_another(value)

    def _of(self, value: Any, path: Path) -> Any:
        """Returns what is saved for a value: itself, unless it or its entries have
        to be replaced.
        """
        if isinstance(value, PerRank):
            named = {_name(self._rank): value.value}
            inner = self._inner[path] = Content(named, self._rank, path=path, own=self._own)
            self._own.append(_Own(path, value, inner))
            return inner.state
        if _stands_for_another(value):
            state = value.state_dict()
            if not isinstance(state, Mapping):
                return state
            inner = self._inner[path] = Content(state, self._rank, path=path, own=self._own)
            return inner.state if inner._made[id(state)] else state
        if not self._made.get(id(value), False):
            return value
        if isinstance(value, Mapping):
            return {key: self._of(entry, (*path, str(key))) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._of(entry, (*path, index)) for index, entry in enumerate(value)]
        raise UnsupportedValueError(
            f"state_dict{shown(path)} is a {type(value).__name__}, which is saved as one value, "
            "but holds a Stateful (such as a module) or a per_rank: make it a list",
            item=".".join(map(str, path)),
        )

    def for_planner(self, planner: object) -> dict[Any, Any]:
        """Returns :attr:`state`, if the planner can save it.

        Raises:
            ConfigError: If it has ``per_rank`` values, and the planner does not flatten the state
                dict.
        """
        flattens = not isinstance(planner, DefaultSavePlanner) or planner.flatten_state_dict
        if self._own and not flattens:
            raise ConfigError(
                "per_rank values need a planner with flatten_state_dict=True, which is the default"
            )
        return self.state

    def put(self, loaded: Any) -> Any:
        """Puts loaded values back into the original state dict; calls ``load_state_dict()``.

        Args:
            loaded: The values that were loaded for :attr:`state`.

        Returns:
            The original state dict, filled; or ``loaded`` if nothing had been replaced.
        """
        return self._put(self._state_dict, loaded, self._path)

    def _put(self, given: Any, loaded: Any, path: Path) -> Any:
        if not self._made.get(id(given), False) or not isinstance(loaded, (Mapping, list)):
            return loaded
        for key, entry in [*_items_of(given)]:
            is_index = isinstance(given, list)
            where, found = (*path, key if is_index else str(key)), loaded[key]
            inner = self._inner.get(where)
            if isinstance(entry, PerRank):
                assert inner is not None
                _take(entry, found, self._rank, inner)
            elif _stands_for_another(entry):
                entry.load_state_dict(found if inner is None else inner.put(found))
            elif (made := self._put(entry, found, where)) is not entry:
                given[key] = made
        return given

    def fit(self, metadata: Metadata, ranks: int, uri: str) -> None:
        """Changes :attr:`state` so that a load reads each rank's values from the checkpoint.

        Args:
            metadata: The metadata of the checkpoint.
            ranks: How many ranks load.
            uri: The checkpoint, for messages.

        Raises:
            CheckpointCorruptError: If the metadata contradict themselves.
        """
        self.notes, self.left_alone, self.others = [], {}, set()
        if not self._own:
            return
        record = record_behind(metadata)
        structure = Structure() if record is None else record.structure
        stored = _by_rank({own.path for own in self._own}, metadata, structure)
        for own in self._own:
            of_ranks = stored.get(own.path, {})
            own.value.is_loaded = self._rank in of_ranks
            if not of_ranks:
                continue  # treated like any other missing name
            asked = [self._rank] if of_ranks.keys() == {*range(ranks)} else sorted(of_ranks)
            made = {
                _name(rank): own.state
                if rank == self._rank and own.takes(of_ranks[rank], metadata)
                else _placeholder(
                    (*own.path, _name(rank)), of_ranks[rank], metadata, structure, uri
                )
                for rank in asked
            }
            own.content.state.clear()
            own.content.state.update(made)
            for rank, names in of_ranks.items():
                if rank not in asked:
                    self.others.update(names)
            self._note(own, sorted(of_ranks), ranks)

    def _note(self, own: _Own, saved: list[int], ranks: int) -> None:
        name = ".".join(map(str, own.path))
        listed = ", ".join(map(str, saved))
        if self._rank not in saved:
            self.left_alone[name] = f"saved by ranks {listed} only: see PerRank.all"
            self.notes.append(f"{name}: rank {self._rank} keeps its value, {self.left_alone[name]}")
        elif self._rank == 0 and max(saved) >= ranks:
            self.notes.append(
                f"{name}: ranks {listed} saved it, and {ranks} ranks load it: PerRank.all has "
                "the values of the others"
            )


class _Own:
    """A ``PerRank`` of the state dict, with its path and the content that is loaded for it."""

    def __init__(self, path: Path, value: PerRank[Any], content: Content) -> None:
        self.path, self.value, self.content = path, value, content
        [(self.name, self.state)] = content.state.items()

    def takes(self, names: Mapping[str, Path], metadata: Metadata) -> bool:
        """Whether saved values are loaded in place: it has tensors, or the same names of values."""
        flat = flatten_state_dict({".".join(map(str, self.path)): {self.name: self.state}})[0]
        if any(isinstance(value, torch.Tensor) for value in flat.values()):
            return True
        saved = map(metadata.state_dict_metadata.__getitem__, names)
        is_tensor = any(isinstance(entry, TensorStorageMetadata) for entry in saved)
        return flat.keys() == names.keys() and not is_tensor


def _name(rank: int) -> str:
    return f"rank_{rank}"


def _take(value: PerRank[Any], loaded: Any, rank: int, inner: Content) -> None:
    """Puts loaded values into a ``PerRank``."""
    loaded = loaded if isinstance(loaded, Mapping) else {}
    if not value.is_loaded:
        loaded = {name: entry for name, entry in loaded.items() if name != _name(rank)}
    else:
        value.value = inner.put(loaded)[_name(rank)]
    value.all = {
        int(found[1]): entry
        for name, entry in loaded.items()
        if (found := _OF_RANK.fullmatch(name)) is not None
    }


def _by_rank(
    wanted: set[Path], metadata: Metadata, structure: Structure
) -> dict[Path, dict[int, dict[str, Path]]]:
    """Returns the names of ``per_rank`` values and their paths, by the value's path and by rank."""
    found: dict[Path, dict[int, dict[str, Path]]] = {}

    def of(path: Path) -> Iterator[dict[str, Path]]:
        for depth, element in enumerate(path):
            of_rank = _OF_RANK.fullmatch(element) if isinstance(element, str) else None
            if of_rank is not None and path[:depth] in wanted:
                yield found.setdefault(path[:depth], {}).setdefault(int(of_rank[1]), {})

    paths = metadata.planner_data or {}
    for name in metadata.state_dict_metadata:
        if "rank_" in name:
            path = paths.get(name, (name,))
            for names in of(path):
                names[name] = path
    for path in structure.empty:
        any(of(path))
    return found


def _placeholder(
    path: Path, names: Mapping[str, Path], metadata: Metadata, structure: Structure, uri: str
) -> Any:
    """Returns a value to load a saved ``per_rank`` value into, with its nesting and empty tensors.

    The tensors are on the host.

    Raises:
        CheckpointCorruptError: If the paths contradict each other.
    """
    values: dict[str, Any] = dict.fromkeys(names)
    for name in names:
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            values[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    depth = len(path)
    within = Structure(
        {at: key for at, key in structure.keys.items() if at[:depth] == path},
        tuple(at for at in structure.empty if at[:depth] == path),
    )
    made: Any = within.nested(values, names, uri)
    for element in path:
        made = made[element]
    return made


def _items_of(container: Any) -> Any:
    return container.items() if isinstance(container, Mapping) else enumerate(container)


def _entries_of(container: Any) -> list[Any]:
    """Returns the entries of a container that may be, or contain, values to replace."""
    values = container.values() if isinstance(container, Mapping) else container
    kinds = {*map(type, values)} - _LEAVES
    return [value for value in values if type(value) in kinds] if kinds else []


def _stands_for_another(value: Any) -> bool:
    """Whether a value is a ``PerRank`` or a ``Stateful``; fast for common classes."""
    if type(value) in _LEAVES or type(value) in (dict, list, tuple):
        return False
    return not isinstance(value, torch.Tensor) and isinstance(value, (PerRank, Stateful))
