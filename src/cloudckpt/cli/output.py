"""Prints results as tables or JSON, and progress as bars or lines."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal as as_size
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

_BEFORE_ESTIMATE = 5.0  # seconds of a transfer, before which an estimate would be far off
_BETWEEN_LINES = 10.0  # seconds between two lines about progress


def safe(text: str) -> str:
    """Returns a text with its unprintable characters escaped as in Python.

    So a name from a store can neither move a terminal's cursor nor look like another field or line.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def print_json(document: Any) -> None:
    """Prints the result of a command as JSON; values of types that JSON lacks become text."""
    print(json.dumps(_strict(document), indent=2, default=str, allow_nan=False))


def _strict(value: Any) -> Any:
    """Replaces the floats that JSON lacks by ``"nan"``, ``"inf"`` and ``"-inf"``, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


class Size(int):
    """A number of bytes that a table shows with a unit."""

    def __str__(self) -> str:
        return as_size(self)


class Moment(float):
    """A time in seconds since 1970 that a table shows as an age, such as ``3 h``."""

    def __str__(self) -> str:
        seconds = time.time() - self
        for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
            if seconds >= 2 * size:
                return f"{int(seconds // size)} {unit}"
        return f"{max(int(seconds), 0)} s"


def print_table(
    rows: Sequence[Mapping[str, object]], styles: Mapping[str, str] | None = None
) -> None:
    """Prints a table with columns on a terminal, elsewhere lines of tab-separated fields.

    Args:
        rows: The rows, each with its fields by column head; heads are shown on a terminal only.
            Numbers are aligned to the right; None is an empty field.
        styles: Maps a text to the style of rows that have a field with exactly this text.
    """
    fields = [["" if cell is None else safe(str(cell)) for cell in row.values()] for row in rows]
    if not sys.stdout.isatty():
        for row in fields:
            print("\t".join(row))
        return
    if not rows:
        return
    console, styles, names = Console(), styles or {}, list(rows[0])
    widths = [max(map(cell_len, column)) for column in zip(names, *fields, strict=True)]
    right = {name for row in rows for name, cell in row.items() if isinstance(cell, (int, float))}
    for number, row in enumerate([names, *fields]):
        padded = []
        for name, field, width in zip(names, row, widths, strict=True):
            gap = " " * (width - cell_len(field))
            padded.append(gap + field if name in right else field + gap)
        style = next((styles[cell] for cell in row if cell in styles), None)
        style = "dim" if number == 0 else style
        console.out("  ".join(padded).rstrip(), style=style, highlight=False)


@contextmanager
def progress_bar(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows a transfer's progress on stderr: a bar on a terminal, elsewhere lines.

    Args:
        what: The name of the activity, such as ``verifying``.
        shown: Whether progress is shown.

    Yields:
        A function to be called with the bytes done and the bytes in all, from any thread.
    """
    if not shown:
        yield lambda done, total: None
    elif not sys.stderr.isatty():
        yield _Lines(what).update
    else:
        columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, _TimeLeft(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


class _TimeLeft(TimeRemainingColumn):
    """The estimated time to the end of a transfer; empty in the first five seconds."""

    def render(self, task: Task) -> Text:
        return super().render(task) if (task.elapsed or 0.0) > _BEFORE_ESTIMATE else Text()


class _Lines:
    """Prints the progress of a transfer as lines, for logs, at most one in ten seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._began = self._told = time.monotonic()

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._told < _BETWEEN_LINES:
                return
            self._told = now
        rate = max(done, 1) / (now - self._began)
        left = round(max(total - done, 0) / rate)
        share = done / total if total else 1
        print(
            f"{self._what}: {as_size(done)} of {as_size(total)} ({share:.0%}), "
            f"{as_size(int(rate))}/s, {left // 60}:{left % 60:02} left",
            file=sys.stderr,
            flush=True,
        )
