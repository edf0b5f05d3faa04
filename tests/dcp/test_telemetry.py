"""Phases become OpenTelemetry spans where its SDK is installed."""

import time

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import events

from .values import numbered


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


def test_a_save_and_a_load_make_spans(place, spans):
    began = time.time_ns()
    place.save({"t": numbered(1000)})
    place.load({"t": torch.zeros(1000)})
    ended = time.time_ns()
    found = {span.name: span for span in spans()}
    names = ("plan", "upload", "commit", "load", "verify")
    assert list(found) == [f"cloudckpt.{name}" for name in names]
    assert len(spans()) == len(names)
    for span in found.values():
        assert span.attributes["cloudckpt.uri"] == place.uri
        assert span.attributes["cloudckpt.rank"] == 0
        assert span.status.status_code is StatusCode.UNSET
        assert began - 1e6 < span.start_time <= span.end_time <= ended
        assert span.instrumentation_scope.name == "cloudckpt"
    for name in ("upload", "load", "verify"):
        assert found[f"cloudckpt.{name}"].attributes["cloudckpt.bytes"] >= 4000
    starts = [
        found[f"cloudckpt.{name}"].start_time for name in ("plan", "upload", "commit", "load")
    ]
    assert starts == sorted(starts)
    assert found["cloudckpt.plan"].end_time <= found["cloudckpt.commit"].start_time


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_spans_of_a_background_save_stand_beneath_that_of_the_caller(kind, local, provider, spans):
    with provider.get_tracer("training").start_as_current_span("step") as step:
        future = cloudckpt.async_save(
            {"t": numbered(1000)},
            checkpoint_id=local.uri,
            config=local.config,
            async_checkpointer_type=kind,
        )
    future.result(60.0)
    names = [span.name for span in spans()]
    assert sorted(names) == sorted(
        ["step", *(f"cloudckpt.{name}" for name in ("stage", "plan", "upload", "commit"))]
    )
    own = step.get_span_context().span_id
    assert {span.parent.span_id for span in spans() if span.name != "step"} == {own}
