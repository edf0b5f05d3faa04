"""When a failed request is tried again, on a clock that the test turns."""

import random
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.config import RetryPolicy
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    CheckpointReplacedError,
    ConnectionLostError,
    DifferentCheckpointsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ServerError,
    ThrottledError,
    TransferCancelledError,
)
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.transfer import retry
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.retry import Retrier, check_unchanged, retry_if_replaced

PASSING = [ThrottledError, ServerError, ConnectionLostError]


class Waiting(Cancellation):
    """Waits on the test's clock, and may be cancelled at the nth wait."""

    def __init__(self, cancel_at=None):
        super().__init__()
        self.now, self.pauses, self._cancel_at = 0.0, [], cancel_at
        if cancel_at == 0:
            self.cancel()

    def wait(self, seconds):
        self.pauses.append(seconds)
        if len(self.pauses) == self._cancel_at:
            self.cancel()
            self.check()
        self.now += seconds

    def clock(self):
        return self.now


class Script:
    """An operation that fails with these errors and then succeeds; each call takes a second."""

    def __init__(self, errors, waiting, seconds=1.0):
        self.errors, self.waiting, self.seconds, self.calls = list(errors), waiting, seconds, 0

    def __call__(self):
        self.calls += 1
        self.waiting.now += self.seconds
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def retrier_of(waiting, *, draw=lambda low, high: high, **policy):
    values = {"deadline": 1000.0, "base": 1.0, "cap": 8.0, **policy}
    return Retrier(RetryPolicy(**values), waiting, clock=waiting.clock, draw=draw)


def run(errors, *, seconds=1.0, cancel_at=None, **options):
    """The result of a script, its waits, and how often it was called."""
    waiting = Waiting(cancel_at)
    script = Script(errors, waiting, seconds)
    try:
        return retrier_of(waiting, **options).call(script), waiting, script
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return error, waiting, script


@pytest.mark.parametrize(
    "kind",
    [
        AccessDeniedError,
        ObjectNotFoundError,
        PreconditionFailedError,
        CheckpointCorruptError,
        TransferCancelledError,
        ValueError,
        OSError,
    ],
)
def test_what_does_not_go_away_is_raised_at_once(kind):
    error = kind("no")
    result, waiting, script = run([error])
    assert result is error
    assert (script.calls, waiting.pauses) == (1, [])


def test_pauses_are_drawn_between_the_base_and_three_times_the_one_before():
    asked = []

    def draw(low, high):
        asked.append((low, high))
        return high / 2

    _, waiting, _ = run([ServerError("busy")] * 4, draw=draw, cap=8.0)
    assert asked == [(1.0, 3.0), (1.0, 4.5), (1.0, 6.75), (1.0, 8.0)]  # also drawn at the cap
    assert waiting.pauses == [1.5, 2.25, 3.375, 4.0]


@pytest.mark.parametrize("kind", PASSING)
def test_what_may_go_away_is_tried_until_the_deadline(kind):
    """However often: a store that is started anew, or a load that is spread, takes minutes."""
    error = kind("not now")
    result, waiting, script = run([error] * 1000, deadline=600.0, seconds=0.0)
    assert result is error
    assert waiting.now == 600.0  # the last try is made when the time is over, not before
    assert script.calls == len(waiting.pauses) + 1 > 600 / 8
    assert f"gave up after try {script.calls}, 600.0 s" in str(result)


@pytest.mark.parametrize(
    ("retry_after", "pause"),
    [(30.0, 30.0), (0.5, 3.0), (None, 3.0), (301.0, 60.0), (float("inf"), 60.0)],
)
def test_a_store_that_asks_for_a_longer_pause_gets_it(retry_after, pause):
    _, waiting, _ = run([ThrottledError("slow down", retry_after=retry_after)])
    assert waiting.pauses == [pause]


@pytest.mark.parametrize("seed", range(20))
def test_by_default_a_store_that_was_gone_for_four_minutes_is_found_again_within_seconds(seed):
    waiting, draw = Waiting(), random.Random(seed).uniform

    def ask():
        if waiting.now < 240.0:
            raise ConnectionLostError("refused", certain=True)
        return "done"

    assert Retrier(RetryPolicy(), waiting, clock=waiting.clock, draw=draw).call(ask) == "done"
    assert waiting.now < 250.0


@given(
    failures=st.integers(0, 12),
    attempts=st.integers(1, 12),
    deadline=st.floats(0, 100),
    base=st.floats(0, 10),
    more=st.floats(0, 10),
    seconds=st.floats(0, 20),
    draw=st.randoms(use_true_random=False),
)
def test_limits_hold_for_any_policy(failures, attempts, deadline, base, more, seconds, draw):
    result, waiting, script = run(
        [ServerError("busy") for _ in range(failures)],
        attempts=attempts,
        deadline=deadline,
        base=base,
        cap=base + more,
        seconds=seconds,
        draw=draw.uniform,
    )
    assert script.calls <= attempts
    assert all(0 <= pause <= base + more for pause in waiting.pauses)
    last_try_began = waiting.now - seconds
    assert script.calls == 1 or last_try_began <= seconds + deadline + 1e-6
    assert (result == "done") == (script.calls == failures + 1)


