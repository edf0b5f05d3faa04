"""Flattens state dicts as torch does, and restores their nesting, with keys that torch loses.

torch flattens nested dicts and lists into one dict. The paths that it keeps have strings for all
dict keys, and omit empty dicts: ``optimizer.state_dict()``, whose state is keyed by integers, would
come back in a form that ``load_state_dict`` takes for an optimizer without state. A
:class:`Structure` holds the difference; it is empty for state dicts whose keys are strings and
whose dicts are not empty. It is stored in the commit object.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cloudckpt.errors import CheckpointCorruptError, KeyCollisionError, UnsupportedValueError

__all__ = ["Flat", "Key", "Path", "Structure", "check_nesting", "is_flattened", "shown"]

logger = logging.getLogger("cloudckpt")

Key = int | float | str | None  # bool is an int
"""A dict key that can be restored."""

Path = tuple["str | int", ...]
"""The path of a value as torch writes it: strings for dict keys, integers for list indices."""

_DEEPEST = 1000  # torch flattens by recursion: Python's limit
_LEVELS = 250  # of a state dict: planning and copying recurse, with up to three frames a level
_HOLES = 1 << 20  # list entries without stored data
_logged: set[Path] = set()  # of keys that can't be restored, in any state dict of this process


@dataclass(frozen=True)
class Structure:
    """The original keys and the empty dicts of a state dict, which torch's paths do not express.

    Attributes:
        keys: The original key of each dict entry whose key is not the string in its path, by that
            path.
        empty: The paths of empty dicts.
    """

    keys: Mapping[Path, Key] = field(default_factory=dict)
    empty: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys or self.empty)

    @classmethod
    def merged(cls, parts: Sequence[Structure], uri: str) -> Structure:
        """Merges the structures of all ranks; of contradicting keys, it uses the lowest rank's.

        Contradictions are logged as warnings.

        Args:
            parts: The structure of each rank.
            uri: The checkpoint, for messages.
        """
        if all(part == parts[0] for part in parts):  # as in most jobs
            return parts[0] if parts else cls()
        keys: dict[Path, Key] = {}
        for part in parts:
            for path, key in part.keys.items():
                if keys.setdefault(path, key) != key:
                    logger.warning(
                        "%s: in %s, the keys %r and %r of different ranks have one name in the "
                        "checkpoint; a load without a state dict returns the first: use equal keys",
                        uri, shown(path[:-1]), keys[path], key,
                    )  # fmt: skip
        return cls(keys, tuple(dict.fromkeys(path for part in parts for path in part.empty)))

    def to_json(self) -> dict[str, Any]:
        """Returns the structure as a JSON value, for the commit object."""
        return {"keys": list(self.keys.items()), "empty": self.empty}

    @classmethod
    def from_json(cls, document: Any) -> Structure:
        """Parses the result of :meth:`to_json`.

        Raises:
            ValueError: If ``document`` is anything else.
            TypeError: If a part of it has an unexpected type.
        """
        if not isinstance(document, dict) or document.keys() != {"keys", "empty"}:
            raise ValueError(
                "invalid metadata record: the structure of the state dict does not have exactly "
                "the fields 'keys' and 'empty'"
            )
        keys: dict[Path, Key] = {_path(path): key for path, key in document["keys"]}
        empty = tuple(map(_path, document["empty"]))
        if not all(key is None or type(key) in (bool, int, float, str) for key in keys.values()):
            raise ValueError("invalid metadata record: a key of the state dict has an unknown type")
        return cls(keys, empty)

    def nested(
        self, values: Mapping[str, Any], paths: Mapping[str, Any], uri: str
    ) -> dict[Any, Any]:
        """Returns the nested state dict; in each dict, empty dicts come after the other entries.

        Args:
            values: The loaded values, by torch's flat names.
            paths: The path of each value; values without a path go into the top-level dict.
            uri: The checkpoint, for messages.

        Raises:
            CheckpointCorruptError: If the paths are invalid, too long, or contradict each other.
        """
        try:
            if not isinstance(paths, Mapping):
                raise ValueError("planner_data is not a dict")
            if not paths and not self:
                return dict(values)
            root = _Branch()
            for name, value in values.items():
                *outer, last = path = _path(paths.get(name, (name,)))
                branch = root.inner(outer)
                if branch is None or last in branch:
                    raise ValueError(f"{shown(path)} exists twice, or within another value")
                branch[last] = value
            for path in self.empty:
                root.inner(path)  # another rank may have had a value at this path
            made = self._built(root, (), [_HOLES])
            if not isinstance(made, dict):
                raise ValueError("the top level of the state dict is a list, not a dict")
            return made
        except (ValueError, RecursionError) as exc:
            raise CheckpointCorruptError(
                "the nested state dict can't be rebuilt: the stored paths of its values are "
                "invalid, inconsistent, or too deep for this call stack; load into a state dict",
                uri=uri,
                cause=exc,
            ) from exc

    def _built(self, branch: _Branch, at: Path, holes: list[int]) -> Any:
        """Returns the dict or list that a branch stands for.

        Args:
            branch: The branch.
            at: Its path.
            holes: A list with one number: how many list entries may still be missing in the whole
                state dict. The number is reduced by the entries that are missing here.

        Raises:
            ValueError: If a branch is both a list and a dict, has a key twice, or is a list with
                too many missing entries.
        """
        made: dict[Any, Any] = {}
        kinds = {*map(type, branch)}
        for element, entry in branch.items():
            path = (*at, element)
            key = self.keys.get(path, element) if type(element) is str else element
            made[key] = self._built(entry, path, holes) if type(entry) is _Branch else entry
        if len(made) != len(branch) or (int in kinds and str in kinds):
            raise ValueError(f"{shown(at)} is both a list and a dict, or has a key twice")
        if int not in kinds:
            return made
        length = max(made) + 1
        holes[0] -= length - len(made)
        if holes[0] < 0:
            raise ValueError(f"the list {shown(at)} has too many missing entries")
        return [made.get(index) for index in range(length)]


class _Branch(dict["str | int", Any]):
    """The entries of a dict or list that is being rebuilt, by torch's path elements."""

    def inner(self, path: Iterable[str | int]) -> _Branch | None:
        """Returns the container at a path, made if it is missing; None if a value is in the way."""
        branch: Any = self
        for element in path:
            if element not in branch:
                branch[element] = _Branch()
            branch = branch[element]
            if type(branch) is not _Branch:
                return None
        return branch  # type: ignore[no-any-return]


