"""Replaces the ``Stateful`` and ``per_rank`` values of a state dict by what is saved for them.

A checkpoint has one value under each name, so the value of each rank gets a name of its own:
``{"loader": per_rank(3)}`` becomes ``{"loader": {"rank_0": 3}}`` on the first rank. Any reader can
load these names; a load by cloudckpt puts each rank's value back into its ``PerRank``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.lazy import record_behind
from cloudckpt.checkpoint.structure import Path, Structure, check_nesting, shown
from cloudckpt.checkpoint.torch_private import flatten_state_dict
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    MissingKeyError,
    ShapeMismatchError,
    UnsupportedValueError,
)

__all__ = ["Content", "PerRank", "per_rank", "without_ranks"]

T = TypeVar("T")

_OF_RANK = re.compile(r"rank_(\d+)")
_name_of = "rank_{}".format
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = frozenset((*_ATOMS, torch.Tensor, torch.nn.Parameter, DTensor))


class PerRank(Generic[T]):
    """A value in a state dict that each rank saves for itself; see :func:`cloudckpt.per_rank`.

    Attributes:
        value: The value of this rank. After a load, the value that this rank has saved. If only
            other ranks have saved one, ``value`` stays unchanged, and the load logs a warning.
        is_loaded: Whether the last load has set ``value`` to what this rank had saved.
        all: After a load, a dict of saved values by the rank that saved them. It has only this
            rank's value if the same ranks saved and load; otherwise the values of all that saved.
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self.is_loaded = False
        self.all: dict[int, T] = {}

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a per_rank value can't be pickled: put it into a dict or a list of the state dict, "
            "not into an object or a tuple, and save with cloudckpt.save, async_save, a "
            "checkpointer or a manager"
        )


