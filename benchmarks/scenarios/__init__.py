"""The situations that are measured, by name, in the order they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.bench import Bench
from benchmarks.rows import Row
from benchmarks.scenarios import (
    fleet,
    https,
    incremental,
    lanes,
    memory,
    plain,
    safetensors,
    shaped,
    stall,
    trainer,
)

Scenario = Callable[[Bench], list[Row]]

SCENARIOS: Mapping[str, Scenario] = {
    "https": https.measure,
    "plain": plain.measure,
    "memory": memory.measure,
    "safetensors": safetensors.measure_models,
    "shaped": shaped.measure,
    "lanes": lanes.measure,
    "incremental": incremental.measure,
    "stall": stall.measure,
    "trainer": trainer.measure,
    "fleet": fleet.measure,
}