def _plain(key: Any) -> Key:
    """Returns a key of a plain type that equals ``key`` and can replace it in lookups.

    Raises:
        ValueError: If no plain key does.
    """
    if key is None or type(key) in (bool, int):
        return key  # type: ignore[no-any-return]
    for kind, of in ((str, str), (bool, bool), (int, numbers.Integral), (float, float)):
        if isinstance(key, of):
            plain: Key = str.__str__(key) if kind is str else kind(key)
            is_finite = not isinstance(plain, float) or math.isfinite(plain)
            if is_finite and plain == key and hash(plain) == hash(key):
                return plain
            break
    raise ValueError(f"a key of type {type(key).__name__} is not a plain value")


def _path(value: Any) -> Path:
    is_path = isinstance(value, (list, tuple)) and 0 < len(value) <= _DEEPEST
    if not is_path or not all(type(one) is str or (type(one) is int and one >= 0) for one in value):
        raise ValueError(
            "invalid path in a state dict: it is empty, too long, or not a list of strings and "
            "non-negative integers"
        )
    return tuple(value)


class Flat:
    """A state dict flattened as torch does it, with the keys and empty dicts that get lost.

    Attributes:
        values: The values that torch does not flatten, by the names that torch gives them. Dicts
            are flattened, and lists that contain a tensor or a dict (:func:`is_flattened`).
        paths: The path of each of these values, by its name.
        keys: The original key of each dict entry whose key is not a plain string, by its path.
        empty: The paths of the empty dicts.
    """

    def __init__(self, state_dict: Mapping[Any, Any], uri: str | None = None) -> None:
        """Flattens a state dict, in which no container contains itself (:func:`check_nesting`).

        Args:
            state_dict: The state dict.
            uri: The checkpoint, for messages.

        Raises:
            KeyCollisionError: If two values, or two keys of one dict, would get the same name.
        """
        self.values: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.keys: dict[Path, Any] = {}
        self.empty: list[Path] = []
        self._uri = uri
        self._add((), "", state_dict)

    def _add(self, path: Path, prefix: str, value: Any) -> None:
        """Adds a value, or if torch flattens it, its entries; ``prefix`` is its name and a dot."""
        is_tensor = type(value) is torch.Tensor  # as most values are
        if not is_tensor and isinstance(value, Mapping):
            if path and not value:
                self.empty.append(path)
            for key, entry in value.items():
                element = key if type(key) is str else self._element(path, key, value)
                self._add((*path, element), f"{prefix}{element}.", entry)
        elif not is_tensor and isinstance(value, list) and is_flattened(value):
            for index, entry in enumerate(value):
                self._add((*path, index), f"{prefix}{index}.", entry)
        else:
            if (name := prefix[:-1]) in self.values:
                raise self._collision(self.true(self.paths[name]), self.true(path))
            self.values[name], self.paths[name] = value, path

    def _element(self, path: Path, key: Any, mapping: Mapping[Any, Any]) -> str:
        """Records a dict key that is not a plain string; returns the string that stands for it."""
        element = str(key)
        at = (*path, element)
        if at in self.keys or (element in mapping and key != element):
            raise self._collision((*path, key), (*path, self.keys.get(at, element)))
        self.keys[at] = key
        return element

    def _collision(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> KeyCollisionError:
        one, other = sorted((shown(first), shown(second)))
        return KeyCollisionError(
            f"state_dict{one} and state_dict{other} would get the same name in the checkpoint, "
            "where keys are strings joined by dots: rename one of them",
            uri=self._uri,
            item=".".join(map(str, first)),
        )

    def true(self, path: Path) -> tuple[Any, ...]:
        """Returns a path with the original keys in place of the strings that stand for them."""
        return tuple(self.keys.get(path[: depth + 1], path[depth]) for depth in range(len(path)))

    def structure(self) -> Structure:
        """Returns the keys and empty dicts that the paths do not express.

        A key that can't be restored is left out, which is logged once: it loads only into a state
        dict that already contains it.
        """
        keys: dict[Path, Key] = {}
        for path, key in self.keys.items():
            try:
                plain = _plain(key)
            except ValueError:
                if path not in _logged:
                    _logged.add(path)
                    logger.warning(
                        "%s: loading without a state dict can't restore the key of state_dict%s, "
                        "of class %s; loading into a state dict with this key works",
                        self._uri, shown((*path[:-1], key)), type(key).__name__,
                    )  # fmt: skip
                continue
            if plain != path[-1]:
                keys[path] = plain
        return Structure(keys, tuple(self.empty))


def is_flattened(value: list[Any]) -> bool:
    """Returns whether torch flattens a list: whether it, or a list in it, has a tensor or dict."""
    kinds = {*map(type, value)}
    if any(issubclass(kind, (torch.Tensor, Mapping)) for kind in kinds):
        return True
    has_lists = any(issubclass(kind, list) for kind in kinds)
    return has_lists and any(isinstance(entry, list) and is_flattened(entry) for entry in value)


def check_nesting(state_dict: Mapping[Any, Any]) -> None:
    """Checks that no mapping, list or tuple contains itself, or is nested too deeply.

    Raises:
        UnsupportedValueError: If one contains itself, or is deeper than 250 levels.
    """
    _check(state_dict, (), {id(state_dict)}, {})


def _check(value: Any, path: tuple[Any, ...], around: set[int], seen: dict[int, Any]) -> None:
    """Checks that no container in ``value`` contains itself, or is nested too deeply.

    Args:
        value: The container.
        path: Its path.
        around: The ids of the container and of those around it.
        seen: Containers that were checked, by id; kept alive, as others would get their ids.

    Raises:
        UnsupportedValueError: If a container contains itself, or is nested too deeply.
    """
    is_mapping = isinstance(value, Mapping)
    entries: Iterable[Any] = value.values() if is_mapping else value
    # the types alone say of most lists, which may have millions of entries, that there are none
    kinds = {kind for kind in set(map(type, entries)) if issubclass(kind, (Mapping, list, tuple))}
    for key, entry in (value.items() if is_mapping else enumerate(value)) if kinds else ():
        if type(entry) not in kinds or id(entry) in seen:
            continue
        at = (*path, key)
        if id(entry) in around or len(at) > _LEVELS:
            where = f"state_dict{shown(at[:8])}{'[...]' if len(at) > 8 else ''}"
            raise UnsupportedValueError(
                f"{where} contains itself, or has more than {_LEVELS} levels: leave it out, or "
                "wrap it in an object of a class that torch.serialization.add_safe_globals knows",
                item=".".join(map(str, at[:8])),
            )
        around.add(id(entry))
        _check(entry, at, around, seen)
        around.remove(id(entry))
        seen[id(entry)] = entry


def shown(path: tuple[Any, ...]) -> str:
    """Returns a path as an index in code, ``['model'][0]``; for an empty one, "the state dict"."""
    return "".join(f"[{element!r}]" for element in path) or "the state dict"
