"""Restores the nesting and the keys that torch's flattening of a state dict loses.

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
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cloudckpt.checkpoint.torch_private import traverse_state_dict
from cloudckpt.errors import CheckpointCorruptError, KeyCollisionError, UnsupportedValueError

__all__ = [
    "Key",
    "KeyNames",
    "Path",
    "Structure",
    "collision",
    "containers",
    "find_collision",
    "shown",
]

logger = logging.getLogger("cloudckpt")

Key = int | float | str | None  # bool is an int
"""A dict key that can be restored."""

Path = tuple["str | int", ...]
"""The path of a value as torch writes it: strings for dict keys, integers for list indices."""

_DEEPEST = 1000  # torch flattens by recursion: Python's limit
_HOLES = 1 << 20  # list entries without stored data
_told: set[tuple[Path, str]] = set()  # paths and keys for which this process has logged a warning


@dataclass(frozen=True)
class Structure:
    """The difference between a state dict and what torch's paths express.

    Attributes:
        keys: The key of a dict entry, by its path, if it is not the string in the path.
        empty: The paths of empty dicts.
    """

    keys: Mapping[Path, Key] = field(default_factory=dict)
    empty: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys or self.empty)

    @classmethod
    def of(cls, state_dict: Mapping[Any, Any], uri: str | None = None) -> Structure:
        """Returns the keys and empty dicts that torch's flattening of a state dict loses.

        A key that can't be restored is logged once, by the logger ``cloudckpt``: it loads only into
        a state dict that already contains it.

        Raises:
            KeyCollisionError: If two keys of one dict have the same string.
        """
        names = KeyNames(state_dict)
        if names.collisions:
            raise collision(*names.collisions[0], uri)
        keys: dict[Path, Key] = {}
        for path, key in names.keys.items():
            try:
                plain = _plain(key)
            except ValueError:
                _tell(path[:-1], f"the key {key!r} ({type(key).__name__})", uri)
                continue
            if plain != path[-1]:
                keys[path] = plain
        return cls(keys, tuple(names.empty))

    @classmethod
    def merged(cls, parts: Sequence[Structure], uri: str) -> Structure:
        """Merges the structures of all ranks; the lowest rank wins a contradiction, as in torch."""
        if all(part == parts[0] for part in parts):  # as in most jobs
            return parts[0] if parts else cls()
        keys: dict[Path, Key] = {}
        for part in parts:
            for path, key in part.keys.items():
                if keys.setdefault(path, key) != key:
                    logger.warning(
                        "%s: in %s, ranks have the different keys %r and %r: loading without a "
                        "state dict gives the first of them",
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
                "invalid metadata record: the structure of the state dict does not consist of "
                "keys and empty dicts"
            )
        keys: dict[Path, Key] = {_path(path): key for path, key in document["keys"]}
        empty = tuple(map(_path, document["empty"]))
        are_plain = all(
            key is None or type(key) in (bool, int, float, str) for key in keys.values()
        )
        if not are_plain or not all((*keys, *empty)):
            raise ValueError(
                "invalid metadata record: a key of the state dict has an unknown type, or the path "
                "of a value is empty"
            )
        return cls(keys, empty)

    def nested(
        self, values: Mapping[str, Any], paths: Mapping[str, Any], uri: str
    ) -> dict[Any, Any]:
        """Rebuilds the nested state dict; empty dicts come after the other entries beside them.

        Args:
            values: The loaded values, by torch's flat names.
            paths: The path of each value; values without a path go into the top-level dict.
            uri: The checkpoint, for messages.

        Raises:
            CheckpointCorruptError: If the paths contradict each other.
        """
        try:
            if not isinstance(paths, Mapping):
                raise ValueError("planner_data is not a dict")
            if not paths and not self:
                return dict(values)
            tree = _Tree()
            for name, value in values.items():
                tree.add(_path(paths.get(name, (name,))), value)
            for path in self.empty:
                tree.node(path)  # another rank may have had a value at this path
            for path, key in self.keys.items():
                if (node := tree.node(path[:-1], create=False)) is not None:
                    node.keys[path[-1]] = key
            return tree.built()
        except ValueError as exc:
            raise CheckpointCorruptError(
                "the nesting of the saved state dict is inconsistent; load it into a state dict",
                uri=uri,
                cause=exc,
            ) from exc


class _Node:
    """A container that is being rebuilt: its entries by torch's path elements, and its true keys.

    Paths come from the store: each element of one is visited a fixed number of times, without
    recursion.
    """

    __slots__ = ("entries", "keys")

    def __init__(self) -> None:
        self.entries: dict[str | int, Any] = {}
        self.keys: dict[str | int, Key] = {}


class _Tree:
    def __init__(self) -> None:
        self._root = _Node()
        # parent, element and node, outer ones first
        self._nodes: list[tuple[_Node, str | int, _Node]] = [(self._root, "", self._root)]

    def add(self, path: Path, value: Any) -> None:
        """Adds a stored value at a path.

        Raises:
            ValueError: If the path exists already, or leads through a value.
        """
        node = self.node(path[:-1]) if path else None
        if node is None or path[-1] in node.entries:
            raise ValueError(f"{shown(path)} exists twice, or within another value")
        node.entries[path[-1]] = value

    def node(self, path: Path, *, create: bool = True) -> _Node | None:
        """Returns the container at a path; None if a value is in the way, or it is not created."""
        node = self._root
        for element in path:
            inner = node.entries.get(element)
            if isinstance(inner, _Node):
                node = inner
                continue
            if element in node.entries or not create:
                return None
            inner = node.entries[element] = _Node()
            self._nodes.append((node, element, inner))
            node = inner
        return node

    def built(self) -> dict[Any, Any]:
        """Returns the whole tree, with the original keys instead of their strings.

        Raises:
            ValueError: If a container is both a list and a dict, has a key twice, or is a list
                with too many missing entries; or if the root is a list.
        """
        holes = _HOLES
        made: Any = None
        for parent, element, node in reversed(self._nodes):
            entries, kinds = node.entries, {*map(type, node.entries)}
            if kinds == {int}:
                length = max(entries) + 1  # type: ignore[operator]
                holes -= length - len(entries)
                if holes < 0:
                    raise ValueError(f"{element!r} has fewer entries than its length")
                made = [entries.get(index) for index in range(length)]
            else:
                made = {node.keys.get(name, name): value for name, value in entries.items()}
                if int in kinds or len(made) != len(entries):
                    raise ValueError(f"{element!r} is both a list and a dict, or has a key twice")
            parent.entries[element] = made
        if not isinstance(made, dict):
            raise ValueError("a list has keys that are not indices")
        return made


def _tell(path: Path, what: str, uri: str | None) -> None:
    if (path, what) not in _told:
        _told.add((path, what))
        where = f"in state_dict{shown(path)}" if path else "in the state dict"
        logger.warning(
            "%s: %s %s can't be restored when the checkpoint is loaded without a state dict; "
            "loading into a state dict with this key works", uri, what, where,
        )  # fmt: skip


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
    is_path = isinstance(value, (list, tuple)) and len(value) <= _DEEPEST
    if not is_path or not all(type(one) is str or (type(one) is int and one >= 0) for one in value):
        raise ValueError("invalid path in a state dict: it is too long, or has other elements")
    return tuple(value)


_TENSOR, _MAPPING, _LIST, _OTHER = range(4)
_WALKED = (Mapping, list, tuple)


class KeyNames:
    """Walks a state dict like torch's flattening, and records the keys that its paths lose.

    Attributes:
        keys: The key of a dict entry, by its path, if it is not a plain string.
        empty: The paths of the empty dicts.
        collisions: Pairs of entries of one dict whose keys have the same string: each as its path,
            with the key itself as last element.
    """

    def __init__(self, state_dict: Mapping[Any, Any]) -> None:
        self.keys: dict[Path, Any] = {}
        self.empty: list[Path] = []
        self.collisions: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        self._kinds: dict[type, int] = {}
        waiting: list[tuple[Path, Any]] = [((), state_dict)]
        while waiting:
            path, value = waiting.pop()
            entries = self._mapping(path, value) if isinstance(value, Mapping) else enumerate(value)
            inner = (((*path, key), entry) for key, entry in entries if self._is_walked(entry))
            waiting.extend(reversed([*inner]))

    def true(self, path: Path) -> tuple[Any, ...]:
        """Returns a path with the original keys instead of their strings."""
        return tuple(self.keys.get(path[: depth + 1], path[depth]) for depth in range(len(path)))

    def _mapping(self, path: Path, value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the entries of a mapping that may be containers, and records its keys."""
        if path and not value:
            self.empty.append(path)
        kinds = self._kinds
        for key, entry in value.items():
            element = key
            if type(key) is not str:
                element = str(key)
                at = (*path, element)
                if at in self.keys or (element in value and key != element):
                    self.collisions.append(((*path, key), (*path, self.keys.get(at, element))))
                self.keys[at] = key
            if kinds.get(type(entry), _MAPPING) in (_MAPPING, _LIST):
                yield element, entry

    def _kind(self, value: Any) -> int:
        kind = self._kinds.get(type(value))
        if kind is None:
            kinds = ((Mapping, _MAPPING), (list, _LIST), (torch.Tensor, _TENSOR), (object, _OTHER))
            kind = next(number for known, number in kinds if isinstance(value, known))
            self._kinds[type(value)] = kind
        return kind

    def _is_walked(self, value: Any) -> bool:
        """Whether torch's flattening enters a value: a mapping, or a list with a tensor or dict."""
        if (kind := self._kind(value)) != _LIST:
            return kind == _MAPPING
        lists = [value]
        while lists:
            entries = lists.pop()
            kinds = {self._kind(entry) for entry in {type(one): one for one in entries}.values()}
            if _TENSOR in kinds or _MAPPING in kinds:
                return True
            if _LIST in kinds:
                lists.extend(entry for entry in entries if isinstance(entry, list))
        return False


