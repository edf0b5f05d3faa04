"""What saves and loads report: events, log lines, a progress bar, OpenTelemetry spans."""

import io
import logging
import sys
import time

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import events
from cloudckpt.config import MIB
from cloudckpt.errors import ServerError, ThrottledError
from cloudckpt.transfer import stats as stats_module
from cloudckpt.transfer.stats import TransferStats

from .values import numbered

PATIENCE = 150.0


@pytest.fixture
def provider(monkeypatch):
    """A provider of spans; the global one can be set only once in a process."""
    made = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer", made.get_tracer)
    events._tracer.cache_clear()
    yield made
    made.shutdown()
    events._tracer.cache_clear()


@pytest.fixture
def spans(provider):
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter.get_finished_spans


def test_failed_tries_reach_all_listeners_and_progress_those_that_want_it(monkeypatch):
    monkeypatch.setattr(stats_module, "_BETWEEN_EVENTS", 0.0)
    heard: dict[bool, list[events.Event]] = {False: [], True: []}
    ends = [events.subscribe(heard[False].append, progress=False)]
    assert not events.has_listeners()  # no event of progress is made
    ends.append(events.subscribe(heard[True].append))
    stats = TransferStats("memory://x/run", 3, total=2 * MIB)
    for _ in range(2):
        stats.add_bytes(MIB)
    stats.add_retry(ServerError("inside"))
    stats.add_retry(ThrottledError("slow down"))
    for end in ends:
        end()
    tries = [("retry", 3, "ServerError"), ("throttle", 3, "ThrottledError")]
    assert [(event.phase, event.rank, event.detail) for event in heard[False]] == tries
    moved = [(event.nbytes, event.total) for event in heard[True][:2]]
    assert moved == [(MIB, 2 * MIB), (2 * MIB, 2 * MIB)]
    assert heard[True][2:] == heard[False]


def test_a_listener_that_fails_harms_nothing(local, caplog):
    def fail(event):
        raise ArithmeticError("no")

    unsubscribe = events.subscribe(fail)
    try:
        local.save({"t": numbered(10)})
    finally:
        unsubscribe()
    assert "failed; the save or load goes on" in caplog.text


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


def test_events_are_logged(local, caplog):
    caplog.set_level(logging.DEBUG, "cloudckpt.events")
    local.save({"t": numbered(10)})
    logged = [record for record in caplog.records if record.name == "cloudckpt.events"]
    assert [record.cloudckpt_event.phase for record in logged] == ["plan", "upload", "commit"]
    assert local.uri in logged[0].getMessage()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_shows_what_was_saved(local, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with events.progress_bar():
        local.save({"t": numbered(10)})
    assert "rank 0" in sys.stderr.getvalue()


def test_a_save_and_a_load_make_spans(local, spans):
    began = time.time_ns()
    local.save({"t": numbered(1000)})
    local.load({"t": torch.zeros(1000)})
    ended = time.time_ns()
    names = [span.name.removeprefix("cloudckpt.") for span in spans()]
    assert names == ["plan", "upload", "commit", "load", "verify"]
    for name, span in zip(names, spans(), strict=True):
        assert span.attributes["cloudckpt.uri"] == local.uri
        assert span.attributes["cloudckpt.rank"] == 0
        assert began - 1e6 < span.start_time <= span.end_time <= ended
        assert name in ("plan", "commit") or span.attributes["cloudckpt.bytes"] >= 4000
    assert spans()[0].end_time <= spans()[2].start_time


@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_a_background_save_has_a_timeline_and_spans_beneath_that_of_the_caller(
    kind, local, provider, spans
):
    with provider.get_tracer("training").start_as_current_span("step") as step:
        future = cloudckpt.async_save(
            {"t": numbered(1000)},
            checkpoint_id=local.uri,
            config=local.config,
            async_checkpointer_type=kind,
        )
    future.result(PATIENCE)
    phases = ["stage", "plan", "upload", "commit"]
    timeline = future.timeline
    assert [one.phase for one in timeline.events if one.phase != "progress"] == phases
    assert all(phase in timeline.table() for phase in phases)
    own = step.get_span_context().span_id
    beneath = {span.name for span in spans() if span.parent and span.parent.span_id == own}
    assert beneath == {f"cloudckpt.{phase}" for phase in phases}
    assert len(spans()) == 1 + len(phases)
