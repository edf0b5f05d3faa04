"""What flattening loses of a state dict, kept so that a checkpoint can be loaded as it was saved.

torch flattens nested dicts and lists into one dict. The paths that it keeps have strings for all
dict keys, and omit empty dicts: ``optimizer.state_dict()``, whose state is keyed by integers, would
come back in a form that ``load_state_dict`` takes for an optimizer without state. A
:class:`Structure` holds the difference; it is empty for state dicts whose keys are strings and
whose dicts are not empty. It is stored in the commit object.
"""

from __future__ import annotations

import base64
import logging
import numbers
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

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

Key = int | float | complex | bytes | str | None  # bool is an int
"""A dict key that can be restored."""

_DEEPEST = 1000  # torch flattens by recursion: Python's limit
_HOLES = 1 << 20  # list entries without stored data, such as empty dicts
_told: set[tuple[Path, str]] = set()  # what this process has logged already


@dataclass(frozen=True)
class Structure:
    """The difference between a state dict and what torch's paths express.

    Attributes:
        keys: By the path of a dict and the string in torch's paths: the key that it stands for.
        empty: The paths of empty dicts, with the position of each path element among its siblings.
    """

    keys: Mapping[Path, Mapping[str, Key]] = field(default_factory=dict)
    empty: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.keys or self.empty)

    @classmethod
    def of(cls, state_dict: Mapping[Any, Any], uri: str | None = None) -> Structure:
        """What flattening would lose.

        What can't be restored is logged once, by the logger ``cloudckpt``: it loads only into a
        state dict that already contains it.

        Raises:
            KeyCollisionError: If two keys of one dict have the same string.
        """
        names = KeyNames(state_dict)
        if names.collisions:
            path, first, second = names.collisions[0]
            raise collision((*path, first), (*path, second), uri)
        keys: dict[Path, dict[str, Key]] = {}
        for path, of_dict in names.keys.items():
            for element, key in of_dict.items():
                try:
                    plain = _plain(key)
                except ValueError:
                    _tell(path, f"the key {key!r} ({type(key).__name__})", uri)
                    continue
                if plain != element:
                    keys.setdefault(path, {})[element] = plain
        for path, kind in names.unequal.items():
            _tell(path, f"a dict of the class {kind.__name__}", uri)
        return cls(keys, names.empty)

    @classmethod
    def merged(cls, parts: Sequence[Structure], uri: str) -> Structure:
        """Merges the ranks' structures; on a contradiction the first counts, as in torch."""
        if all(part == parts[0] for part in parts):  # as in most jobs
            return parts[0] if parts else cls()
        keys: dict[Path, dict[str, Key]] = {}
        empty: dict[Path, tuple[int, ...]] = {}
        for part in parts:
            for path, of_dict in part.keys.items():
                known = keys.setdefault(path, {})
                for element, key in of_dict.items():
                    first = known.setdefault(element, key)
                    if first != key:
                        logger.warning(
                            "%s: ranks have different keys in %s, %r and %r: when it is loaded "
                            "without a state dict, the first will be there",
                            uri, shown(path), first, key,
                        )  # fmt: skip
            for path, places in part.empty.items():
                empty.setdefault(path, places)
        return cls(keys, empty)

    def to_json(self) -> dict[str, Any]:
        """Its JSON form for the commit object."""
        keys = [
            [path, [[element, _encoded(key)] for element, key in of_dict.items()]]
            for path, of_dict in self.keys.items()
        ]
        return {"keys": keys, "empty": [[path, places] for path, places in self.empty.items()]}

    @classmethod
    def from_json(cls, document: Any) -> Structure:
        """Reads what :meth:`to_json` has made.

        Raises:
            ValueError: If it is anything else.
        """
        if not isinstance(document, dict) or document.keys() != {"keys", "empty"}:
            raise ValueError("a structure has keys and empty dicts")
        keys: dict[Path, dict[str, Key]] = {}
        for row in _rows(document["keys"]):
            of_dict = keys.setdefault(_path(row[0]), {})
            for element, key in _rows(row[1]):
                if not isinstance(element, str) or element in of_dict:
                    raise ValueError("the name of a key is no string, or there twice")
                of_dict[element] = _decoded(key)
        empty: dict[Path, tuple[int, ...]] = {}
        for path, places in ((_path(row[0]), row[1]) for row in _rows(document["empty"])):
            if not isinstance(places, list) or len(places) != len(path) or not path:
                raise ValueError("an empty dict has a place for each element of its path")
            if not all(type(place) is int and place >= 0 for place in places):
                raise ValueError("a place is no number, or negative")
            empty[path] = tuple(places)
        return cls(keys, empty)

    def nested(
        self, values: Mapping[str, Any], paths: Mapping[str, Any], uri: str
    ) -> dict[Any, Any]:
        """The state dict that was flattened.

        Args:
            values: What was loaded, by torch's flat names.
            paths: Where each value stood; values without a path go into the top-level dict.
            uri: The checkpoint, for messages.

        Raises:
            CheckpointCorruptError: If the paths contradict each other.
        """
        try:
            if not isinstance(paths, Mapping):
                raise ValueError("the paths are no dict")
            if not paths and not self:
                return dict(values)
            tree = _Tree()
            for name, value in values.items():
                tree.add(_path(paths.get(name, (name,))), value)
            order = sorted(self.empty, key=lambda path: (len(path), self.empty[path]))
            for path in order:
                tree.add_empty(path, self.empty[path])
            return tree.built(self.keys)
        except ValueError as exc:
            raise CheckpointCorruptError(
                "where its values stood can't be understood; load it into a state dict",
                uri=uri,
                cause=exc,
            ) from exc