def per_rank(value: T) -> PerRank[T]:
    """Marks a value of a state dict as this rank's own: each rank saves and loads its own value.

    It may be an entry anywhere in the dicts and lists of a state dict, or of the ``state_dict()``
    of a ``Stateful``. The value may be anything that a state dict can hold: numbers, tensors,
    dicts, a ``Stateful``. To load, put a ``per_rank`` under the same key; afterwards its ``value``
    and ``all`` have the loaded values, see :class:`PerRank`. A value with tensors, such as a
    model's state, is loaded in place.

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
    """A state dict in the form in which it is saved and loaded.

    Attributes:
        state: The state dict, with each ``Stateful`` replaced by its ``state_dict()``, and each
            ``PerRank`` by a dict with this rank's value under ``rank_N``.
        notes: After :meth:`fit`, messages to log about ``PerRank`` values.
        left_alone: After :meth:`fit`, the names whose values this rank keeps, and why.
        others: After :meth:`fit`, the names of other ranks' values that are not loaded.
    """

    def __init__(self, state_dict: Mapping[Any, Any], rank: int) -> None:
        """Replaces the ``Stateful`` and ``PerRank`` values; the given state dict is not changed.

        Args:
            state_dict: The state dict.
            rank: This rank, in the group that saves or loads.

        Raises:
            UnsupportedValueError: If a container contains itself or is nested too deeply, or if a
                tuple, which is saved as one value, holds a ``Stateful`` or a ``PerRank``.
            Exception: An error of a ``state_dict()``, with a note that names the entry.
        """
        self.notes: list[str] = []
        self.left_alone: dict[str, str] = {}
        self.others: set[str] = set()
        self._given, self._rank = state_dict, rank
        self._own: list[_Own] = []
        self._states: dict[Path, Any] = {}  # the results of state_dict()
        # whether a container is rebuilt, by its id; the original is rebuilt in any case
        self._is_rebuilt: dict[int, bool] = {id(state_dict): True}
        check_nesting(state_dict)
        self.state: dict[Any, Any] = {
            key: self._saved(value, (str(key),)) for key, value in state_dict.items()
        }

    def _saved(self, value: Any, path: Path) -> Any:
        """Returns ``value`` with each ``Stateful`` and ``PerRank`` replaced, see :attr:`state`."""
        if type(value) in _LEAVES:
            return value
        if isinstance(value, PerRank):
            name = _name_of(self._rank)
            check_nesting({name: value.value})
            inner = {name: self._saved(value.value, (*path, name))}
            self._own.append(_Own(path, value, inner))
            return inner
        if path not in self._states and _is_stateful(value):  # its state may be itself
            try:
                state = self._states[path] = value.state_dict()
            except Exception as exc:
                _note(exc, f"in state_dict of {'.'.join(map(str, path))}")
                raise
            check_nesting({"": state})
            return self._saved(state, path) if isinstance(state, Mapping) else state
        if not self._is_rebuilt.get(id(value), _may_be_rebuilt(value)):
            return value
        is_list = not isinstance(value, Mapping)
        made = {
            key: self._saved(entry, (*path, key if is_list else str(key)))
            for key, entry in _items_of(value)
        }
        is_rebuilt = any(made[key] is not entry for key, entry in _items_of(value))
        self._is_rebuilt[id(value)] = is_rebuilt
        if not is_rebuilt:
            return value
        if isinstance(value, tuple):
            raise UnsupportedValueError(
                f"state_dict{shown(path)} is a {type(value).__name__}, which is saved as one "
                "value, but holds a Stateful (such as a module) or a per_rank: make it a list",
                item=".".join(map(str, path)),
            )
        return [*made.values()] if is_list else made

    def for_planner(self, planner: object) -> dict[Any, Any]:
        """Returns :attr:`state`, if the planner can save it.

        Raises:
            ConfigError: If the state has ``per_rank`` values, and the planner does not flatten the
                state dict.
        """
        if self._own and not getattr(planner, "flatten_state_dict", True):
            name = ".".join(map(str, self._own[0].path))
            raise ConfigError(f"{name} is a per_rank: the planner needs flatten_state_dict=True")
        return self.state

    def put(self, loaded: Any) -> Any:
        """Puts loaded values into the original state dict.

        The ``load_state_dict()`` of each ``Stateful`` in it is called with the state that was
        loaded for this ``Stateful``.

        Args:
            loaded: The values that were loaded for :attr:`state`.

        Returns:
            The original state dict.

        Raises:
            MissingKeyError: If a dict or list was saved as one value, and an entry of the state
                dict is not in it.
            Exception: An error of a ``load_state_dict()``, see :func:`_fill`.
        """
        return self._put(self._given, loaded, ())

    def _put(self, given: Any, loaded: Any, path: Path) -> Any:
        if isinstance(given, PerRank):
            self._take(given, loaded if isinstance(loaded, Mapping) else {}, path)
            return given
        if path in self._states and _is_stateful(given):
            _fill(given, self._put(self._states.pop(path), loaded, path), ".".join(map(str, path)))
            return given
        if not self._is_rebuilt.get(id(given)) or not isinstance(loaded, (Mapping, list)):
            return loaded
        for key, entry in [*_items_of(given)]:
            entry_path = (*path, key if isinstance(given, list) else str(key))
            if key not in (loaded if isinstance(loaded, Mapping) else range(len(loaded))):
                name = ".".join(map(str, entry_path))
                raise MissingKeyError(
                    f"{name} is not in the checkpoint, which has its dict or list as one value: "
                    f"leave {name} out of the state dict",
                    item=name,
                )
            if (made := self._put(entry, loaded[key], entry_path)) is not entry:
                given[key] = made
        return given

    def _take(self, value: PerRank[Any], loaded: Mapping[str, Any], path: Path) -> None:
        own = _name_of(self._rank)
        if value.is_loaded:
            value.value = self._put(value.value, loaded[own], (*path, own))
        # without ``is_loaded``, the entry of this rank is its own value
        names = [name for name in loaded if value.is_loaded or name != own]
        matches = filter(None, map(_OF_RANK.fullmatch, names))
        value.all = {int(of_rank[1]): loaded[of_rank[0]] for of_rank in matches}

    def fit(self, metadata: Metadata, ranks: int, uri: str) -> None:
        """Prepares a load: :attr:`state` gets an entry for each ``PerRank`` value to be loaded.

        These are saved values of this rank or of all ranks, see :class:`PerRank`.

        Args:
            metadata: The metadata of the checkpoint.
            ranks: How many ranks load.
            uri: The checkpoint, for messages.

        Raises:
            CheckpointCorruptError: If the stored paths contradict each other.
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
            own.inner.clear()
            for rank, names in of_ranks.items():
                name = _name_of(rank)
                if rank not in asked:
                    self.others.update(names)
                elif rank == self._rank and own.takes(names, metadata):
                    own.inner[name] = own.state
                else:
                    path = (*own.path, name)
                    own.inner[name] = _placeholder(path, names, metadata, structure, uri)
            self._note(own, sorted(of_ranks), ranks)

    def _note(self, own: _Own, saved: list[int], ranks: int) -> None:
        name = ".".join(map(str, own.path))
        listed = ", ".join(map(str, saved))
        if self._rank not in saved:
            self.left_alone[name] = f"saved only by these ranks: {listed}; see PerRank.all"
            self.notes.append(f"{name}: rank {self._rank} keeps its value: {self.left_alone[name]}")
        elif self._rank == 0 and max(saved) >= ranks:
            self.notes.append(
                f"{name}: ranks {listed} saved it; number of ranks that load it: {ranks}. "
                "PerRank.all has the values of the other ranks"
            )


