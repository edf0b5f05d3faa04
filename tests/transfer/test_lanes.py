"""A search for as many lanes as pay, on links that are simulated: no clock, no threads."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloudckpt.transfer.connections import FIRST, LaneSearch

MOST = 64
MB = 1e6


class Link:
    """Moves ``each`` bytes a second in a lane, ``total`` in all; a new lane is idle for ``start``.

    Attributes:
        seconds: How long it has moved.
        moved: How many bytes it has.
        most: The most lanes that it had at a time.
    """

    def __init__(self, each, total=float("inf"), *, start=0.05, noise=0.0, cpu=0.0):
        self.each, self.total, self.start, self.noise = each, total, start, noise
        self.cpu = cpu  # that a lane takes, of all there is
        self.seconds = self.moved = self.most = 0
        self._begun = []
        self._chance = random.Random(7)

    def carry(self, search, seconds):
        """Moves bytes for so many seconds, by as many lanes as the search says."""
        end = self.seconds + seconds
        while self.seconds < end:
            self._step(search)
        return search.lanes

    def _step(self, search):
        self._begun = self._begun[: search.lanes]
        self._begun += [self.seconds] * (search.lanes - len(self._begun))
        self.most = max(self.most, search.lanes)
        moving = sum(self.seconds - begun >= self.start for begun in self._begun)
        rate = min(moving * self.each, self.total) * self._chance.uniform(
            1 - self.noise, 1 + self.noise
        )
        used = min(1.0, search.lanes * self.cpu)
        seconds = search.tick
        moved = int(rate * seconds)
        self.seconds += seconds
        self.moved += moved
        search.add(seconds=seconds, moved=moved, moving=moving, cpu=used, is_full=True)

    @property
    def best(self):
        """Bytes a second by the best number of lanes."""
        return min(MOST * self.each, self.total)


@given(
    each=st.floats(2 * MB, 120 * MB),
    total=st.one_of(st.just(float("inf")), st.floats(20 * MB, 5000 * MB)),
    start=st.floats(0.0, 0.4),
    noise=st.floats(0.0, 0.05),
)
@example(each=10 * MB, total=float("inf"), start=0.05, noise=0.05)
@example(each=10 * MB, total=95 * MB, start=0.05, noise=0.05)
def test_a_long_transfer_moves_nearly_what_the_best_number_would(each, total, start, noise):
    link = Link(each, total, start=start, noise=noise)
    search = LaneSearch(FIRST, MOST)
    link.carry(search, 60)
    assert link.moved >= link.best * link.seconds / 1.1
    assert link.most <= MOST


@given(known=st.sampled_from([None, 10 * MB]), lanes=st.integers(1, MOST))
def test_lanes_are_never_more_than_there_may_be(known, lanes):
    link = Link(10 * MB)
    link.carry(LaneSearch(FIRST, lanes, known), 20)
    assert link.most <= lanes


SLOW = 10 * MB
SETTLED = {  # a link, the lanes to begin with, seconds, and the fewest and most lanes then
    "each lane is slow": (Link(SLOW), FIRST, 0.5, MOST, MOST),
    "the link is full": (Link(SLOW, 60 * MB), FIRST, 1.7, 1, FIRST),
    "the link is full with more": (Link(SLOW, 100 * MB), FIRST, 1.7, 1, 14),
    "a wide link is full": (Link(SLOW, 200 * MB), FIRST, 1.7, 1, 27),
    "a very wide link is full": (Link(SLOW, 400 * MB), FIRST, 1.7, 1, 53),
    "the link was wider": (Link(SLOW, 150 * MB), MOST, 1.5, 1, 20),
    "the processors are busy": (Link(30 * MB, cpu=0.6 / FIRST), FIRST, 10, FIRST, FIRST),
    "nobody limits a connection": (Link(400 * MB), FIRST, 10, FIRST, FIRST),
}


@pytest.mark.parametrize("case", SETTLED)
def test_as_many_lanes_are_left_as_pay(case):
    link, first, seconds, fewest, most = SETTLED[case]
    search = LaneSearch(first, MOST, SLOW if first == MOST else None)
    assert fewest <= link.carry(search, seconds) <= most
    if case == "the link was wider":
        assert search.found <= most
        assert link.moved > 0.9 * link.best * seconds
    if case == "nobody limits a connection":
        assert link.most == FIRST


def test_what_was_found_is_where_the_next_search_begins():
    first = LaneSearch(FIRST, MOST)
    Link(10 * MB).carry(first, 2)
    link = Link(10 * MB)
    link.carry(LaneSearch(first.found, MOST, first.each), 1)
    assert link.moved > 0.9 * link.best * 1


def test_a_short_transfer_that_ends_amid_a_trial_leaves_its_number_after_one_that_has_paid():
    search = LaneSearch(FIRST, MOST)
    link = Link(10 * MB)
    assert link.carry(search, 0.1) == search.lanes == 2 * FIRST
    assert search.found == FIRST
    while search.lanes == 2 * FIRST:
        link.carry(search, search.tick)
    assert search.lanes == search.found == MOST


def test_a_link_that_becomes_wider_is_used():
    search = LaneSearch(FIRST, MOST)
    Link(10 * MB, 80 * MB).carry(search, 5)
    assert search.lanes < 20
    wider = Link(10 * MB)
    assert wider.carry(search, 10) == MOST


def test_silence_says_nothing():
    search = LaneSearch(FIRST, MOST)
    for _ in range(1000):
        search.add(seconds=search.tick, moved=0, moving=0, cpu=0.0, is_full=True)
    assert (search.lanes, search.each) == (FIRST, None)


def test_a_trial_that_does_not_pay_comes_ever_less_often():
    """Training wants the processors and the link; a trial takes some of both."""
    link = Link(10 * MB, 60 * MB)
    search = LaneSearch(FIRST, MOST)
    changes, lanes = [], search.lanes
    while link.seconds < 120:
        link.carry(search, search.tick)
        if search.lanes > lanes:
            changes.append(link.seconds)
        lanes = search.lanes
    assert 3 <= len(changes) <= 10
