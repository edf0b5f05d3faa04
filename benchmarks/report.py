"""The run on paper: a Markdown table a scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.conditions import Conditions
from benchmarks.contenders import CONTENDERS
from benchmarks.rows import Limits, Row, is_ours

_TITLES: Mapping[str, str] = {
    "https": "One process by https, through nginx on the same machine",
    "plain": "One process, a link that is never the bottleneck",
    "memory": "Extra memory by checkpoint size",
    "safetensors": "Models in safetensors files",
    "shaped": "10 MB/s a connection, 50 ms to the first byte, 8 connections",
    "lanes": "How many connections: by themselves, over the best of 4 to 64",
    "stall": "Time until async_save returns",
    "trainer": "Training steps during an upload at 200 MB/s",
    "fleet": "Coordination of many ranks",
}


@dataclass(frozen=True)
class Report:
    """A finished run."""

    conditions: Conditions
    rows: Sequence[Row]
    failures: Mapping[tuple[str, str], str]
    """By scenario and contender: why there are no numbers."""
    quick: bool

    @property
    def good(self) -> bool:
        """Whether every limit holds and cloudckpt failed nowhere."""
        return all(row.passed is not False for row in self.rows) and not any(
            is_ours(contender) for _, contender in self.failures
        )

    def markdown(self) -> str:
        """Returns the tables, one a scenario."""
        lines = ["# Benchmark results", "", *self._preamble(), ""]
        for scenario, rows in groupby(self.rows, key=lambda row: row.scenario):
            table = _plain_table if scenario == "plain" else _table
            lines += [f"## {_TITLES.get(scenario, scenario)}", "", *table(list(rows)), ""]
        if self.failures:
            lines += ["## Without numbers", ""]
            for (scenario, contender), why in self.failures.items():
                last = why.strip().splitlines()[-1]
                lines.append(f"- {scenario}, {_title(contender)}: {last}")
            lines.append("")
        return "\n".join(lines)

    def _preamble(self) -> list[str]:
        at = self.conditions
        versions = ", ".join(f"{name} {version}" for name, version in at.versions.items())
        kind = "A quick run: small sizes, one round, for trying things out. " if self.quick else ""
        return [
            f"{kind}{at.started}, commit {at.commit}, {at.cores} cores of {at.cpu}, "
            f"{at.memory_gib} GiB, Linux {at.kernel}, Python {at.python}, "
            f"load average {at.load_before} before the run, {at.load_after} after.",
            "",
            f"{versions}.",
            "",
            "Numbers are medians; CPU counts the client process alone, all its threads. "
            f"A limit is what cloudckpt must reach (CPU: at most {Limits.CPU:g}x the reference's, "
            f"and {Limits.CPU_AIM:g}x is the aim); other contenders are not judged.",
        ]


def _plain_table(rows: Sequence[Row]) -> list[str]:
    """One line a contender and action, as all have the same three measurements."""
    lines = [
        "| case | contender | CPU, s/GiB | range | to reference | wall, s/GiB | extra memory | |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for (case, contender), group in groupby(rows, key=lambda row: (row.case, row.contender)):
        found = {row.metric: row for row in group}
        cpu, wall, memory = (found[name] for name in ("CPU", "wall", "extra memory"))
        verdicts = [
            f"{row.metric} {_verdict(row)} (limit {_limit(row)})"
            for row in (cpu, memory)
            if row.passed is not None
        ]
        ratio = "" if cpu.ratio is None else f"{cpu.ratio:.2f}x"
        lines.append(
            f"| {case} | {_title(contender)} | {_number(cpu.value)} | {_range(cpu)} | {ratio} | "
            f"{_number(wall.value)} | {_value(memory)} | {', '.join(verdicts)} |"
        )
    return lines


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| case | contender | measured | median | range | ratio | limit | |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.case} | {_title(row.contender)} | {row.metric} | {_value(row)} | "
            f"{_range(row)} | {_ratio(row)} | {_limit(row)} | "
            f"{'; '.join(part for part in (_verdict(row), row.note) if part)} |"
        )
    return lines


def _verdict(row: Row) -> str:
    return {True: "pass", False: "**FAIL**", None: ""}[row.passed]


def _title(contender: str) -> str:
    return CONTENDERS[contender].title if contender in CONTENDERS else contender


def _value(row: Row) -> str:
    return f"{_number(row.value)} {row.unit}".strip()


def _range(row: Row) -> str:
    if len(row.samples) < 2:
        return ""
    return f"{_number(min(row.samples))}-{_number(max(row.samples))}"


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    shown = f"{row.ratio:.2f}" if row.ratio >= 0.01 else f"{row.ratio:.1g}"
    return f"{shown}x {row.baseline}".strip()


def _limit(row: Row) -> str:
    if row.limit is None:
        return ""
    return f"{row.limit:g}x" if row.ratio is not None else f"{row.limit:g} {row.unit}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
