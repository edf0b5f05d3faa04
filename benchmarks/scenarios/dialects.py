"""`plain` over the protocols of Google and Azure, against the floor in the same rounds."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.rows import FLOOR, OURS_ELSEWHERE, Row
from benchmarks.scenarios.plain import compare


def measure(bench: Bench) -> list[Row]:
    """Returns CPU, wall time and extra memory; the floor keeps its own few requests."""
    return compare(bench, "dialects", bench.taking_part(FLOOR, *OURS_ELSEWHERE))