def containers(state_dict: Mapping[Any, Any]) -> list[Any]:
    """Returns the mappings, lists and tuples of a state dict, each once, inner ones first.

    Raises:
        UnsupportedValueError: If a container contains itself, so that no walk over it would end.
    """
    found: dict[int, Any] = {}  # by id; the value is kept alive, as another one would get its id
    around: dict[int, tuple[Any, Any, Iterator[tuple[Any, Any]]]] = {}
    around[id(state_dict)] = None, state_dict, _inner(state_dict)
    while around:
        number, (_, value, left) = next(reversed(around.items()))
        key, entry = next(left, (None, None))
        if entry is None:
            del around[number]
            found[number] = value
        elif id(entry) in around or len(around) >= sys.getrecursionlimit():
            path = (*(key for key, _, _ in list(around.values())[1:]), key)
            where = f"state_dict{shown(path[:8])}{'[...]' if len(path) > 8 else ''}"
            raise UnsupportedValueError(
                f"{where} contains itself, or is nested too deeply: leave it out of the state "
                "dict, or wrap it in an object of a class, which is pickled as a whole",
                item=".".join(map(str, path[:8])),
            )
        elif id(entry) not in found:
            around[id(entry)] = key, entry, _inner(entry)
    return list(found.values())


def _inner(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the entries of a container that are containers themselves, with their keys."""
    is_mapping = isinstance(container, Mapping)
    entries: Iterable[Any] = container.values() if is_mapping else container
    kinds = {kind for kind in set(map(type, entries)) if issubclass(kind, _WALKED)}
    pairs = container.items() if is_mapping else enumerate(container)
    return ((key, entry) for key, entry in pairs if type(entry) in kinds) if kinds else iter(())


def find_collision(state_dict: Mapping[Any, Any], uri: str | None) -> KeyCollisionError | None:
    """Returns the error for two values that get the same flattened name; None if
    all names differ.
    """
    names, paths = KeyNames(state_dict), dict[str, Path]()
    found = names.collisions[:1]

    def visit(path: Path, _: Any) -> None:
        first = paths.setdefault(".".join(map(str, path)), path)
        if first != path:
            found.append((names.true(first), names.true(path)))

    traverse_state_dict(dict(state_dict), visit)
    return collision(*found[0], uri) if found else None


def collision(
    first: tuple[Any, ...], second: tuple[Any, ...], uri: str | None
) -> KeyCollisionError:
    """Returns the error that names two colliding values by the keys that lead to them."""
    one, other = sorted((shown(first), shown(second)))
    return KeyCollisionError(
        f"state_dict{one} and state_dict{other} would get the same name in the checkpoint, "
        "where keys are strings joined by dots: rename one of them",
        uri=uri,
        item=".".join(map(str, first)),
    )


def shown(path: tuple[Any, ...]) -> str:
    """Returns a path as indexing is written in code, such as ``['model'][0]``."""
    return "".join(f"[{element!r}]" for element in path) or "the state dict"
