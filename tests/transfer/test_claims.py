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
        (BASE[1:3], True),
        (BASE[0:2], False),
        (BASE[5:], False),
        (BASE[2:2], False),
        (BASE.t(), True),
        (BASE[:2, 2:4], False),
        (BASE[5::2, 3:7], False),
        (BASE[:, 2:4], True),  # also what only lies in between
        (torch.zeros(10, 10), False),
        (torch.zeros(10, 10, device="meta"), False),
    ],
)
def test_what_is_in_the_range_of_another_tensor_overlaps_it(other, overlaps):
    claims = Claims()
    claims.add(BASE[2:5], "one")
    assert claims.overlap(other, "other") is overlaps


def test_many_claims_are_compared_with_all_before():
    numbers, taken = random.Random(0), torch.zeros(1000, dtype=torch.uint8)
    claims, memory = Claims(), torch.zeros(1000, dtype=torch.uint8)
    for _ in range(500):
        start = numbers.randrange(1000)
        stop, owner = min(1000, start + numbers.randrange(1, 9)), numbers.randrange(1, 4)
        others = (taken[start:stop] != 0) & (taken[start:stop] != owner)
        overlaps = claims.overlap(memory[start:stop], owner)
        assert overlaps is bool(others.any())
        if not overlaps:
            claims.add(memory[start:stop], owner)
            taken[start:stop] = owner
