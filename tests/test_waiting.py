"""What is said in the log while a store fails or is silent, on a clock that the test turns."""

import contextvars
import math

import pytest

from cloudckpt import waiting as module
from cloudckpt.config import RetryPolicy
from cloudckpt.errors import AccessDeniedError, ConnectionLostError, ThrottledError
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.retry import Retrier
from cloudckpt.waiting import Waiting, current
from dcp.children import in_a_child
from support.logs import warnings_of_ours

URI = "s3://bucket/run/step-7/__0_ab.distcp"


class Clock(Cancellation):
    """Time that passes when somebody waits."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def wait(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines(clock):
    """Each line, and when it was written."""
    found = []
    with warnings_of_ours(lambda text: found.append((clock.now, text))):
        yield found


def refused(**context):
    return ConnectionLostError("PUT got no answer", uri=URI, cause="refused", **context)


def retrier(clock, **policy):
    values = {"deadline": 300.0, "base": 1.0, "cap": 1.0, **policy}
    return Retrier(RetryPolicy(**values), clock, clock=clock, draw=lambda low, high: high)


def fail_until(clock, end, error=refused):
    def operation():
        if clock.now < end:
            raise error()
        return "done"

    return operation


@pytest.mark.parametrize(("end", "warned"), [(9.0, 0), (250.0, 6)])
def test_what_fails_is_said_after_ten_seconds_and_then_ever_more_seldom(clock, lines, end, warned):
    assert retrier(clock).call(fail_until(clock, end)) == "done"
    assert [when for when, _ in lines] == [10.0, 20.0, 40.0, 80.0, 140.0, 200.0][:warned]


def test_a_long_pause_that_the_store_asks_for_is_said_before_it_begins(clock, lines):
    def slow_down():
        return ThrottledError("slow down", uri=URI, retry_after=60.0)

    retrier(clock).call(fail_until(clock, 50.0, slow_down))
    assert [when for when, _ in lines] == [0.0]


def test_what_is_refused_for_good_is_raised_and_not_waited_for(clock, lines):
    def refuse():
        clock.now += 60.0
        raise AccessDeniedError("no", uri=URI)

    with pytest.raises(AccessDeniedError):
        retrier(clock).call(refuse)
    assert lines == []


def test_requests_that_fail_together_share_their_lines(clock, lines):
    requests = [Waiting(300.0, clock) for _ in range(16)]
    contexts = [contextvars.copy_context() for _ in requests]
    for context, request in zip(contexts, requests, strict=True):
        context.run(request.__enter__)
    for _ in range(25):
        clock.now += 1.0
        for request in requests:
            request.failed(refused(), left=300.0, pause=1.0)
    for context, request in zip(contexts, requests, strict=True):
        context.run(request.__exit__)
    assert [when for when, _ in lines] == [10.0, 20.0]
    assert "other operations that wait: 15" in lines[-1][1]


def test_a_try_that_moves_no_byte_is_said_with_its_request(clock, lines):
    with Waiting(300.0, clock) as waiting:
        assert current() is waiting
        waiting.sends(f"PUT {URI}")
        for second in range(1, 60):
            clock.now = float(second)
            waiting.is_silent(clock.now)
    assert [when for when, _ in lines] == [10.0, 20.0, 40.0]
    assert f"PUT {URI}: no byte has moved for 10 s" in lines[0][1]
    assert "gives up 300 s after the first failed try" in lines[0][1]
    assert current() is None


def test_what_has_ended_is_not_said_to_be_silent(clock, lines):
    with Waiting(300.0, clock) as waiting:
        pass
    clock.now = 60.0
    waiting.is_silent(60.0)
    assert lines == []


def test_a_forked_child_does_not_wait_for_what_its_parent_waits_for(monkeypatch):
    with Waiting(300.0) as waiting:
        waiting.failed("refused", left=290.0, pause=1.0)
        monkeypatch.setattr(module._lines, "_succeeded", -math.inf)
        assert module.is_stuck()
        assert not in_a_child("fork", module.is_stuck)
        assert module.is_stuck()
