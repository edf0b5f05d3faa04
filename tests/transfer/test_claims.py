"""Targets that share memory are told from those that do not."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.transfer.memory import sharing_memory

BASE = torch.zeros(10, 10, dtype=torch.uint8)
places = st.integers(0, 9)
_views = st.tuples(places, places, places, places).map(
    lambda at: BASE[at[0] : at[0] + at[1] + 1, at[2] : at[2] + at[3] + 1]
)


def _range(view: torch.Tensor) -> set[int]:
    """What a view reaches, also if it only lies in between."""
    numbers = torch.arange(100).as_strided(view.shape, view.stride(), view.storage_offset())
    return {*range(int(numbers.min()), int(numbers.max()) + 1)}


@given(st.lists(st.tuples(st.integers(1, 3), _views | _views.map(torch.t)), max_size=60))
def test_views_that_overlap_those_of_other_owners_are_read_one_after_the_other(views):
    alone = [(4, [BASE.clone()]), (5, [])]
    rounds = sharing_memory([*((owner, [view]) for owner, view in views), *alone])
    assert {*rounds} <= {*range(len(views))}
    for (n, (owner, view)), (m, (other, there)) in itertools.combinations(enumerate(views), 2):
        if owner != other and _range(view) & _range(there):
            assert rounds[n] != rounds[m]