class _Own:
    """A ``PerRank`` value, its path in the state dict, and the dict that is saved in its place."""

    def __init__(self, path: Path, value: PerRank[Any], inner: dict[str, Any]) -> None:
        self.path, self.value, self.inner = path, value, inner
        [(self.name, self.state)] = inner.items()

    def takes(self, names: Mapping[str, Path], metadata: Metadata) -> bool:
        """Whether to load the saved values into this rank's value, instead of replacing it.

        True if this rank's value has tensors; or if neither it nor the saved values have any, and
        the names of both are the same. Keys and containers of this rank's value, such as a
        ``defaultdict``, then keep their classes.
        """
        flat = flatten_state_dict({".".join(map(str, self.path)): {self.name: self.state}})[0]
        if any(isinstance(value, torch.Tensor) for value in flat.values()):
            return True
        saved = map(metadata.state_dict_metadata.__getitem__, names)
        has_saved_tensors = any(isinstance(entry, TensorStorageMetadata) for entry in saved)
        return flat.keys() == names.keys() and not has_saved_tensors


def _by_rank(
    wanted: set[Path], metadata: Metadata, structure: Structure
) -> dict[Path, dict[int, dict[str, Path]]]:
    """Finds the saved values of ``per_rank`` entries in the metadata.

    Args:
        wanted: The paths of the ``PerRank`` values in the state dict to load.
        metadata: The metadata of the checkpoint.
        structure: The keys and empty dicts that the metadata omits.

    Returns:
        For each path of a ``PerRank``, a dict that has, for each rank that saved a value there, a
        dict of the names of the saved values with their paths.
    """
    stored: dict[Path, dict[int, dict[str, Path]]] = {}
    paths = metadata.planner_data or {}
    names_of_ranks = (name for name in metadata.state_dict_metadata if "rank_" in name)
    named = {name: paths.get(name, (name,)) for name in names_of_ranks}
    for name, path in (*named.items(), *((None, path) for path in structure.empty)):
        for depth, element in enumerate(path):
            of_rank = _OF_RANK.fullmatch(element) if isinstance(element, str) else None
            if of_rank is not None and path[:depth] in wanted:
                names = stored.setdefault(path[:depth], {}).setdefault(int(of_rank[1]), {})
                names.update({} if name is None else {name: path})
    return stored


def _placeholder(
    path: Path, names: Mapping[str, Path], metadata: Metadata, structure: Structure, uri: str
) -> Any:
    """Returns a new value into which a saved ``per_rank`` value can be loaded.

    It is nested like the saved value, and its tensors are uninitialized, in host memory.

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


def _fill(value: Any, state: Any, name: str) -> None:
    """Calls the ``load_state_dict`` of a ``Stateful`` with the state that was loaded for it.

    Raises:
        ShapeMismatchError: If the ``Stateful`` is an optimizer and raises a ValueError: its
            parameter groups are not those that were saved.
        CheckpointError: If the method raises a CheckpointCorruptError or CheckpointNotFoundError.
            Unchanged, these would seem to be about the checkpoint that is being loaded.
        Exception: Any other error of the method, with a note that names the entry.
    """
    try:
        value.load_state_dict(state)
    except Exception as exc:
        if isinstance(exc, ValueError) and isinstance(value, torch.optim.Optimizer):
            raise ShapeMismatchError(
                f"{name} does not accept the saved state of an optimizer: make the optimizer with "
                "the same parameter groups, or save and load the state by names of parameters, "
                "with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
                item=name,
                cause=exc,
            ) from exc
        if isinstance(exc, (CheckpointCorruptError, CheckpointNotFoundError)):
            message = f"load_state_dict of {name} failed to load another checkpoint: see the cause"
            raise CheckpointError(message, item=name, cause=exc) from exc
        _note(exc, f"in load_state_dict of {name}")
        raise


def _note(error: Any, note: str) -> None:
    """Adds a note to an error; Python 3.10 has no ``add_note()``."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]


def _items_of(container: Any) -> Any:
    return container.items() if isinstance(container, Mapping) else enumerate(container)


def _may_be_rebuilt(value: Any) -> bool:
    """Whether a value is a container that may hold a ``Stateful`` or a ``PerRank`` at any depth."""
    entries = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, (Mapping, list, tuple)) and not _LEAVES.issuperset(map(type, entries))


def _is_stateful(value: Any) -> bool:
    """Whether a value is a ``Stateful`` and no tensor; fast for common classes."""
    is_common = type(value) in _LEAVES or type(value) in (dict, list, tuple)
    return not (is_common or isinstance(value, torch.Tensor)) and isinstance(value, Stateful)
