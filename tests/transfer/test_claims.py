"""Targets that share memory are told from those that do not."""

import random

import pytest
import torch

from cloudckpt.transfer.claims import Claims

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
        (BASE[:, 2:4], False),  # not contiguous
        (torch.zeros(10, 10), False),
        (torch.zeros(10, 10, device="meta"), False),
    ],
)
def test_what_shares_bytes_overlaps(other, overlaps):
    claims = Claims()
    claims.add(BASE[2:5])
    assert claims.overlap(other) is overlaps


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
