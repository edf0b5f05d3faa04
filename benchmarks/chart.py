"""A picture of the run: CPU time of a save and a load by https, a bar a contender."""

from __future__ import annotations

from html import escape
from pathlib import Path

from benchmarks.contenders import CONTENDERS
from benchmarks.report import Report
from benchmarks.rows import REFERENCE, is_ours

_ACTIONS = {"save": "#2f6fde", "load": "#8fb4f4"}
_NAMES, _BARS, _NUMBERS = 250, 420, 60
"""Widths in pixels."""
_BAR, _GROUP, _TOP = 15, 44, 64
"""Heights in pixels: of a bar, of a contender, of what stands above."""


def draw(report: Report, path: Path) -> None:
    """Writes the picture (SVG).

    Raises:
        ValueError: If nothing was measured by https.
    """
    numbers: dict[str, dict[str, float]] = {}
    for row in report.rows:
        action, _, case = row.case.partition(" ")
        is_shown = row.scenario == "https" and case.endswith(", 8 connections")
        if is_shown and row.metric == "CPU" and row.value is not None:
            numbers.setdefault(row.contender, {})[action] = row.value
    if not numbers:
        raise ValueError("--chart needs the scenario https, and it has no numbers")
    path.write_text(_svg(report, numbers))


def _svg(report: Report, numbers: dict[str, dict[str, float]]) -> str:
    at = report.conditions
    most = max(value for of_one in numbers.values() for value in of_one.values())
    height = _TOP + _GROUP * len(numbers) + 24
    width = _NAMES + _BARS + _NUMBERS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="14" fill="#24292f">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(12, 24, "CPU seconds per GiB over https, of the client process", weight="bold"),
    ]
    for number, (action, colour) in enumerate(_ACTIONS.items()):
        x = 12 + 70 * number
        parts += [_box(x, 38, 12, 12, colour), _text(x + 18, 49, action)]
    for number, (contender, values) in enumerate(sorted(numbers.items(), key=_order)):
        top = _TOP + _GROUP * number
        weight = "bold" if is_ours(contender) else "normal"
        title = "reference client in C" if contender == REFERENCE else CONTENDERS[contender].title
        parts.append(_text(12, top + 22, title, weight=weight))
        for line, (action, colour) in enumerate(_ACTIONS.items()):
            if action in values:
                y, length = top + line * (_BAR + 2), _BARS * values[action] / most
                parts.append(_box(_NAMES, y, round(length, 1), _BAR, colour))
                parts.append(_text(_NAMES + length + 6, y + 12, f"{values[action]:.2f}"))
    made = f"{at.started[:10]}, commit {at.commit}, {at.cores} cores, 8 connections, medians"
    parts += [_text(12, height - 8, made, size=11), "</svg>"]
    return "\n".join(parts) + "\n"


def _order(entry: tuple[str, dict[str, float]]) -> tuple[bool, float]:
    name, values = entry
    return name != REFERENCE, sum(values.values())


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, *, weight: str = "normal", size: int = 14) -> str:
    attributes = f'x="{x:.1f}" y="{y}" font-weight="{weight}" font-size="{size}"'
    return f"<text {attributes}>{escape(text)}</text>"
