"""Tokens are renewed ahead of their end, by one thread for all, and used on while that fails."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from cloudckpt.errors import CredentialsError, ThrottledError
from cloudckpt.stores.credentials import Renewal, Validity


class Token:
    """A token with a number; each renewal takes the next step of a script: an error, if any."""

    def __init__(self, *script, **settings):
        self.validity = Validity.ENDED
        self.after = Validity.GOOD  # a renewal
        self.number = self.tries = 0
        self.script = list(script)
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()
        self.renewal = Renewal(lambda: self.validity, self.renew, **settings)

    def renew(self):
        self.tries += 1
        self.is_asked.set()
        assert self.may_answer.wait(30)
        if self.script and (error := self.script.pop(0)) is not None:
            raise error
        self.number += 1
        self.validity = self.after

    def get(self):
        self.renewal.ensure()
        return self.number


@pytest.fixture
def clock(monkeypatch):
    """The time that renewals go by; it stands still unless a test moves it."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("cloudckpt.stores.credentials.time", clock)
    return clock


def refused(*_):
    return CredentialsError("refused", cause="by its issuer")


def test_a_token_is_fetched_once_and_renewed_when_it_is_due():
    token = Token()
    assert [token.get(), token.get()] == [1, 1]
    token.validity = Validity.DUE
    assert [token.get(), token.get()] == [2, 2]


def test_what_keeps_the_first_token_away_is_told_each_time():
    token = Token(refused(), refused())
    for _ in range(2):
        with pytest.raises(CredentialsError, match="by its issuer"):
            token.get()
    assert token.get() == 1


def test_a_valid_token_is_used_on_while_it_can_not_be_renewed(clock, caplog):
    token = Token(None, *map(refused, range(3)))
    token.after = Validity.DUE
    token.get()
    tries = []
    for _ in range(7):
        assert token.get() == 1
        tries.append(token.tries)
        clock.now += 10
    assert tries == [2, 2, 2, 3, 3, 3, 4]  # half a minute apart
    (record,) = caplog.records  # one for each token is enough
    assert "still valid, could not be renewed" in record.getMessage()
    assert "by its issuer" in record.getMessage()
    clock.now += 30
    assert token.get() == 2


def test_pauses_may_grow_with_the_failures(clock):
    token = Token(None, *map(refused, range(9)), pause=lambda failures: 10.0 * (failures - 1))
    token.after = Validity.DUE
    token.get()
    tries = []
    for _ in range(6):
        token.get()
        tries.append(token.tries)
        clock.now += 10
    assert tries == [2, 3, 4, 4, 5, 5]


def test_a_token_that_has_ended_is_not_made_to_wait(clock):
    token = Token(None, refused(), refused())
    token.after = Validity.DUE
    for _ in range(2):
        token.get()
    token.validity = Validity.ENDED
    with pytest.raises(CredentialsError):
        token.get()
    assert token.get() == 2


def test_one_thread_fetches_the_token_for_all():
    token = Token()
    token.may_answer.clear()
    with ThreadPoolExecutor(8) as threads:
        found = [threads.submit(token.get) for _ in range(8)]
        assert token.is_asked.wait(30)
        token.may_answer.set()
        assert [one.result(30) for one in found] == [1] * 8
    assert token.tries == 1


def test_nobody_waits_for_a_renewal_while_the_old_token_is_valid():
    token = Token()
    token.after = Validity.DUE
    token.get()
    token.is_asked.clear()
    token.may_answer.clear()
    with ThreadPoolExecutor(1) as threads:
        renewing = threads.submit(token.get)
        assert token.is_asked.wait(30)
        assert token.get() == 1
        assert not renewing.done()
        token.may_answer.set()
        assert renewing.result(30) == 2


def test_threads_that_have_waited_in_vain_are_told_why_and_do_not_ask_again(monkeypatch):
    token = Token(ThrottledError("busy", retry_after=5.0))
    token.may_answer.clear()
    waiting = threading.Semaphore(0)
    acquire = token.renewal._lock.acquire

    class Lock:
        release = token.renewal._lock.release

        def acquire(self, timeout):
            waiting.release()
            return acquire(timeout=timeout)

    monkeypatch.setattr(token.renewal, "_lock", Lock())
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(token.get) for _ in range(4)]
        for _ in range(4):
            assert waiting.acquire(timeout=30)
        token.may_answer.set()
        errors = [one.exception(30) for one in asked]
    assert [(type(error), error.retry_after) for error in errors] == [(ThrottledError, 5.0)] * 4
    assert len({id(error) for error in errors}) == 4
    assert token.tries == 1
