"""Cases as chance draws them: what trainers save, how it changes, and at what sizes."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from .cases import ALWAYS, CHECKS, IN_PROCESS, THEN, WAYS, Case, Fault, Save, Segment
from .limits import ALIGNED, BLOCK, LARGEST, PACKED, RUN, SLAB, pickled_around
from .states import Component
from .values import (
    FORMS,
    PLACEMENTS,
    RANDOM,
    Many,
    Numbers,
    Numpy,
    Own,
    Plain,
    Random,
    Tensor,
    Text,
    Tied,
)

__all__ = ["drawn"]

_DTYPES = (
    "float32", "float32", "bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool",
    "complex64", "float8_e4m3fn", "float8_e5m2", "int16", "uint16", "uint32", "complex128",
)  # fmt: skip
_PLAIN = (
    0, 1, -1, 255, 256, 2**40, 2**70, 0.1, float("inf"), float("nan"), 1j, "", "text", "é", b"",
    b"bytes", None, True, (), (1, 2), (1, (2, "x")), [], [1, 2, 3], [[]], ["a", None], {"a": 1},
    {"a": {"b": (1,)}}, {},
)  # fmt: skip
_KEYS: tuple[Any, ...] = (
    "a",
    "b",
    "weight",
    "bias",
    "ü",
    "a b",
    "x" * 200,
    0,
    1,
    17,
    -1,
    2.5,
    -0.0,
    True,
    None,
    b"b",
)
_OVER = 700 * 1024  # bytes that fit into what a tight store takes
_MEAN_CHANGES = (0, 1, 1, 1, 2, 2, 3, 5)


def drawn(
    seed: str, *, stores: Sequence[str] = ("local",), worlds: Sequence[int] = (1, 2, 2, 3)
) -> Case:
    """The case of a seed.

    Args:
        seed: What it follows from.
        stores: Of which one is drawn.
        worlds: The numbers of ranks.
    """
    return _Drawing(random.Random(seed), stores, worlds).case()


class _Drawing:
    def __init__(self, rng: random.Random, stores: Sequence[str], worlds: Sequence[int]) -> None:
        self.rng = rng
        self._store = rng.choice(stores)
        self._worlds = worlds
        self._tight = self._store == "local" and rng.random() < 0.2
        self._large = not self._tight and rng.random() < 0.1
        self._small = rng.random() < 0.4  # one object each, until values grow
        self._background = rng.random() < 0.3  # what ranks keep for that takes time to begin
        self._incremental = rng.random() < 0.35
        self.world = 1

    def case(self) -> Case:
        rng, segments = self.rng, []
        state: dict[Any, Any] | None = None
        for _ in range(rng.choice((1, 1, 2))):
            self.world = rng.choice(self._worlds)
            state = state or self._trainer()
            way = self._way()
            saves = []
            for number in range(rng.choice((2, 3, 4, 5, 8))):
                if number:
                    for _ in range(rng.choice(_MEAN_CHANGES)):
                        self._change(state)
                if rng.random() < 0.3:
                    way = self._way()
                saves.append(self._save(_possible(state), way))
            segments.append(Segment(self.world, saves))
        return Case(segments, store=self._store, tight=self._tight)

    def _way(self) -> str:
        ways = IN_PROCESS if self._tight or not self._background else WAYS
        if self._store == "local":  # a file URI is left to torch's own writers
            ways = tuple(way for way in ways if way != "dcp.save of a URI")
        return self.rng.choice((*ways, "save", "save", "save"))

    def _save(self, state: dict[Any, Any], way: str) -> Save:
        rng = self.rng
        fault = None
        if rng.random() < 0.12:
            kinds = ("unpicklable", "disk" if self._store == "local" else "refused")
            fault = Fault(rng.choice(kinds), rng.randrange(self.world), rng.choice((0, 0, 1, 2, 3)))
        others = [kind for kind in CHECKS if kind not in ALWAYS]
        if self._tight:  # the files of conversions are not
            others.remove("convert")
        later = fault is None and rng.random() < 0.2
        is_followed = fault is None and not later and rng.random() < 0.2
        return Save(
            state,
            by=way,
            to=rng.choice("aaab"),
            overwrite=way.endswith("manager") or rng.random() > 0.05,
            fault=fault,
            checks=(*ALWAYS, *rng.sample(others, rng.choice((1, 2, 3)))),
            later=later,
            incremental=self._incremental and rng.random() < 0.85,
            then=rng.choice(THEN) if is_followed else "",
        )

    # ---- states

    def _trainer(self) -> dict[Any, Any]:
        """What most trainers have."""
        rng = self.rng
        layers = range(rng.choice((0, 1, 2, 3)))
        placed = rng.choice(("", *PLACEMENTS))
        model = {f"layers.{n}": {"w": self._tensor(placed), "b": self._tensor()} for n in layers}
        model = {name.replace(".", "_"): value for name, value in model.items()}
        optimizer = {
            "state": {n: {"step": Tensor(()), "exp_avg": self._tensor(placed)} for n in layers},
            "param_groups": [{"lr": Plain(0.1), "betas": Plain((0.9, 0.99)), "params": Plain([0])}],
        }
        state: dict[Any, Any] = {
            "model": Component(model) if rng.random() < 0.3 else model,
            "optimizer": optimizer,
            "step": Plain(1),
            "history": Numbers(10) if self._small else self._value(),
        }
        for rank in range(self.world):
            for name in rng.choice(((), ("a",), ("a", "b"))):
                leaf = rng.choice((self._tensor(""), Plain(1))) if self._small else self._leaf()
                state[f"{name}{rank}"] = Own((rank,), leaf)
        for name in rng.sample(list(state), rng.randrange(len(state))):
            if rng.random() < 0.5:
                del state[name]
        state.setdefault("step", Plain(1))
        return state

    def _leaf(self) -> Any:
        return self._tensor() if self.rng.random() < 0.5 else self._value()

    def _tensor(self, placed: str | None = None) -> Tensor:
        rng = self.rng
        dtype = rng.choice(_DTYPES)
        placed = rng.choice(("", "", "", *PLACEMENTS)) if placed is None else placed
        forms = ["", "turned", "spaced", "inside", "negated"] if placed else list(FORMS)
        form = rng.choice(("", "", "", *forms))
        frozen = self._incremental and rng.random() < 0.6
        return Tensor(self._shape(dtype), dtype, form, placed, frozen)

    def _shape(self, dtype: str) -> tuple[int, ...]:
        rng = self.rng
        itemsize = Tensor((1,), dtype).nbytes
        if rng.random() < 0.1:
            return rng.choice(((), (0,), (1,), (0, 3), (1, 1), (3, 0, 2)))
        count = max(1, self._nbytes() // itemsize)
        if rng.random() < 0.5:
            return (count,)
        rows = rng.choice((1, 2, 3, 4, 5, 7))
        if rng.random() < 0.2:
            return rows, 2, max(1, count // rows // 2)
        if rng.random() < 0.1:
            return rows, 2, max(1, count // rows // 6), 3
        return rows, max(1, count // rows)

    def _nbytes(self) -> int:
        rng = self.rng
        if self._small:
            return rng.choice((4, 12, ALIGNED, 400))
        near = rng.choice((-8, 0, 0, 8))
        if self._large and rng.random() < 0.15:
            return rng.choice((SLAB, SLAB + 64 * 1024, LARGEST, 64 * BLOCK + 100)) + near
        if self._tight and rng.random() < 0.3:
            return rng.randrange(PACKED, _OVER // 2)
        if rng.random() < 0.3:
            return rng.choice((PACKED, PACKED, 2 * PACKED, 4 * BLOCK)) + near
        return rng.choice((4, 12, ALIGNED, ALIGNED + 4, 400, 4096, 20_000))

    def _value(self) -> Any:
        rng = self.rng
        if rng.random() < 0.35:
            return Plain(rng.choice(_PLAIN))
        few, crossing = pickled_around(4096), pickled_around(PACKED)
        kind = rng.random()
        if kind < 0.5:
            return Numbers(
                rng.choice((0, 1, 10, 100, 1000, PACKED // 9 - 300, PACKED // 8, 20_000))
            )
        if kind < 0.75:
            size = rng.choice((0, 10, few, crossing)) + rng.choice((-1, 0, 0, 1))
            if rng.random() < 0.3:
                size = rng.choice((2 * PACKED, 4 * BLOCK + 1))
            return Text(max(0, size), rng.random() < 0.7)
        if kind < 0.85:
            return Numpy(
                rng.choice((None, (3,), (2, 5), (PACKED // 8,))), rng.choice(("float64", "int32"))
            )
        if kind < 0.95:
            return Random(rng.choice(list(RANDOM)))
        if kind < 0.97:
            return Tied(rng.choice((3, 100, 1000, PACKED // 4, PACKED)))
        return Many(rng.choice((RUN - 1, RUN, RUN + 1, 3)), rng.random() < 0.2)

    # ---- changes

    def _change(self, state: dict[Any, Any]) -> None:
        rng = self.rng
        entries, kind = _entries(state), rng.random()
        leaves = [one for one in entries if not isinstance(_inner(*one), (dict, list, Component))]
        container, key = rng.choice(leaves if kind < 0.6 and leaves else entries)
        value, inner = container[key], _inner(container, key)
        if kind < 0.6:  # the structure stays as it is
            self._put(container, key, value, self._grown(inner))
        elif kind < 0.68:
            self._put(container, key, value, self._leaf())
        elif kind < 0.76:
            self._add(container)
        elif kind < 0.85 and key != "step":
            if isinstance(container, dict) or len(container) > 1:
                del container[key]
        elif kind < 0.92 and isinstance(container, dict) and key != "step":
            some = rng.sample(range(self.world), rng.randrange(1, self.world + 1))
            container[key] = inner if isinstance(value, Own) else Own(tuple(sorted(some)), inner)
        elif isinstance(container, dict):
            container[key] = container.pop(key)
        if kind > 0.98:
            self._add(state)

    def _put(self, container: Any, key: Any, value: Any, inner: Any) -> None:
        container[key] = Own(value.ranks, inner) if isinstance(value, Own) else inner

    def _grown(self, value: Any) -> Any:
        """The same kind of value with another content, mostly of another size."""
        if isinstance(value, (dict, list, Component)):
            return value
        if isinstance(value, Tensor):
            if self.rng.random() < 0.5:
                return value  # another step, another content
            other = self._tensor(value.placed)
            return (
                other
                if self.rng.random() < 0.3
                else dataclasses.replace(value, shape=self._shape(value.dtype))
            )
        other = self._value()
        while isinstance(other, (Many, Tied)) or (
            isinstance(other, Random) and other.kind != "python"
        ):
            other = self._value()
        return other

    def _add(self, container: Any) -> None:
        rng = self.rng
        value: Any = self._leaf()
        kind = rng.random()
        if kind < 0.1:
            value = {}
        elif kind < 0.2:
            value = rng.choice((dict, OrderedDict))({rng.choice(_KEYS): self._leaf()})
        elif kind < 0.3:
            value = [self._leaf() for _ in range(rng.choice((0, 1, 2)))]
        if isinstance(container, list):
            container.append(value)
            return
        if rng.random() < 0.2:
            value = Own((rng.randrange(self.world),), value)
        texts = {str(key) for key in container}
        key = rng.choice(_KEYS)
        if str(key) not in texts:
            container[key] = value


def _possible(described: Any, own: bool = False) -> Any:
    """A copy in which nothing within some ranks' own is spread over ranks, or others' own."""
    if isinstance(described, Own):
        inner = _possible(described.of, True)
        return inner if own else Own(described.ranks, inner)
    if isinstance(described, Component):
        return Component(_possible(described.content, own))
    if isinstance(described, dict):
        return type(described)((key, _possible(value, own)) for key, value in described.items())
    if isinstance(described, list):
        return [_possible(value, own) for value in described]
    if isinstance(described, Tensor) and own:
        return dataclasses.replace(described, placed="")
    return described


def _inner(container: Any, key: Any) -> Any:
    value = container[key]
    return value.of if isinstance(value, Own) else value


def _entries(state: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """All entries, as a container and a key in it."""
    found: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        if isinstance(value, Own):
            value = value.of
        if isinstance(value, Component):
            value = value.content
        keys = (
            value
            if isinstance(value, dict)
            else range(len(value))
            if isinstance(value, list)
            else ()
        )
        for key in keys:
            found.append((value, key))
            walk(value[key])

    walk(state)
    return found