class _Tree:
    """Nested containers, built without recursion: paths come from the store."""

    def __init__(self) -> None:
        # by path, inner containers after outer ones
        self._containers: dict[Path, dict[str | int, Any]] = {(): {}}
        self._late: dict[Path, dict[str | int, int]] = {}
        """By container, its entries that hold nothing, and their positions."""

    def add(self, path: Path, value: Any) -> None:
        """Adds a value that was stored."""
        if not path:
            raise ValueError("a value has an empty path")
        container = self._container(path[:-1])
        if container is None:
            raise ValueError(f"{shown(path)} lies in what is no container")
        if path[-1] in container:
            raise ValueError(f"{shown(path)} is there twice")
        container[path[-1]] = value

    def add_empty(self, path: Path, places: tuple[int, ...]) -> None:
        """Adds an empty dict, unless another rank had something else there."""
        self._container(path, places)

    def _container(self, path: Path, places: tuple[int, ...] = ()) -> dict[str | int, Any] | None:
        """The container at a path, created if missing; None if a value is in the way."""
        container = self._containers[()]
        for depth, element in enumerate(path):
            inner = self._containers.get(path[: depth + 1])
            if inner is None:
                if element in container:
                    return None
                inner = container[element] = self._containers[path[: depth + 1]] = {}
                if places:
                    self._late.setdefault(path[:depth], {})[element] = places[depth]
            container = inner
        return container

    def built(self, keys: Mapping[Path, Mapping[str, Key]]) -> dict[Any, Any]:
        """The whole tree, with the original keys instead of their strings."""
        holes = _HOLES
        made: Any = None
        for path, container in reversed(self._containers.items()):
            if any(isinstance(name, int) for name in container):
                if not all(isinstance(name, int) for name in container):
                    raise ValueError(f"{shown(path)} is a list and a dict")
                length = max(container) + 1  # type: ignore[operator]
                holes -= length - len(container)
                if holes < 0:
                    raise ValueError(f"{shown(path)} has too few entries for its length")
                made = [container.get(index) for index in range(length)]
            else:
                names = keys.get(path, {})
                made = {names.get(name, name): container[name] for name in self._ordered(path)}
                if len(made) != len(container):
                    raise ValueError(f"{shown(path)} has a key twice")
            if path:
                self._containers[path[:-1]][path[-1]] = made
        if not isinstance(made, dict):
            raise ValueError("it is a list")
        return made

    def _ordered(self, path: Path) -> Iterator[Any]:
        """The elements of a container in the order of the dict that was saved."""
        late, count = self._late.get(path, {}), 0
        waiting = sorted(late.items(), key=lambda item: item[1], reverse=True)
        for element in self._containers[path]:
            if element in late:
                continue
            while waiting and waiting[-1][1] <= count:
                yield waiting.pop()[0]
                count += 1
            yield element
            count += 1
        yield from (element for element, _ in reversed(waiting))


