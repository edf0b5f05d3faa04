"""State dicts of one outline have one plan; whatever changes a plan changes the outline."""

import contextlib
import copy
from collections import OrderedDict

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cloudckpt.checkpoint.structure import Flat
from cloudckpt.checkpoint.torch_private import StridedShard
from cloudckpt.dcp.save_plan import CloudSavePlanner, outline_of
from cloudckpt.errors import KeyCollisionError

from .test_tensor_protocol import FIELDS, of_protocol

TENSORS = st.builds(
    lambda shape, dtype, grad, turned: (
        (torch.zeros(shape, dtype=dtype).requires_grad_(grad and dtype.is_floating_point)).mT
        if turned and len(shape) > 1
        else torch.zeros(shape, dtype=dtype)
    ),
    st.lists(st.integers(0, 2), max_size=2).map(tuple),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
    st.booleans(),
    st.booleans(),
)
VALUES = st.one_of(TENSORS, st.integers(0, 2), st.text(max_size=1), st.none(), st.just((1, 2)))
KEYS = st.one_of(
    st.sampled_from(["a", "b", "a.b", "1"]), st.integers(0, 1), st.booleans(), st.just(1.0)
)
NESTED = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(KEYS, inner, max_size=2),
        st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=4,
)
STATES = st.dictionaries(KEYS, NESTED, max_size=3)


def _outline(state):
    return outline_of(Flat(state))


def _planned(state):
    planner = CloudSavePlanner()
    planner.set_up_planner(state, None, True)
    return planner.create_local_plan(), tuple(planner.state_dict), Flat(state).structure()


@settings(max_examples=400)
@given(STATES, STATES)
def test_states_of_one_outline_have_one_plan(one, changes):
    """Whatever differs in a few entries: names, order, containers, shapes, types, strides."""
    other = {**one, **changes}
    with contextlib.suppress(KeyCollisionError):  # two keys have one name
        outlines = _outline(one), _outline(other)
        assert None in outlines or outlines[0] != outlines[1] or _planned(one) == _planned(other)


def _declaring(tensor=None, **changed):
    made = torch.zeros(4, 3) if tensor is None else tensor
    usual = ((8, 3), [(4, 0)], [(0, 0)], [(4, 3)])
    for name, value in {**dict(zip(FIELDS, usual, strict=True)), **changed}.items():
        setattr(made, name, value)
    return _outline({"a": [made]})


@of_protocol
@pytest.mark.parametrize(
    "changed",
    [
        {"global_shape": (9, 3)},
        {"global_offsets": [(3, 0)]},
        {"local_offsets": [(1, 0)], "local_sizes": [(3, 3)]},
        {"local_sizes": [(3, 3)]},
        {"global_offsets": [], "local_offsets": [], "local_sizes": []},
    ],
)
def test_another_part_of_a_larger_tensor_is_another_outline(changed):
    assert _declaring() == _declaring()
    assert _declaring() == _declaring(global_shape=torch.Size((8, 3)), local_sizes=([4, 3],))
    assert _declaring(**changed) != _declaring()
    assert _outline({"a": [torch.zeros(4, 3)]}) != _declaring()


def test_other_values_are_no_other_outline():
    states = [{"step": step, "t": torch.full((2,), step), "a": [{"lr": step}]} for step in (1, 2)]
    assert _outline(states[0]) == _outline(states[1])


def test_keys_that_are_equal_and_have_other_names_are_another_outline():
    assert _outline({"a": {0.0: 1}}) == _outline({"a": {0.0: 2}})
    assert _outline({"a": {0.0: 1}}) != _outline({"a": {-0.0: 1}})


class _Checkpointable:
    def __create_write_items__(self, fqn, value):
        raise NotImplementedError


def _planning_itself(tensor):
    tensor.__create_write_items__ = lambda fqn, value: []
    return tensor


UNKNOWN = {
    "a tensor of a class of its own": torch.zeros(1).as_subclass(type("Own", (torch.Tensor,), {})),
    "a sparse tensor": torch.zeros(1).to_sparse(),
    "a value that makes its own items": _Checkpointable(),
    "a tensor that does so by an attribute": _planning_itself(torch.zeros(1)),
    "a tensor that does so in a list": [_planning_itself(torch.zeros(1))],
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_known_has_no_outline(kind):
    assert _outline({"a": UNKNOWN[kind]}) is None


class _OwnShard(Shard):
    """Equal to any placement of its dimension, as torch's own once were."""


def _sharded_outlines():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))

    def outline(placement, mesh=mesh, rows=4):
        local = torch.zeros(2, 3)
        shape = (rows, 3) if placement == Shard(0) else (2, 6) if placement == Shard(1) else (2, 3)
        state = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=shape, stride=(shape[1], 1)
        )
        return _outline({"t": state})

    first = outline(Shard(0))
    assert first == outline(Shard(0))
    assert first == outline(Shard(0), copy.copy(mesh))  # as one that comes out of a pickle
    others = (
        outline(Shard(1)),
        outline(Replicate()),
        outline(Shard(0), init_device_mesh("cpu", (2,), mesh_dim_names=("y",))),
        outline(Shard(0), rows=3),
        _outline({"t": torch.zeros(2, 3)}),
        outline(StridedShard(0, split_factor=2)),
    )
    return [first != other for other in others], outline(_OwnShard(0)) is None


def test_placements_meshes_and_whole_shapes_count(ranks):
    assert ranks(2, _sharded_outlines) == [([True] * 6, True)] * 2
