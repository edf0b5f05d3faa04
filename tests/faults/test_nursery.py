"""The nursery itself: what goes wrong with one child is not told to the next test."""

import signal
from unittest import mock

import pytest

from . import nursery as module
from .nursery import Nursery


@pytest.fixture(scope="module")
def own():
    """A nursery that may be broken."""
    with Nursery() as nursery:
        yield nursery


def test_a_child_returns_its_result(own):
    with own.child("answer", value=3) as child:
        assert child.wait() == (0, 3)


def test_a_child_that_hangs_ends_with_its_patience(own):
    with own.child("hang", patience=0.2) as child:
        assert child.wait() == (-signal.SIGALRM, None)


def test_a_wait_that_is_broken_off_answers_no_later_question(own):
    broken_off = mock.patch.object(module, "wait", side_effect=KeyboardInterrupt)
    with own.child("answer", value=1) as child, broken_off, pytest.raises(KeyboardInterrupt):
        child.wait()
    with own.child("answer", value=2) as child:
        assert child.wait() == (0, 2)
