"""The tensors of a staged copy: bit by bit, of all kinds, sharing memory as they did."""

import collections
import copy
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cloudckpt.background.layout import Layout
from cloudckpt.checkpointer import Stager
from cloudckpt.config import MIB
from cloudckpt.errors import StagingError
from cloudckpt.transfer.boxes import ALIGNMENT
from dcp.test_tensor_kinds import DTYPES
from dcp.values import assert_same, numbered


class Attributes(dict):
    """As some configuration libraries have them."""


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


@pytest.mark.parametrize(
    "size",
    [
        near + by
        for near in (1, 8, ALIGNMENT, 64 * 1024, 1024 * 1024)
        for by in (-9, -8, -1, 0, 1, 7, 8, 9)
        if near + by > 0
    ],
)
def test_sizes_around_boundaries_are_copied_to_the_last_byte(size, monkeypatch):
    monkeypatch.setattr("cloudckpt.background.stager._CHUNK", 1024 * 1024)
    tensor = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    with Stager() as stager:
        staged = stager.stage({"a": tensor, "b": tensor.clone()[1:]})
        assert_same(staged, {"a": tensor, "b": tensor[1:]})


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_share_the_copy_without_a_gap(threads, monkeypatch):
    monkeypatch.setattr("cloudckpt.background.stager._CHUNK", 64 * 1024 + 64)
    monkeypatch.setattr("cloudckpt.background.stager._WORTH_THREADS", 1)
    state = {f"t{n}": numbered(50_000 + n, first=n) for n in range(20)}
    with Stager(threads=threads) as stager:
        assert_same(stager.stage(state), state)


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


def test_views_of_one_storage_go_on_sharing_it(stager):
    base = numbered(100)
    staged = stager.stage({"all": base, "part": base[10:20], "transposed": base.view(10, 10).t()})
    staged["part"].fill_(-1)
    assert staged["all"][10:20].eq(-1).all()
    assert staged["transposed"][:, 1].eq(-1).all()
    assert_same(base, numbered(100))


def test_an_alias_takes_no_memory_of_its_own():
    base = numbered(10_000)
    state = {"a": base, "b": base, "c": base.view(100, 100), "d": torch.nn.Parameter(base)}
    assert Layout.of(state).size == -(-40_000 // ALIGNMENT) * ALIGNMENT


def test_only_what_is_shown_of_a_large_storage_is_copied():
    base = numbered(1000, 1000)
    assert Layout.of({"rows": base[500:502]}).size <= 8000 + 2 * ALIGNMENT
    assert Layout.of({"element": base[999, 999]}).size <= 2 * ALIGNMENT


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor_stays_one_with_its_part_in_the_copy(stager, mesh):
    whole = numbered(20, 6)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    parameter = torch.nn.Parameter(distribute_tensor(whole + 1, mesh, [Replicate()]))
    staged = stager.stage({"t": tensor, "again": tensor, "p": parameter})
    tensor.to_local().fill_(-1)
    with torch.no_grad():
        parameter.to_local().fill_(-1)
    assert isinstance(staged["t"], DTensor)
    assert staged["t"].placements == (Shard(0),)
    assert staged["t"].device_mesh is mesh
    assert_same(staged["t"].full_tensor(), whole)
    assert_same(staged["p"].full_tensor(), whole + 1)
    assert staged["again"] is staged["t"]


@pytest.mark.parametrize("kind", [dict, OrderedDict, partial(defaultdict, list), Attributes])
def test_tensors_in_any_kind_of_dict_share_memory_and_are_copied_once(stager, kind):
    base = numbered(100)
    inner = kind({"part": base[10:20], "graph": torch.ones(2, requires_grad=True) * 2})
    state = {"all": base, "inner": inner}
    staged = stager.stage(state)
    assert type(staged["inner"]) is type(inner)
    assert_same(dict(staged["inner"]), {"part": base[10:20], "graph": torch.full((2,), 2.0)})
    staged["all"].fill_(-1)
    assert staged["inner"]["part"].eq(-1).all()
    assert_same(base, numbered(100))


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


@settings(max_examples=60)
@given(_trees)
def test_any_tree_of_views_is_copied_and_is_independent(tree):
    before = [base.clone() for base in _bases]
    expected = _plain(tree)
    with Stager() as stager:
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


def _plain(tree):
    """The same tree with tensors that have the usual strides."""
    if isinstance(tree, torch.Tensor):
        return tree.resolve_conj().clone(memory_format=torch.contiguous_format)
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_plain(value) for value in tree)
    return tree


def _tensors(tree) -> list[torch.Tensor]:
    if isinstance(tree, (dict, list, tuple)):
        inner = tree.values() if isinstance(tree, dict) else tree
        return [tensor for value in inner for tensor in _tensors(value)]
    return [tree] if isinstance(tree, torch.Tensor) else []


class Computed(Mapping):
    """Makes its entries whenever somebody asks, from what the training goes on to change."""

    def __init__(self, weights, made):
        self._weights, self._made = weights, made
        self._lock = threading.Lock()  # so that it can't be copied as a whole

    def __getitem__(self, name):
        return self._made(self._weights[name])

    def __iter__(self):
        return iter(self._weights)

    def __len__(self):
        return len(self._weights)


@pytest.mark.parametrize(
    "made", [lambda w: w * 2, lambda w: [w * 2], lambda w: ((w * 2).tolist(),)]
)
@pytest.mark.parametrize("wrap", [lambda mapping: mapping, MappingProxyType])
def test_entries_that_are_made_when_asked_for_are_copied_each_at_once(stager, made, wrap):
    weights = {str(n): torch.full((2,), float(n)) for n in range(20)}
    expected = {name: made(weight) for name, weight in weights.items()}
    staged = stager.stage({"m": wrap(Computed(weights, made))})
    for weight in weights.values():
        weight.fill_(-1)
    assert_same(dict(staged["m"]), expected)


class Frozen(dict):
    """A mapping that is its own copy, as immutable ones are."""

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self


class FrozenList(list):
    def __deepcopy__(self, memo):
        return self


class CopiedInPart(dict):
    def __deepcopy__(self, memo):
        return type(self)(self)


@pytest.mark.parametrize("kind", [Frozen, CopiedInPart])
def test_tensors_in_a_container_that_does_not_copy_them_are_copied(stager, kind):
    live = torch.ones(3)
    state = {"outer": kind(inner=kind(w=live), listed=FrozenList([live]), pair=({"w": live},))}
    staged = stager.stage(state)
    assert state["outer"]["inner"]["w"] is live
    live.fill_(7)
    for copied in (
        staged["outer"]["inner"]["w"],
        staged["outer"]["listed"][0],
        staged["outer"]["pair"][0]["w"],
    ):
        assert_same(copied, torch.ones(3))


def test_an_object_that_holds_a_tensor_amid_a_graph_is_copied(stager):
    loss = torch.ones(3, requires_grad=True) * 2
    staged = stager.stage({"recent": collections.deque([loss])})
    with torch.no_grad():
        loss.fill_(7)
    assert_same(staged["recent"][0].detach(), torch.full((3,), 2.0))
