"""Answers that no store gives, as chance draws them: an error of stores, in bounded memory."""

import logging
import resource

import pytest

from support.dialects import DIALECTS
from support.odd_answers import ask, odd_server

MOST_MEMORY = 256  # MiB beyond what the first answers take


def most_memory() -> int:
    """The most that this process has had in memory, in MiB (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@pytest.mark.parametrize("name", DIALECTS)
def test_whatever_is_answered_is_an_error_of_the_store(name, rng, rounds, caplog):
    caplog.set_level(logging.ERROR)
    with odd_server() as server:
        store, before = DIALECTS[name].open(server.url), None
        for number in rounds():
            assert ask(server, store, name, rng) is None, number
            before = most_memory() if number == 100 else before
        store.close()
    assert before is None or most_memory() - before < MOST_MEMORY
