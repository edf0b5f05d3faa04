"""Cases as hypothesis draws them: what trainers save, how it changes, and at what sizes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from .cases import ALWAYS, CHECKS, IN_PROCESS, THEN, WAYS, WAYS_OF_TORCH, Case, Fault, Save, Segment
from .limits import ALIGNED, BLOCK, LARGEST, PACKED, RUN, SLAB, pickled_around
from .states import Component, names, rebuilt
from .values import FORMS, PLACEMENTS, RANDOM, Each, Many, Own, Plain, Tensor, Tied, Value, numbers

__all__ = ["cases"]

_DTYPES = (
    "float32", "float32", "bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool",
    "complex64", "float8_e4m3fn", "float8_e5m2", "int16", "uint16", "uint32", "complex128",
)  # fmt: skip
_PLAIN = (
    0, 1, -1, 255, 256, 2**40, 2**70, 0.1, float("inf"), float("nan"), 1j, "", "text", "é", b"",
    b"bytes", None, True, (), (1, 2), (1, (2, "x")), [], [1, 2, 3], [[]], ["a", None], {"a": 1},
    {"a": {"b": (1,)}}, {},
)  # fmt: skip
_KEYS = (
    "a", "b", "weight", "bias", "ü", "a b", "x" * 200, 0, 1, 17, -1, 2.5, -0.0, True, None,
)  # fmt: skip
_OVER = 700 * 1024  # bytes that fit into what a tight store takes


@st.composite
def cases(
    draw: Callable[..., Any],
    *,
    stores: Sequence[str] = ("local",),
    worlds: Sequence[int] = (1, 2, 2, 3),
) -> Case:
    """Cases; what is drawn first is the simplest, which is what they are shrunk to.

    Args:
        stores: Of which one is drawn.
        worlds: The numbers of ranks.
    """
    return _Drawing(draw, stores, worlds).case()


class _Drawing:
    def __init__(
        self, draw: Callable[..., Any], stores: Sequence[str], worlds: Sequence[int]
    ) -> None:
        self._draw = draw
        self._store = self._one(stores)
        self._worlds = worlds
        self._tight = self._store == "local" and self._chance(20)
        self._large = not self._tight and self._chance(10)
        self._small = not self._chance(60)  # one object each, until values grow
        self._background = self._chance(30)  # what ranks keep for that takes time to begin
        self._incremental = self._chance(35)
        self._by_torch = self._chance(20)  # only what torch takes, and some saves by it
        self.world = 1

    def _one(self, options: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(list(options)))

    def _chance(self, percent: int) -> bool:
        """Whether something holds; it is shrunk to False."""
        return bool(self._draw(st.integers(0, 99)) >= 100 - percent)

    def case(self) -> Case:
        segments: list[Segment] = []
        state: dict[Any, Any] | None = None
        for _ in range(self._one((1, 1, 2))):
            self.world = self._one(self._worlds)
            state = self._trainer() if state is None else state
            way, saves = self._way(), list[Save]()
            for number in range(self._one((2, 3, 4, 5, 8))):
                if number:
                    for _ in range(self._one((0, 1, 1, 1, 2, 2, 3, 5))):
                        self._change(state)
                if self._chance(30):
                    way = self._way()
                saves.append(self._save(_possible(state), way))
            segments.append(Segment(self.world, saves))
        return Case(segments, store=self._store, tight=self._tight)

    def _way(self) -> str:
        ways = IN_PROCESS if self._tight or not self._background else WAYS
        if not self._by_torch:
            ways = tuple(way for way in ways if way not in WAYS_OF_TORCH)
        elif self._store == "local":  # a file URI is left to torch's own writers
            ways = tuple(way for way in ways if way != "dcp.save of a URI")
        return self._one(("save", "save", "save", *ways))

    def _save(self, state: dict[Any, Any], way: str) -> Save:
        fault = None
        if self._chance(12):
            kinds = ("unpicklable", *["disk"] * (self._store == "local"))
            fault = Fault(
                self._one(kinds), self._one(range(self.world)), self._one((0, 0, 1, 2, 3))
            )
        elif self._chance(12):
            fault = Fault("unlike", names=self._some_names(state))
        others = [kind for kind in CHECKS if kind not in ALWAYS]
        some = st.lists(st.sampled_from(others), min_size=1, max_size=3, unique=True)
        later = fault is None and self._chance(20)
        is_followed = fault is None and not later and self._chance(20)
        return Save(
            state,
            by=way,
            to=self._one("aaab"),
            overwrite=way.endswith("manager") or not self._chance(5),
            fault=fault,
            checks=(*ALWAYS, *self._draw(some)),
            later=later,
            incremental=self._incremental and self._chance(85),
            then=self._one(THEN) if is_followed else "",
        )

    def _some_names(self, state: dict[Any, Any]) -> tuple[str, ...]:
        some = st.lists(st.sampled_from(names(state)), min_size=1, max_size=4, unique=True)
        return tuple(self._draw(some))

    # ---- states

    def _trainer(self) -> dict[Any, Any]:
        """What most trainers have."""
        layers = range(self._one((0, 1, 2, 3)))
        placed = self._one(("", *PLACEMENTS))
        model = {f"layers_{n}": {"w": self._tensor(placed), "b": self._tensor()} for n in layers}
        state: dict[Any, Any] = {
            "model": Component(model) if self._chance(30) else model,
            "optimizer": {
                "state": {n: {"step": Tensor(()), "exp_avg": self._tensor(placed)} for n in layers},
                "param_groups": [
                    {"lr": Plain(0.1), "betas": Plain((0.9, 0.99)), "params": Plain([0])}
                ],
            },
            "step": Plain(1),
            "history": numbers(10) if self._small else self._value(),
        }
        for rank in range(self.world):
            for name in self._one(((), ("a",), ("a", "b"))):
                leaf = self._one((Plain(1), self._tensor(""))) if self._small else self._leaf()
                state[f"{name}{rank}"] = Own((rank,), leaf)
        if not self._by_torch:
            state["random"] = Each(Value(self._one(RANDOM)))
            state["app"] = {"loader": Each({"pos": self._leaf(), 1: [self._leaf()]})}
        return {key: value for key, value in state.items() if key == "step" or self._chance(75)}

    def _leaf(self) -> Any:
        return self._tensor() if self._chance(50) else self._value()

    def _tensor(self, placed: str | None = None) -> Tensor:
        dtype = self._one(_DTYPES)
        placed = self._one(("", "", "", *PLACEMENTS)) if placed is None else placed
        forms = ["", "turned", "spaced", "inside", "negated"] if placed else list(FORMS)
        form = self._one(("", "", "", *forms))
        frozen = self._incremental and self._chance(60)
        return Tensor(self._shape(dtype), dtype, form, placed, frozen)

    def _shape(self, dtype: str) -> tuple[int, ...]:
        if self._chance(10):
            return self._one(((), (0,), (1,), (0, 3), (1, 1), (3, 0, 2)))
        count = max(1, self._nbytes() // Tensor((1,), dtype).nbytes)
        rows, inner = self._one((1, 2, 3, 4, 5, 7)), self._one(((), (), (), (2,), (2, 3)))
        if not self._chance(50):
            return (count,)
        return (rows, *inner, max(1, count // rows // (2 * len(inner) or 1)))

    def _nbytes(self) -> int:
        if self._small:
            return self._one((4, 12, ALIGNED, 400))
        near = self._one((0, 0, -8, 8))
        if self._large and self._chance(15):
            return self._one((SLAB, SLAB + 64 * 1024, LARGEST, 64 * BLOCK + 100)) + near
        if self._tight and self._chance(30):
            return self._draw(st.integers(PACKED, _OVER // 2))
        if self._chance(30):
            return self._one((PACKED, PACKED, 2 * PACKED, 4 * BLOCK)) + near
        return self._one((4, 12, ALIGNED, ALIGNED + 4, 400, 4096, 20_000))

    def _value(self, *, grows: bool = False) -> Any:
        """A value; ``grows``: of a kind that changes from save to save."""
        few, crossing = pickled_around(4096), pickled_around(PACKED)
        kinds = ["plain"] * 7 + ["numbers"] * 7 + ["text"] * 3 + ["numpy"] * 2
        kind = self._one(kinds if grows else [*kinds, "random", "tied", "many"])
        if kind == "plain":
            return Plain(self._one(_PLAIN))
        if kind == "numbers":
            sizes = (0, 1, 10, 100, 1000, PACKED // 9 - 300, PACKED // 8, 20_000)
            return numbers(self._one(sizes))
        if kind == "text":
            size = self._one((0, 10, few, crossing, 2 * PACKED, 4 * BLOCK + 1))
            count = max(0, size + self._one((0, 0, 1, -1)))
            return Value("bytes" if self._chance(70) else "text", count)
        if kind == "numpy":
            kinds = (("scalar", 0), ("array", 3), ("matrix", 5), ("array", PACKED // 8))
            return Value(*self._one(kinds))
        if kind == "random":
            return Value(self._one(RANDOM))
        if kind == "tied":
            return Tied(self._one((3, 100, 1000, PACKED // 4, PACKED)))
        return Many(self._one((3, RUN - 1, RUN, RUN + 1)), self._chance(20))

    # ---- changes

    def _change(self, state: dict[Any, Any]) -> None:
        entries = _entries(state)
        leaves = [one for one in entries if not isinstance(_inner(*one), (dict, list, Component))]
        kind = self._one(
            ["grow"] * 12 + ["replace"] * 2 + ["add"] * 2 + ["remove"] * 2 + ["own", "move"]
        )
        container, key = self._one(leaves if kind == "grow" and leaves else entries)
        value, inner = container[key], _inner(container, key)
        is_dict = isinstance(container, dict)
        if kind == "grow":  # the structure stays as it is
            self._put(container, key, value, self._grown(inner))
        elif kind == "replace":
            self._put(container, key, value, self._leaf())
        elif kind == "add":
            self._add(self._one((container, state)))
        elif kind == "move" and is_dict:
            container[key] = container.pop(key)
        elif kind == "remove" and key != "step" and (is_dict or len(container) > 1):
            del container[key]
        elif kind == "own" and key != "step" and is_dict:
            some = self._draw(st.sets(st.integers(0, self.world - 1), min_size=1))
            container[key] = inner if isinstance(value, Own) else Own(tuple(sorted(some)), inner)

    def _put(self, container: Any, key: Any, value: Any, inner: Any) -> None:
        is_wrapped = isinstance(value, (Own, Each))
        container[key] = dataclasses.replace(value, of=inner) if is_wrapped else inner

    def _grown(self, value: Any) -> Any:
        """The same kind of value with another content, mostly of another size."""
        if isinstance(value, (dict, list, Component)):
            return value
        if isinstance(value, Each):
            return Each(self._grown(value.of))
        if not isinstance(value, Tensor):
            return self._value(grows=True)
        kind = self._one(("same", "same", "same", "shape", "shape", "other"))
        if kind == "other":
            return self._tensor(value.placed)
        if kind == "shape":
            return dataclasses.replace(value, shape=self._shape(value.dtype))
        return value  # another step, another content

    def _add(self, container: Any) -> None:
        more = [] if self._by_torch else ["each", "each", "component"]
        kind = self._one(["leaf"] * 7 + ["empty", "dict", "list", *more])
        value: Any = {}
        if kind == "leaf":
            value = self._leaf()
        elif kind == "dict":
            value = self._one((dict, OrderedDict))({self._one(_KEYS): self._leaf()})
        elif kind == "list":
            value = [self._leaf() for _ in range(self._one((0, 1, 2)))]
        elif kind == "component":
            value = Component({self._one(_KEYS): self._leaf(), "n": Each(self._leaf())})
        elif kind == "each":
            entry = self._leaf()
            value = Each(self._one((entry, {"a": entry}, [entry], Component({"a": Each(entry)}))))
        if isinstance(container, list):
            container.append(value)
            return
        if self._chance(20):
            value = Own((self._one(range(self.world)),), value)
        key = self._one(_KEYS)
        if str(key) not in {str(known) for known in container}:
            container[key] = value


def _possible(state: dict[Any, Any]) -> Any:
    """A copy in which nothing of some ranks, or of each, is spread over ranks, or others' own."""

    def whole(value: Any, own: bool) -> Any:
        is_spread = own and isinstance(value, Tensor)
        return dataclasses.replace(value, placed="") if is_spread else value

    return rebuilt(state, whole)


def _inner(container: Any, key: Any) -> Any:
    value = container[key]
    return value.of if isinstance(value, (Own, Each)) else value


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """All entries, as a container and a key in it."""
    while isinstance(value, (Own, Each, Component)):
        value = value.content if isinstance(value, Component) else value.of
    if not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [(value, key) for key in keys] + [one for key in keys for one in _entries(value[key])]
