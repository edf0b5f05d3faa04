"""Forked children themselves: results, exit codes, environment, and an end of all of them."""

import os
import signal
import threading

import pytest

from forks import child


def _answer(value):
    return value


def _variable(name):
    return os.environ.get(name)


def _fail():
    raise ValueError("as the test wants")


def _hang():
    threading.Event().wait()


def test_a_child_returns_its_result():
    with child(_answer, value=3) as one:
        assert one.wait() == (0, 3)


def test_a_child_has_the_environment_that_its_test_has(monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", "here")
    with child(_variable, name="OF_THIS_TEST") as one:
        assert one.wait() == (0, "here")


def test_a_child_that_raises_has_no_result():
    with child(_fail) as one:
        assert one.wait() == (1, None)


def test_a_child_that_hangs_ends_with_its_patience_and_says_where(capsys):
    with child(_hang, patience=0.5) as one:
        assert one.wait() == (-signal.SIGALRM, None)
    assert "in _hang" in capsys.readouterr().out


def test_a_child_that_is_left_is_killed():
    with pytest.raises(KeyboardInterrupt), child(_hang) as one:
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)
