"""The tensors of a staged copy: bit by bit, of all kinds, sharing memory as they did."""

import collections
import copy
import pickle
import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from cloudckpt.background import stager as stagers
from cloudckpt.background.stager import Layout
from cloudckpt.checkpointer import Stager
from cloudckpt.config import MIB
from cloudckpt.errors import StagingError
from cloudckpt.transfer.boxes import ALIGNMENT
from dcp.test_tensor_kinds import DTYPES
from dcp.values import assert_same, numbered

# ---- kinds of tensors


def test_parameters_stay_parameters_also_within_objects_that_hold_them(stager):
    module = torch.nn.Linear(3, 5)
    module.register_buffer("seen", torch.arange(4))
    module.bias.requires_grad_(False)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    staged = stager.stage({**state, "pair": (module.weight, module.bias), "module": module})
    copied = staged.pop("module")
    assert staged.pop("pair") == (staged["weight"], staged["bias"])
    assert dict(copied.named_parameters()).keys() == {"weight", "bias"}
    for name in ("weight", "bias"):
        assert type(staged[name]) is torch.nn.Parameter
        assert getattr(copied, name) is staged[name]
        assert staged[name].requires_grad == state[name].requires_grad
    assert_same(staged, state)


@pytest.mark.parametrize("left", [0, 100])
def test_a_tensor_whose_memory_is_gone_is_refused_by_name(stager, left):
    lost = numbered(100)
    lost.untyped_storage().resize_(left)
    with pytest.raises(StagingError, match="freed or shrunk") as caught:
        stager.stage({"model": {"lost": lost}})
    assert caught.value.item == "model.lost"


@pytest.mark.parametrize("tensor", [torch.eye(4).to_sparse(), torch.empty(3, device="meta")])
def test_a_tensor_that_is_no_plain_memory_is_copied_on_its_own(stager, tensor):
    staged = stager.stage({"t": tensor})["t"]
    assert staged is not tensor
    assert (staged.layout, staged.shape) == (tensor.layout, tensor.shape)
    assert staged.is_meta or torch.equal(staged.to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore:Lazy modules.*:UserWarning")
def test_a_lazy_parameter_is_copied_for_the_save_that_refuses_it_by_name(stager):
    assert is_lazy(stager.stage({"t": torch.nn.LazyLinear(3).weight})["t"])


class Named(torch.Tensor):
    """A subclass as it is mostly written, which ``copy.deepcopy`` refuses."""


def test_a_tensor_of_a_class_that_torch_does_not_copy_is_copied_all_the_same(stager):
    tensor = numbered(4, 5).as_subclass(Named)
    with pytest.raises(RuntimeError, match="new_empty"):
        copy.deepcopy(tensor)
    staged = stager.stage({"t": tensor, "rows": [tensor[1:3]]})
    tensor.zero_()
    assert type(staged["t"]) is type(staged["rows"][0]) is Named
    assert_same(staged["t"].as_subclass(torch.Tensor), numbered(4, 5))
    assert_same(staged["rows"][0].as_subclass(torch.Tensor), numbered(4, 5)[1:3])


# ---- sharing


def test_an_alias_takes_no_memory_of_its_own_and_a_view_only_that_of_what_it_shows():
    base = numbered(10_000)
    state = {"a": base, "b": base, "c": base.view(100, 100), "d": torch.nn.Parameter(base)}
    assert Layout.of(state).size == -(-40_000 // ALIGNMENT) * ALIGNMENT
    rows = base.view(100, 100)[50:52]
    assert Layout.of({"rows": rows}).size <= 800 + 2 * ALIGNMENT


# ---- modes of torch


@pytest.mark.parametrize("size", [10, 40 * MIB], ids=["small", "large"])
def test_what_is_staged_in_inference_mode_can_be_read_and_written_outside(stager, size):
    with torch.inference_mode():
        state = {"t": torch.ones(size, dtype=torch.uint8)}
        staged = stager.stage(state)
    assert not staged["t"].is_inference()
    assert bool(staged["t"].eq(1).all())


# ---- any tree of views

_STORAGES = 3


@st.composite
def _views(draw) -> torch.Tensor:
    number = draw(st.integers(0, _STORAGES - 1))
    dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype != torch.bool]))
    base = _bases[number].view(dtype)
    steps = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    sizes = [draw(st.integers(0, 6)) for _ in steps]
    reach = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True) if size) + 1
    offset = draw(st.integers(0, max(0, base.numel() - reach)))
    view = base.as_strided(sizes, steps, offset)
    is_conjugate = dtype in (torch.complex64, torch.complex128) and draw(st.booleans())
    return view.conj() if is_conjugate else view


