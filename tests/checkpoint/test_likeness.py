"""Values that are the same have one digest, however they were made; others have others."""

import copy
import datetime
import pathlib
import random
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from cloudckpt.checkpoint.likeness import digest_of_all


class Settings:
    def __init__(self, **values):
        vars(self).update(values)


def _value() -> dict:
    """One of each kind, with nothing shared between two calls, and no order that does not count."""
    words = ["".join(random.sample("abc", 3)) for _ in range(20)] + [f"w{n}" for n in range(30)]
    shared = [1.5, "x" * 3]
    entries = [("b", 2), ("a", -0.0), ("nan", float("nan")), ("none", None)]
    random.shuffle(entries)
    return {
        "set": frozenset(sorted({f"w{n}" for n in range(30)} & {*words}, key=hash)),
        "dict": dict(entries),
        "nested": {1: {"t": torch.ones(3), "l": [{"a": (1, 2)}]}},
        "shared": random.choice([[shared, shared], [shared, copy.deepcopy(shared)]]),
        "array": np.arange(5),
        "number": np.float32(2.5),
        "object": Settings(a=1, b={"x": torch.zeros(2)}, c=Settings()),
        "random": random.Random(3),
        "generator": np.random.default_rng(4),
        "when": datetime.datetime(2026, 1, 2),
        "path": pathlib.PurePosixPath("a/b"),
        "fraction": Fraction(1, 3),
        "class": OrderedDict,
        "function": copy.deepcopy,
        "dtype": torch.float16,
        "bytes": bytearray(b"abc"),
        "pair": TwoTensor(torch.ones(2), torch.zeros(2)),
    }


def test_equal_values_have_one_digest_however_they_were_made():
    assert len({digest_of_all([_value()]) for _ in range(20)}) == 1


@pytest.mark.parametrize("key", _value())
def test_each_value_counts(key):
    digests = {
        "set": frozenset({"w1"}),
        "dict": {"b": 2, "a": 0.0, "nan": float("nan"), "none": None},
        "nested": {1: {"t": torch.ones(3) * 2, "l": [{"a": (1, 2)}]}},
        "object": Settings(a=1, b={"x": torch.ones(2)}, c=Settings()),
        "random": random.Random(5),
        "generator": np.random.default_rng(5),
        "pair": TwoTensor(torch.ones(2), torch.ones(2)),
    }
    assert digest_of_all([_value()]) != digest_of_all([_value() | {key: digests.get(key, 7)}])


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), ("1", 1), ([1], (1,)), (b"a", "a"), (0.0, -0.0)]
)
def test_values_that_python_takes_for_equal_may_be_others(one, other):
    assert digest_of_all([one]) != digest_of_all([other])


@pytest.mark.parametrize("shape", [(), (0, 3), (7, 9), (300, 700), (70_001, 1), (3, 5, 7001)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.complex64])
def test_elements_count_and_strides_do_not(shape, dtype):
    tensor = (torch.arange(torch.Size(shape).numel()) % 251).reshape(shape).to(dtype)
    views = [tensor, torch.stack([tensor, tensor], -1)[..., 0]]
    if tensor.dim():
        views.append(tensor.transpose(0, -1).contiguous().transpose(0, -1))
    if dtype.is_complex:
        views.append(tensor.conj().resolve_conj().conj())
    assert len({digest_of_all([view]) for view in views}) == 1
    assert len({digest_of_all([view], samples=False) for view in views}) == 1
    if tensor.numel():
        other = tensor.clone()
        other.view(-1).view(torch.uint8)[0] ^= 1
        assert digest_of_all([other]) != digest_of_all([tensor])


@pytest.mark.parametrize("strided", [False, True])
def test_any_byte_counts_where_all_of_a_tensor_is_compared(strided):
    tensor = torch.zeros(600, 300, dtype=torch.uint8)
    others = [tensor.clone() for _ in range(5)]
    for other in others:
        other[random.randrange(600), random.randrange(300)] = 1
    same, *unlike = [one.t() if strided else one for one in [tensor, *others]]
    whole = digest_of_all([same], samples=False)
    assert all(digest_of_all([one], samples=False) != whole for one in unlike)


def test_what_can_not_be_read_has_a_digest_all_the_same():
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    endless: list = [1]
    endless.append(endless)
    odd = [
        freed,
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        endless,
        (lambda: 1),
        iter([1]),
    ]
    for value in odd:
        assert digest_of_all([value]) == digest_of_all([value])


class Node:
    """Refers to all others, and they to it."""

    others: list


def test_objects_that_refer_to_one_another_are_visited_once():
    nodes = [Node() for _ in range(60)]
    for node in nodes:
        node.others = nodes
    shared: list = []
    for _ in range(200):
        shared = [shared, shared]
    assert digest_of_all([nodes, shared]) == digest_of_all([nodes, shared])