@pytest.mark.parametrize("waits", [0, 2])
def test_a_cancelled_group_begins_nothing_and_ends_a_wait(waits):
    result, waiting, script = run([ServerError("busy")] * 5, cancel_at=waits)
    assert isinstance(result, TransferCancelledError)
    assert script.calls == len(waiting.pauses) == waits


def test_cleaning_up_does_not_delay_the_error_for_long():
    policy = RetryPolicy(attempts=100, deadline=3600.0, base=0.0, cap=0.0)
    calls = []

    def fail():
        calls.append(1)
        raise ServerError("busy")

    with pytest.raises(ServerError):
        Retrier.for_cleanup(policy).call(fail)
    assert len(calls) == 3
    assert Retrier.for_cleanup(policy).policy.deadline == 10
    assert Retrier.for_cleanup(RetryPolicy(attempts=2, deadline=3)).policy.deadline == 3


# a load whose checkpoint is replaced meanwhile


class Loading:
    """A load that fails with these errors, and then returns; and the pauses before it goes on."""

    def __init__(self, monkeypatch, *errors):
        self.errors, self.pauses = list(errors), []
        monkeypatch.setattr(retry.time, "sleep", self.pauses.append)

    def __call__(self):
        if self.errors:
            raise self.errors.pop(0)
        return "loaded"


def replaced(**context):
    return CheckpointReplacedError("replaced", uri="s3://bucket/run", **context)


def test_a_load_that_is_overtaken_begins_anew_after_longer_and_longer_pauses(monkeypatch):
    loading = Loading(monkeypatch, *(replaced() for _ in range(4)))
    assert retry_if_replaced(loading) == "loaded"
    assert loading.pauses == [0.1, 0.2, 0.4, 0.8]


def test_a_load_that_is_always_overtaken_gives_up(monkeypatch):
    loading = Loading(monkeypatch, *(replaced() for _ in range(9)))
    with pytest.raises(CheckpointReplacedError, match="5 times") as caught:
        retry_if_replaced(loading)
    assert (caught.value.times, caught.value.uri) == (5, "s3://bucket/run")
    assert len(loading.pauses) == 4
    loading = Loading(monkeypatch, caught.value)  # as of a part of a load
    with pytest.raises(CheckpointReplacedError):
        retry_if_replaced(loading)
    assert loading.pauses == []


def test_ranks_that_read_the_same_two_saves_again_are_on_two_stores(monkeypatch):
    one, other = ("a", "b"), ("a", "c")
    loading = Loading(monkeypatch, *(replaced(saves=saves) for saves in (one, other, one, None)))
    assert retry_if_replaced(loading) == "loaded"
    loading = Loading(monkeypatch, replaced(saves=one), replaced(saves=one))
    with pytest.raises(DifferentCheckpointsError, match="endpoint_url"):
        retry_if_replaced(loading)


class Holding:
    """A store with one object, or none."""

    def __init__(self, version):
        self._version = version

    def head(self, key):
        if self._version is None:
            raise ObjectNotFoundError("it is not there")
        return ObjectInfo(key, 1, self._version)


@pytest.mark.parametrize("version", ["1", "2", None])
@pytest.mark.parametrize("known", ["1", None])
def test_a_failure_beside_a_replacement_is_one_of_it(version, known):
    read, failure = ObjectInfo("run/.metadata", 1, "1"), ObjectNotFoundError("gone")
    is_same = version == "1"
    with nullcontext() if is_same else pytest.raises(CheckpointReplacedError) as caught:
        check_unchanged(Holding(version), read, "uri", RetryPolicy(), failure, known_save=known)
    assert is_same or caught.value.saves == (None if known is None else ("1", version))
    assert is_same or caught.value.__cause__ is failure


def waited_for(results, **policy):
    """What was found, and when, by looks that find these one after the other, then nothing."""
    waiting, left = Waiting(), iter(results)
    return retrier_of(waiting, **policy).wait_for(lambda: next(left, None)), waiting


def test_what_appears_later_is_waited_for():
    found, waiting = waited_for([None] * 4 + ["there"], attempts=3)
    assert found == "there"
    assert len(waiting.pauses) == 4


def test_what_never_appears_is_waited_for_until_the_deadline():
    found, waiting = waited_for([], attempts=None, deadline=45.0)
    assert found is None
    assert waiting.now == 45.0
