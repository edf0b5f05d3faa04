"""Cases that are a little smaller than one: shorter first, then simpler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from .cases import Case, Save, Segment
from .states import Component
from .values import Many, Numbers, Own, Plain, Tensor, Text, Tied

__all__ = ["smaller"]

Path = tuple[Any, ...]
_Change = Callable[[Any], Any]


class _Gone:
    """In the place of an entry that is left out."""


def smaller(case: Case) -> Iterator[Case]:
    """Each is well-formed, and none has more in it than the case."""
    yield from _shorter(case)
    if case.tight:
        yield dataclasses.replace(case, tight=False)
    if case.store != "local":
        yield dataclasses.replace(case, store="local")
    yield from _plainer_saves(case)
    yield from _fewer_keys(case)
    for path in _paths(case):
        yield from _changed_at(case, path, lambda value: _Gone)
    yield from _fewer_ranks(case)
    for path in _paths(case):
        for change in _simplifications(case, path):
            yield from _changed_at(case, path, change)


def _shorter(case: Case) -> Iterator[Case]:
    saves = [
        (number, at) for number, each in enumerate(case.segments) for at in range(len(each.saves))
    ]
    length = len(saves)
    while length:
        for first in range(0, len(saves), length):
            gone = set(saves[first : first + length])
            if len(gone) == len(saves):
                continue
            segments = [
                dataclasses.replace(
                    each,
                    saves=[save for at, save in enumerate(each.saves) if (number, at) not in gone],
                )
                for number, each in enumerate(case.segments)
            ]
            yield dataclasses.replace(case, segments=[each for each in segments if each.saves])
        length //= 2
    for number in range(1, len(case.segments)):
        one, other = case.segments[number - 1 : number + 1]
        joined = Segment(max(one.world, other.world), one.saves + other.saves)
        rest = case.segments[: number - 1], case.segments[number + 1 :]
        yield dataclasses.replace(case, segments=[*rest[0], joined, *rest[1]])


def _fewer_keys(case: Case) -> Iterator[Case]:
    """Without some of the entries at the top, in all saves: halves, quarters, and so on."""
    keys = list(dict.fromkeys(key for save in case.saves for key in save.state))
    length = len(keys) // 2
    while length > 1:
        for first in range(0, len(keys), length):
            gone = keys[first : first + length]
            yield _with_saves(
                case,
                lambda save, gone=gone: dataclasses.replace(
                    save, state={k: v for k, v in save.state.items() if k not in gone}
                ),
            )
        length //= 2


def _plainer_saves(case: Case) -> Iterator[Case]:
    """All saves at once, then each."""
    for change in (
        {"by": "save"},
        {"fault": None},
        {"later": False},
        {"then": ""},
        {"incremental": False},
        {"overwrite": True},
        {"to": "a"},
    ):
        yield from _of_saves(case, change)
    for kind in dict.fromkeys(kind for save in case.saves for kind in save.checks):
        yield from _of_saves(case, {"checks": (kind,)})


def _of_saves(case: Case, change: dict[str, Any]) -> Iterator[Case]:
    def changed(save: Save) -> Save:
        return dataclasses.replace(save, **change)

    if all(changed(save) == save for save in case.saves):
        return
    yield _with_saves(case, changed)
    for one in case.saves:
        if changed(one) != one:
            yield _with_saves(case, lambda save, one=one: changed(save) if save is one else save)


def _with_saves(case: Case, change: Callable[[Save], Save]) -> Case:
    segments = [
        dataclasses.replace(each, saves=[change(save) for save in each.saves])
        for each in case.segments
    ]
    return dataclasses.replace(case, segments=segments)


def _fewer_ranks(case: Case) -> Iterator[Case]:
    for world in range(1, max(each.world for each in case.segments)):
        yield dataclasses.replace(
            case,
            segments=[
                dataclasses.replace(each, world=min(each.world, world)) for each in case.segments
            ],
        )


def _paths(case: Case) -> list[Path]:
    """Of all entries of all states, outer ones first."""
    found: dict[Path, None] = {}

    def walk(value: Any, path: Path) -> None:
        if path:
            found[path] = None
        value = _inside(value)
        entries = value.items() if isinstance(value, dict) else ()
        if isinstance(value, list):
            entries = list(enumerate(value))
        for key, inner in entries:
            walk(inner, (*path, key))

    for save in case.saves:
        walk(save.state, ())
    return sorted(found, key=len)


def _inside(value: Any) -> Any:
    if isinstance(value, Own):
        return _inside(value.of)
    return value.content if isinstance(value, Component) else value


def _changed_at(case: Case, path: Path, change: _Change) -> Iterator[Case]:
    """The entry is another: in all states, then in each."""
    changed = _with_saves(case, lambda save: _in_save(save, path, change))
    if changed == case:
        return
    yield changed
    if len(case.saves) > 1:
        for one in case.saves:
            if _in_save(one, path, change) != one:
                yield _with_saves(
                    case,
                    lambda save, one=one: _in_save(save, path, change) if save is one else save,
                )


def _in_save(save: Save, path: Path, change: _Change) -> Save:
    return dataclasses.replace(save, state=_at(save.state, path, change))


def _at(value: Any, path: Path, change: _Change) -> Any:
    if isinstance(value, Own) and path:
        return dataclasses.replace(value, of=_at(value.of, path, change))
    if isinstance(value, Component) and path:
        return Component(_at(value.content, path, change))
    if not path:
        return change(value)
    if isinstance(value, dict) and path[0] in value:
        inner = _at(value[path[0]], path[1:], change)
        rest = {**value, path[0]: inner}
        return {key: entry for key, entry in rest.items() if entry is not _Gone}
    if isinstance(value, list) and type(path[0]) is int and path[0] < len(value):
        inner = _at(value[path[0]], path[1:], change)
        changed = [*value[: path[0]], inner, *value[path[0] + 1 :]]
        return [entry for entry in changed if entry is not _Gone]
    return value


def _simplifications(case: Case, path: Path) -> Iterator[_Change]:
    """What may stand in the place of an entry."""
    yield lambda value: value.of if isinstance(value, Own) else value
    yield lambda value: value.content if isinstance(value, Component) else value
    yield _hoisted
    yield _of_leaf(lambda leaf: Plain(0))
    yield _of_leaf(lambda leaf: Tensor((4,)))
    for fields in ({"placed": ""}, {"form": ""}, {"dtype": "float32"}, {"shape": (4,)}):
        yield _of_leaf(
            lambda leaf, fields=fields: (
                dataclasses.replace(leaf, **fields) if isinstance(leaf, Tensor) else leaf
            )
        )
    for kind in (Numbers, Text, Many, Tied):
        for count in (lambda n: min(n, 1), lambda n: n // 2, lambda n: _rounded(n)):
            yield _of_leaf(
                lambda leaf, kind=kind, count=count: (
                    dataclasses.replace(leaf, count=count(leaf.count))
                    if isinstance(leaf, kind)
                    else leaf
                )
            )


def _hoisted(value: Any) -> Any:
    """What is in a container, in its place."""
    inner = _inside(value)
    entries = list(inner.values()) if isinstance(inner, dict) else inner
    if not isinstance(entries, list) or not entries:
        return value
    first = entries[0]
    return dataclasses.replace(value, of=first) if isinstance(value, Own) else first


def _rounded(count: int) -> int:
    """Down to one digit and zeros."""
    power = 10 ** (len(str(count)) - 1)
    return count // power * power


def _of_leaf(change: _Change) -> _Change:
    """Of what is no container; what a rank has alone stays its own."""

    def changed(value: Any) -> Any:
        if isinstance(value, Own):
            return dataclasses.replace(value, of=changed(value.of))
        if isinstance(value, (dict, list, Component)):
            return value
        if isinstance(value, Plain) and value == Plain(0):
            return value
        return change(value)

    return changed