def _tell(path: Path, what: str, uri: str | None) -> None:
    if (path, what) not in _told:
        _told.add((path, what))
        where = f"in state_dict{shown(path)}" if path else "in the state dict"
        logger.warning(
            "%s: %s %s can't be restored when the checkpoint is loaded without a state dict; into "
            "a state dict that has it, it can", uri, what, where,
        )  # fmt: skip


def _plain(key: Any) -> Key:
    """A key of a plain type that is equal to ``key`` and can replace it in lookups.

    Raises:
        ValueError: If there is none.
    """
    if key is None or type(key) in (bool, int, bytes):
        return key  # type: ignore[no-any-return]
    for kind in (str, bool, int, float, complex, bytes):
        if isinstance(key, numbers.Integral if kind is int else kind):
            plain: Key = str.__str__(key) if kind is str else kind(key)  # type: ignore[arg-type]
            if plain == key and hash(plain) == hash(key):
                return plain
            break
    raise ValueError(f"{type(key).__name__} is no plain type")


def _encoded(key: Key) -> Any:
    if isinstance(key, (float, complex)):
        return [type(key).__name__, repr(key)]
    return ["bytes", base64.b64encode(key).decode("ascii")] if isinstance(key, bytes) else key


def _decoded(value: Any) -> Key:
    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[no-any-return]
    kind, text = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if not isinstance(text, str):
        raise ValueError("a key is of no known type")
    if kind == "bytes":
        return base64.b64decode(text, validate=True)
    if kind == "float":
        return float(text)
    if kind == "complex":
        return complex(text)
    raise ValueError("a key is of no known type")


def _rows(value: Any) -> list[list[Any]]:
    if not isinstance(value, list):
        raise ValueError("rows are no list")
    if not all(isinstance(row, list) and len(row) == 2 for row in value):
        raise ValueError("a row is no pair")
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, (list, tuple)) or len(value) > _DEEPEST:
        raise ValueError("a path is no list, or too long")
    if not all(
        type(element) is str or (type(element) is int and element >= 0) for element in value
    ):
        raise ValueError("an element of a path is neither a string nor an index")
    return tuple(value)


Path = tuple["str | int", ...]
"""The path of a value as torch writes it: strings for dict keys, integers for list indices."""

_TENSOR, _MAPPING, _LIST, _OTHER = range(4)
_AS_DICTS = (dict, OrderedDict, Counter, Mapping, MappingProxyType)
_WALKED = (Mapping, list, tuple)
_EQUALITY = {kind.__eq__ for kind in _AS_DICTS}


