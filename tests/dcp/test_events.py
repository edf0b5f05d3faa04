"""What saving and loading tell while they do it."""

import io
import logging
import sys

import pytest
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import events
from cloudckpt.config import MIB
from cloudckpt.errors import ServerError
from cloudckpt.transfer import stats as stats_module
from cloudckpt.transfer.stats import TransferStats

from .values import numbered

PATIENCE = 150.0


@pytest.fixture
def heard():
    found: list[events.Event] = []
    unsubscribe = events.subscribe(found.append)
    yield found
    unsubscribe()


def phases(found) -> list[str]:
    return [event.phase for event in found if event.phase != "progress"]


@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_an_asynchronous_save_has_a_timeline(local, kind):
    future = cloudckpt.async_save(
        {"t": numbered(1000)},
        checkpoint_id=local.uri,
        config=local.config,
        async_checkpointer_type=kind,
    )
    future.result(PATIENCE)
    assert phases(future.timeline.events) == ["stage", "plan", "upload", "commit"]
    table = future.timeline.table()
    assert all(phase in table for phase in ("stage", "plan", "upload", "commit"))


def test_retries_and_throttling_are_told(heard):
    stats = TransferStats("memory://x/run", 3)
    stats.add_retry(ServerError("inside"))
    stats.add_retry(cloudckpt.errors.ThrottledError("slow down"))
    assert [(event.phase, event.rank, event.detail) for event in heard] == [
        ("retry", 3, "ServerError"),
        ("throttle", 3, "ThrottledError"),
    ]


def test_progress_is_told_some_times_a_second(heard, monkeypatch):
    monkeypatch.setattr(stats_module, "_BETWEEN_EVENTS", 0.0)
    stats = TransferStats("memory://x/run", 0, total=3 * MIB)
    for _ in range(3):
        stats.add_bytes(MIB)
    assert [(event.nbytes, event.total) for event in heard] == [
        (MIB, 3 * MIB),
        (2 * MIB, 3 * MIB),
        (3 * MIB, 3 * MIB),
    ]


def test_a_listener_that_fails_harms_nothing(local, caplog):
    def fail(event):
        raise ArithmeticError("no")

    unsubscribe = events.subscribe(fail)
    try:
        local.save({"t": numbered(10)})
    finally:
        unsubscribe()
    assert "a listener of events raised an error" in caplog.text


def test_each_subscription_ends_alone():
    found: list[events.Event] = []
    event = events.Event(phase="plan", uri="memory://x/run", rank=0, began=0.0)
    one, other = events.subscribe(found.append), events.subscribe(found.append)
    one()
    one()
    events.emit(event)
    other()
    events.emit(event)
    assert found == [event]


def test_who_wants_no_progress_is_told_of_none_and_causes_none(monkeypatch):
    monkeypatch.setattr(stats_module, "_BETWEEN_EVENTS", 0.0)
    found: list[events.Event] = []
    unsubscribe = events.subscribe(found.append, progress=False)
    try:
        assert not events.has_listeners()
        stats = TransferStats("memory://x/run", 0)
        stats.add_bytes(MIB)
        stats.add_retry(ServerError("inside"))
    finally:
        unsubscribe()
    assert phases(found) == ["retry"]
    assert len(found) == 1


def test_events_are_logged(local, caplog):
    caplog.set_level(logging.DEBUG, "cloudckpt.events")
    local.save({"t": numbered(10)})
    told = [record for record in caplog.records if record.name == "cloudckpt.events"]
    assert [record.cloudckpt_event.phase for record in told] == ["plan", "upload", "commit"]
    assert local.uri in told[0].getMessage()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_shows_what_was_saved(local, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with events.progress_bar():
        local.save({"t": numbered(10)})
    assert "rank 0" in sys.stderr.getvalue()
