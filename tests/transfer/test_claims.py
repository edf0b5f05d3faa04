"""Targets that share memory are told from those that do not."""

import random

import pytest
import torch

from cloudckpt.transfer.memory import Claims

BASE = torch.zeros(10, 10)


@pytest.mark.parametrize(
    ("other", "overlaps"),
    [
        (BASE, True),
        (BASE[2:4], True),
        (BASE[4:6], True),
        (BASE[1:3], True),
        (BASE[0:9], True),
        (BASE[0:2], False),
        (BASE[5:], False),
        (BASE[2:2], False),
        (BASE.t(), True),
        (BASE[:, 2:4], True),
        (BASE[:2, 2:4], False),
        (BASE[::2], True),
        (BASE[5::2, 3:7], False),
        (torch.zeros(10, 10), False),
        (torch.zeros(10, 10, device="meta"), False),
    ],
)
def test_what_shares_bytes_overlaps(other, overlaps):
    claims = Claims()
    claims.add(BASE[2:5])
    assert claims.overlap(other) is overlaps


@pytest.mark.parametrize(
    ("one", "other", "overlaps"),
    [
        (BASE[:, 2:4], BASE[:, 4:6], False),
        (BASE[:, 2:4], BASE[:, 3:6], True),
        (BASE[:, 5:], BASE[1:, :5], False),
        (BASE[::2], BASE[1::2], False),
        (BASE[::2], BASE[2::2], True),
        (BASE[:, 1], BASE[:, 2], False),
        (BASE[:, 1], BASE[3], True),
        (BASE.t()[2:4], BASE.t()[4:6], False),
        (BASE.t()[2:4], BASE[:, 3:5], True),
        (BASE.diagonal(), BASE[2:, 1:], True),
        (BASE[1, 1], BASE[1, 2], False),
        (BASE[:, :1].expand(10, 10), BASE[:, 1:], True),  # not plain from the strides
    ],
)
def test_tensors_that_lie_in_between_each_other_do_not_overlap(one, other, overlaps):
    for first, second in ((one, other), (other, one)):
        claims = Claims()
        claims.add(first)
        assert claims.overlap(second) is overlaps


def _view(memory: torch.Tensor, numbers: random.Random) -> torch.Tensor:
    view = memory.view(numbers.choice([(4, 6, 10), (24, 10), (240,), (8, 30), (2, 3, 4, 10)]))
    for _ in range(3):
        axis = numbers.randrange(view.dim())
        start = numbers.randrange(view.shape[axis])
        kind = numbers.randrange(4)
        if kind == 0:
            stop = numbers.randrange(start, view.shape[axis]) + 1
            view = view.narrow(axis, start, stop - start)
        elif kind == 1:
            view = view.transpose(axis, numbers.randrange(view.dim()))
        elif kind == 2:
            view = view[(slice(None),) * axis + (slice(start, None, 2),)]
        elif view.dim() > 1:
            view = view.select(axis, start)
    return view


def test_no_overlap_of_any_views_is_missed():
    numbers, memory = random.Random(0), torch.zeros(240)
    found = {True: 0, False: 0}
    for _ in range(2000):
        one, other = _view(memory, numbers), _view(memory, numbers)
        one.fill_(1)
        shared = bool(other.any())
        one.fill_(0)
        claims = Claims()
        claims.add(one)
        overlaps = claims.overlap(other)
        assert overlaps or not shared, (one.shape, one.stride(), other.shape, other.stride())
        found[overlaps] += 1
    assert min(found.values()) > 100


def test_many_claims_are_compared_with_all_before():
    numbers, taken = random.Random(0), torch.zeros(1000, dtype=torch.bool)
    claims, memory = Claims(), torch.zeros(1000, dtype=torch.uint8)
    for _ in range(500):
        start = numbers.randrange(1000)
        stop = min(1000, start + numbers.randrange(1, 9))
        overlaps = claims.overlap(memory[start:stop])
        assert overlaps is bool(taken[start:stop].any())
        if not overlaps:
            claims.add(memory[start:stop])
            taken[start:stop] = True