_bases = [torch.randint(1, 127, (size,), dtype=torch.uint8) for size in (1024, 4096, 1408)]
_leaves = _views() | st.integers() | st.text(max_size=3)
_trees = st.dictionaries(
    st.text("ab", min_size=1, max_size=3),
    st.recursive(
        _leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text("xy", max_size=2), inner, max_size=4)
            | st.tuples(inner, inner)
        ),
        max_leaves=12,
    ),
    max_size=6,
)


def _plain(tree):
    """The same tree with tensors that have the usual strides."""
    usual = torch.contiguous_format
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.resolve_conj().clone(memory_format=usual), tree
    )


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@settings(max_examples=100)
@given(_trees, st.sampled_from([64, 256 + 64, 1024]), st.sampled_from([1, 2, 7]))
def test_any_tree_of_views_is_copied_by_chunks_and_threads_and_is_independent(tree, size, threads):
    before = [base.clone() for base in _bases]
    expected = _plain(tree)
    with pytest.MonkeyPatch.context() as patch, Stager(threads=threads) as stager:
        patch.setattr(stagers, "_CHUNK", size)
        patch.setattr(stagers, "_WORTH_THREADS", 1)
        staged = stager.stage(tree)
        assert_same(_plain(staged), expected)
        if not any(map(torch.Tensor.is_conj, _tensors(tree))):
            assert [t.stride() for t in _tensors(staged)] == [t.stride() for t in _tensors(tree)]
        try:
            for base in _bases:
                base.add_(1)
            assert_same(_plain(staged), expected)
        finally:
            for base, content in zip(_bases, before, strict=True):
                base.copy_(content)


class ReadOnly(Mapping):
    """A mapping that can't be copied."""

    def __init__(self, **content):
        self._content, self._lock = content, threading.Lock()

    def __getitem__(self, key):
        return self._content[key]

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)


class Attributes(dict):
    """As some configuration libraries have them."""


class Frozen(dict):
    """A mapping that is its own copy, as immutable ones are."""

    def __deepcopy__(self, memo):
        return self


class FrozenList(list):
    def __deepcopy__(self, memo):
        return self


class CopiedInPart(dict):
    def __deepcopy__(self, memo):
        return type(self)(self)


def proxy(**content):
    return MappingProxyType(content)


# of which there are copies; a copy of the factory would fail
KINDS = [dict, OrderedDict, partial(defaultdict, ReadOnly().keys), UserDict, Attributes]


@pytest.mark.parametrize("kind", [*KINDS, Frozen, CopiedInPart, ReadOnly, proxy])
def test_what_is_in_a_mapping_is_copied_once_and_shares_memory_as_before(stager, kind):
    base, listed = numbered(100), {"n": [1]}
    content = {
        **{"part": base[10:20], "turned": base.view(10, 10).t(), "d": listed},
        **{"graph": torch.ones(2, requires_grad=True) * 2, "frozen": FrozenList([base[3:6]])},
        **{"inner": kind(w=base[:3]), "pair": ({"w": base},)},
    }
    state = {"all": base, "m": kind(**content), "d": listed}
    staged = stager.stage(state)
    assert state["m"]["part"] is content["part"]
    base.fill_(-1)
    listed["n"].append(2)
    found = staged["m"]
    assert type(found) is (type(state["m"]) if kind in KINDS else dict)
    assert list(found) == list(content)
    assert_same(found["part"], numbered(100)[10:20])
    assert_same(found["graph"], torch.full((2,), 2.0))
    assert_same(found["inner"]["w"], numbered(3))
    assert_same(found["frozen"][0], numbered(100)[3:6])
    assert found["d"] is staged["d"]
    assert staged["d"] == {"n": [1]}
    assert found["pair"][0]["w"] is staged["all"]
    found["part"].fill_(7)
    assert staged["all"][10:20].eq(7).all()
    assert found["turned"][:, 1].eq(7).all()


