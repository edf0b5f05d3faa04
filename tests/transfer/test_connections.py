"""As many connections as were asked for, or as many as pay, which the next transfer begins with."""

import time
import uuid

import pytest

from cloudckpt.config import Config
from cloudckpt.transfer.connections import FIRST, transfer_group
from support.memory_store import MemoryStore
from transfer.props import Crowd

MB = 1_000_000
LAUNCHERS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


class Counting(MemoryStore):
    """A stub: says that each thread which is busy has moved as much as 10 MB/s make."""

    def __init__(self):
        super().__init__(uuid.uuid4().hex)
        self._last = {}

    def moved(self, threads):
        now = time.monotonic()
        before = {thread: self._last.get(thread, now) for thread in threads}
        self._last.update(dict.fromkeys(threads, now))
        return [int((now - begun) * 10 * MB) for begun in before.values()]


def crowd_of(store, tasks, direction="out", **options):
    """The most tasks that ran at a time."""
    crowd = Crowd(0.02)
    group = transfer_group(store, Config(**options), direction)

    def produce():
        for _ in range(tasks):
            group.submit(crowd)

    group.run(produce)
    return max(crowd.counts)


def test_lanes_are_added_while_that_pays_and_the_next_transfer_begins_with_them(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    store = Counting()
    assert FIRST < crowd_of(store, 800) <= 16
    assert FIRST < crowd_of(store, 16, "out") <= 16
    assert crowd_of(store, 16, "in") == FIRST
    assert crowd_of(Counting(), 16, "out") == FIRST


@pytest.mark.parametrize("number", [1, 3, 12])
def test_a_number_that_was_given_is_kept_to(number):
    assert crowd_of(Counting(), 4 * number, connections=number) == number


def test_a_store_that_counts_nothing_has_a_number_for_all():
    assert crowd_of(MemoryStore(uuid.uuid4().hex), 64) == 16


@pytest.mark.parametrize(
    ("ranks", "most"),
    [(None, 64), ("1", 64), ("8", 8), ("16", 4), ("100", 1), ("x", 64), ("0", 64)],
)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_ranks_of_a_machine_share_its_connections(monkeypatch, launcher, ranks, most):
    if ranks is not None:
        monkeypatch.setenv(launcher, ranks)
    assert Config().most_connections == most
    assert Config(connections=100).most_connections == 100


def test_small_requests_are_sixteen_at_a_time_or_as_many_as_there_may_be(monkeypatch):
    assert Config().requests_at_once == 16
    assert Config(connections=100).requests_at_once == 100
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Config().requests_at_once == 8
