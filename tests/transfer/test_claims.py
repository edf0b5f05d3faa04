"""Targets that share memory are told from those that do not."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.transfer.memory import Claims

BASE = torch.zeros(10, 10, dtype=torch.uint8)
places = st.integers(0, 9)
_views = st.tuples(places, places, places, places).map(
    lambda at: BASE[at[0] : at[0] + at[1], at[2] : at[2] + at[3]]
)


@given(st.lists(st.tuples(_views | _views.map(torch.t), st.integers(1, 3)), max_size=60))
def test_a_view_overlaps_what_is_in_the_range_of_views_of_other_owners(views):
    """Also what only lies in between; but no tensor of another device, or without elements."""
    claims, taken = Claims(), torch.zeros(100, dtype=torch.uint8)
    for view, owner in views:
        numbers = torch.arange(100).as_strided(view.shape, view.stride(), view.storage_offset())
        found = taken[numbers.min() : numbers.max() + 1] if view.numel() else taken[:0]
        overlaps = claims.overlap(view, owner)
        assert overlaps is bool(((found != 0) & (found != owner)).any())
        assert not claims.overlap(view.to("meta"), 4)
        if not overlaps:
            claims.add(view, owner)
            found.fill_(owner)