class Tracked(dict):
    """Records its changes in an attribute, which a shallow copy would share."""

    def __init__(self, **content):
        super().__init__(content)
        self.changes = []

    def __setitem__(self, key, value):
        self.changes.append(key)
        super().__setitem__(key, value)


class TrackedList(list):
    def __init__(self, *entries):
        super().__init__(entries)
        self.changes = []

    def append(self, value):
        self.changes.append(value)
        super().append(value)

    def extend(self, values):
        for value in values:
            self.append(value)


class FrozenTuple(tuple):
    __slots__ = ()

    def __deepcopy__(self, memo):
        return self


def with_attribute(container, value):
    container.attribute = value
    return container


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: (with_attribute(Attributes(a=1), inner),),
        lambda inner: with_attribute(TrackedList(1), inner),
        lambda inner: Tracked(a=inner),
        lambda inner: TrackedList(inner),
        lambda inner: FrozenTuple([inner]),
        lambda inner: (UserDict(a=inner),),
    ],
    ids=[
        "attribute of a dict in a tuple",
        "attribute of a list",
        "dict that tracks changes",
        "list that tracks changes",
        "tuple that is its own copy",
        "mapping in a tuple",
    ],
)
def test_a_container_and_its_staged_copy_are_alike_and_neither_changes_the_other(stager, make):
    inner = ["before"]
    value = make(inner)
    original = pickle.dumps(value)
    staged = stager.stage({"x": value})["x"]
    assert pickle.dumps(value) == original
    inner.append("after")
    assert [*map(type, (staged, *staged))] == [*map(type, (value, *value))]
    assert b"before" in pickle.dumps(staged)
    assert b"after" not in pickle.dumps(staged)


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"lock": threading.Lock()}, "lock"),
        ({"t": numbered(3), "a": {"b": [1, {"gen": (n for n in "x")}]}}, "a.b.1.gen"),
        ({"m": ReadOnly(t=numbered(3), lock=threading.Lock())}, "m.lock"),
        ({"model": OrderedDict(fine=1, bad=Point(1, threading.Lock()))}, "model.bad"),
    ],
    ids=["at the top", "deep", "in a mapping", "in a named tuple"],
)
def test_a_value_that_cannot_be_copied_is_named(stager, state, path):
    with pytest.raises(StagingError, match="can't be copied") as caught:
        stager.stage(state)
    assert caught.value.item == path
    assert caught.value.cause is not None
    assert_same(stager.stage({"t": numbered(3)}), {"t": numbered(3)})  # its memory is free again


class Computed(ReadOnly):
    """Makes its entries whenever somebody asks, from what the training goes on to change."""

    def __init__(self, weights, made):
        super().__init__(**weights)
        self._made = made

    def __getitem__(self, name):
        return self._made(super().__getitem__(name))


@pytest.mark.parametrize(
    "made",
    [lambda w: w * 2, lambda w: [w * 2], lambda w: ((w * 2).tolist(),), lambda w: w[0].item()],
)
@pytest.mark.parametrize("wrap", [lambda mapping: mapping, MappingProxyType])
def test_entries_that_are_made_when_asked_for_are_copied_each_at_once(stager, made, wrap):
    weights = {str(n): torch.full((2,), float(n)) for n in range(20)}
    expected = {name: made(weight) for name, weight in weights.items()}
    staged = stager.stage({"m": wrap(Computed(weights, made))})
    for weight in weights.values():
        weight.fill_(-1)
    assert_same(dict(staged["m"]), expected)


def test_an_object_that_holds_a_tensor_amid_a_graph_is_copied(stager):
    loss = torch.ones(3, requires_grad=True) * 2
    staged = stager.stage({"recent": collections.deque([loss])})
    with torch.no_grad():
        loss.fill_(7)
    assert_same(staged["recent"][0].detach(), torch.full((3,), 2.0))
