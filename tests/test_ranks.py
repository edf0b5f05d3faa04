"""The runner of ranks itself: it reports what happens, and a hang or a crash ends."""

import os
import threading
from unittest import mock

import pytest
import torch.distributed as dist

from ranks import Ranks, RanksDiedError, RanksTimeoutError


def _identify() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _fail_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("only I")


def _process() -> int:
    return os.getpid()


def _hang() -> None:
    threading.Event().wait()


def _die() -> None:
    os._exit(7)


def test_ranks_return_their_values_in_order(ranks):
    assert ranks(3, _identify) == [(0, 3), (1, 3), (2, 3)]
    assert ranks(1, _identify) == [(0, 1)]


def test_an_error_of_one_rank_fails_the_call_and_names_it(ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*ValueError: only I"):
        ranks(2, _fail_on_last)
    assert [type(error) for error in ranks.errors(2, _fail_on_last)] == [type(None), ValueError]


def test_processes_are_used_again(ranks):
    assert ranks(2, _process) == ranks(2, _process)


@pytest.mark.parametrize(
    ("function", "error"), [(_hang, RanksTimeoutError), (_die, RanksDiedError)]
)
def test_ranks_that_hang_or_die_are_ended_and_replaced(function, error):
    pool = Ranks(1)
    try:
        (before,) = pool(1, _process)
        with pytest.raises(error):
            pool(1, function, deadline=0.5)
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        assert pool(1, _process) != [before]
    finally:
        pool.kill()


def test_a_call_that_is_broken_off_answers_no_later_one():
    pool = Ranks(1)
    try:
        assert pool(1, _identify) == [(0, 1)]
        broken_off = mock.patch.object(pool, "_collect", side_effect=KeyboardInterrupt)
        with broken_off, pytest.raises(KeyboardInterrupt):
            pool(1, _process)
        assert pool(1, _identify) == [(0, 1)]
    finally:
        pool.kill()
