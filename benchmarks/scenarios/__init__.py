"""The situations that are measured, by name, in the order they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.bench import Bench
from benchmarks.rows import Row
from benchmarks.scenarios import (
    dialects,
    fleet,
    https,
    incremental,
    lanes,
    many_small,
    memory,
    moving,
    plain,
    resharding,
    safetensors,
    shaped,
    stall,
    trainer,
)

Scenario = Callable[[Bench], list[Row]]

SCENARIOS: Mapping[str, Scenario] = {
    "https": https.measure,
    "plain": plain.measure,
    "dialects": dialects.measure,
    "memory": memory.measure,
    "verify": moving.verify,
    "copy": moving.copy,
    "safetensors": safetensors.measure_models,
    "shaped": shaped.measure,
    "lanes": lanes.measure,
    "incremental": incremental.measure,
    "many-small": many_small.measure,
    "resharding": resharding.measure,
    "stall": stall.measure,
    "trainer": trainer.measure,
    "fleet": fleet.measure,
}