class KeyNames:
    """Walks a state dict alongside torch: the keys that the strings in torch's paths stand for.

    Attributes:
        keys: By the path of a dict and the string in torch's paths: the keys that are no plain
            strings.
        empty: The paths of the empty dicts, with the place of each of the path's elements among
            those beside it.
        unequal: Dicts of classes that may be unequal to a dict with the same content.
        collisions: Pairs of keys of one dict that have the same string.
    """

    def __init__(self, state_dict: Mapping[Any, Any]) -> None:
        self.keys: dict[Path, dict[str, Any]] = {}
        self.empty: dict[Path, tuple[int, ...]] = {}
        self.unequal: dict[Path, type] = {}
        self.collisions: list[tuple[Path, Any, Any]] = []
        self._kinds: dict[type, int] = {}
        self._waiting: list[tuple[Path, tuple[int, ...], Any]] = [((), (), state_dict)]
        while self._waiting:
            path, places, value = self._waiting.pop()
            if isinstance(value, Mapping):
                self._mapping(path, places, value)
            else:
                for index, entry in enumerate(value):
                    if self.is_walked(entry):
                        self._waiting.append(((*path, index), (*places, index), entry))

    def name(self, path: Path, element: str | int) -> Any:
        """The key or index that a path element stands for."""
        if isinstance(element, int) or path not in self.keys:
            return element
        return self.keys[path].get(element, element)

    def _mapping(self, path: Path, places: tuple[int, ...], value: Mapping[Any, Any]) -> None:
        kinds = self._kinds
        for place, (key, entry) in enumerate(value.items()):
            plain = type(key) is str
            if plain and kinds.get(type(entry), _MAPPING) in (_TENSOR, _OTHER):
                continue
            element = key if plain else str(key)
            if not plain:
                names = self.keys.setdefault(path, {})
                if element in names or (element in value and key != element):
                    self.collisions.append((path, key, names.get(element, element)))
                names[element] = key
            if self.is_walked(entry):
                self._waiting.append(((*path, element), (*places, place), entry))
        if path and not value:
            self.empty[path] = places
        if type(value).__eq__ not in _EQUALITY:
            self.unequal[path] = type(value)

    def _kind(self, value: Any) -> int:
        kind = self._kinds.get(type(value))
        if kind is None:
            if isinstance(value, Mapping):
                kind = _MAPPING
            elif isinstance(value, list):
                kind = _LIST
            else:
                kind = _TENSOR if isinstance(value, torch.Tensor) else _OTHER
            self._kinds[type(value)] = kind
        return kind

    def is_walked(self, value: Any) -> bool:
        """Whether torch descends into it: not into tuples, nor lists without tensors and dicts."""
        kind = self._kind(value)
        if kind != _LIST:
            return kind == _MAPPING
        lists = [value]
        while lists:
            entries = lists.pop()
            of_kinds = {type(entry): entry for entry in entries}
            kinds = {self._kind(entry) for entry in of_kinds.values()}
            if _TENSOR in kinds or _MAPPING in kinds:
                return True
            if _LIST in kinds:
                lists.extend(entry for entry in entries if isinstance(entry, list))
        return False


def containers(state_dict: Mapping[Any, Any]) -> list[Any]:
    """The mappings, lists and tuples of a state dict, at any depth, each once, inner ones first.

    Raises:
        UnsupportedValueError: If one contains itself: no walk over it, torch's neither, would end.
    """
    found: dict[int, Any] = {}  # by id, with the value: a later one might get its id otherwise
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
                f"{where} contains itself, or is nested too deeply to be walked through: leave it "
                "out of the state dict, or keep it in an object of a class, which is pickled",
                item=".".join(map(str, path[:8])),
            )
        elif id(entry) not in found:
            around[id(entry)] = key, entry, _inner(entry)
    return list(found.values())


def _inner(container: Any) -> Iterator[tuple[Any, Any]]:
    """The containers in a container, with their keys."""
    if isinstance(container, Mapping):
        kinds = {kind for kind in set(map(type, container.values())) if issubclass(kind, _WALKED)}
        entries: Iterable[tuple[Any, Any]] = container.items()
    else:
        kinds = {kind for kind in set(map(type, container)) if issubclass(kind, _WALKED)}
        entries = enumerate(container)
    return ((key, entry) for key, entry in entries if type(entry) in kinds) if kinds else iter(())


def find_collision(state_dict: Mapping[Any, Any], uri: str | None) -> KeyCollisionError | None:
    """Finds two values that have the same name once torch has flattened a state dict."""
    found: dict[str, tuple[Any, ...]] = {}
    names = KeyNames(state_dict)
    waiting: list[tuple[tuple[Any, ...], str, Any]] = [
        ((key,), str(key), value) for key, value in state_dict.items()
    ]
    while waiting:
        path, name, value = waiting.pop()
        if names.is_walked(value):
            entries = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting.extend(((*path, key), f"{name}.{key}", entry) for key, entry in entries)
        elif name in found:
            return collision(found[name], path, uri)
        else:
            found[name] = path
    return None


def collision(
    first: tuple[Any, ...], second: tuple[Any, ...], uri: str | None
) -> KeyCollisionError:
    """The error that names two values by the keys that lead to them."""
    one, other = sorted((shown(first), shown(second)))
    return KeyCollisionError(
        f"state_dict{one} and state_dict{other} would have the same name in the checkpoint, where "
        "keys are strings joined by dots: rename one of them",
        uri=uri,
        item=".".join(map(str, first)),
    )


def shown(path: tuple[Any, ...]) -> str:
    """A path as it is written in code."""
    return "".join(f"[{element!r}]" for element in path) or "the state dict"
