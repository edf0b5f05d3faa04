"""What stands behind the strings in the names and paths that torch gives to values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from cloudckpt.errors import KeyCollisionError

__all__ = ["KeyNames", "Path", "collision", "find_collision", "shown"]

Path = tuple["str | int", ...]
"""Where a value stands, as torch writes it: strings for keys of dicts, integers for lists."""

_TENSOR, _MAPPING, _LIST, _OTHER = range(4)
_AS_DICTS = (dict, OrderedDict, Counter, Mapping, MappingProxyType)
_EQUALITY = {kind.__eq__ for kind in _AS_DICTS}


class KeyNames:
    """One walk through a state dict, beside torch's: what stands behind the strings of its paths.

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
        """The key, or the index, behind an element of a path."""
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
        """Whether torch looks into it: not into tuples, nor lists without tensors and dicts."""
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


def find_collision(state_dict: Mapping[Any, Any], uri: str | None) -> KeyCollisionError | None:
    """Which two values have the same name once torch has flattened a state dict."""
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
