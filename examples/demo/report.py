"""What is shown on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import mean

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from messages import Check, Phase

__all__ = ["Screen", "sparkline"]

_LEVELS = "▁▂▃▄▅▆▇█"
_COLOURS = ("red", "yellow", "green")
_GIB = 1024**3
_HEADINGS = (
    "\nranks", "\nsteps", "resumed\nfrom", "\nloss", "stall\nms", "steps\nslower",
    "upload\ns", "\nMB", "CPU\ns/GiB",
)  # fmt: skip


def _named(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


class Screen:
    """Progress while the demo runs, and the summary.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Prints a line above the progress bars."""
        self._console.print(text, highlight=False)

    @contextmanager
    def follow(self, phase: Phase) -> Iterator[PhaseBar]:
        """Shows a bar for a phase until the end of the ``with`` block; the bar stays."""
        columns = (
            TextColumn("{task.description:>7}"),
            BarColumn(30),
            TextColumn("step"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            bar = PhaseBar(progress, phase)
            yield bar
            bar.update(done=True)

    def summarize(self, phases: Sequence[Phase], checks: Sequence[Check]) -> None:
        """Prints the table of the phases, the curve of the loss, and the checks."""
        self._console.print()
        self._console.print(_table(phases))
        self._console.print(_curves(phases, self._console.width))
        self._console.print()
        grid = Table.grid(padding=(0, 1))
        for check in checks:
            mark, style = ("✓", "green") if check.holds else ("✗", "bold red")
            grid.add_row(
                Text(mark, style),
                Text.assemble((check.claim, style), "\n", (check.evidence, "dim")),
            )
        self._console.print(grid)


class PhaseBar:
    """The line of one phase."""

    def __init__(self, progress: Progress, phase: Phase) -> None:
        self._progress = progress
        self._phase = phase
        name = _named(phase.ranks)
        self._task = progress.add_task(name, total=phase.last_step, note="starting")

    def update(self, *, done: bool = False) -> None:
        """Shows what the phase has recorded since."""
        phase = self._phase
        step = max(phase.losses, default=phase.resumed.step if phase.resumed else 0)
        notes = []
        if phase.losses:
            notes.append(f"loss {phase.losses[step]:.3f}")
        if phase.committed:
            notes.append(f"saved step {phase.committed[-1]}")
        if phase.killed:
            notes.append("[red]killed[/red]")
        note = ", ".join(notes) or "starting"
        self._progress.update(self._task, completed=step, note=note, refresh=done)
        if done:
            self._progress.stop_task(self._task)


def _table(phases: Sequence[Phase]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), caption_justify="left", caption_style="dim"
    )
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for phase in phases:
        first, last = min(phase.losses), max(phase.losses)
        resumed, measured = phase.resumed, phase.measured
        table.add_row(
            str(phase.ranks),
            f"{first}-{last}" + (" ✗" if phase.killed else ""),
            f"step {resumed.step}" if resumed else "",
            f"{phase.losses[first]:.2f} → {phase.losses[last]:.2f}",
            f"{mean(phase.stalls) * 1e3:.0f}" if phase.stalls else "",
            f"{phase.inflation:+.0%}" if phase.inflation is not None else "",
            f"{phase.upload_seconds:.2f}" if phase.committed else "",
            f"{phase.checkpoint_bytes / 1e6:.0f}" if phase.committed else "",
            f"{measured.cpu_seconds / measured.bytes * _GIB:.2f}" if measured else "",
        )
    table.caption = (
        "stall: until save returns; steps slower: training steps during a save, against those "
        "without, where ranks and saving processes share the cores; upload: by the process beside "
        "each rank; MB: of a checkpoint; CPU: of the whole process in one synchronous save at the "
        "end, where so few bytes weigh less than the fixed costs of a save"
    )
    return table


def _curves(phases: Sequence[Phase], width: int) -> Text:
    """One row of bars for each phase over a common axis of steps."""
    label = 9
    steps = max(max(phase.losses) for phase in phases)
    per_column = -(-steps // max(10, width - label - 10))
    losses = [loss for phase in phases for loss in phase.losses.values()]
    text = Text.assemble(("loss by step", "bold"), ("   ▶ resumed   ✗ killed\n", "dim"))
    for phase, colour in zip(phases, _COLOURS, strict=False):
        bars = sparkline(phase.losses, per_column, low=min(losses), high=max(losses))
        end = "✗" if phase.killed else ""
        start = (min(phase.losses) - 1) // per_column
        mark = "▶" if phase.resumed else " "
        text.append(f"{_named(phase.ranks):>{label - 2}} ", style="default")
        text.append(" " * start + mark + bars.strip(), style=colour)
        text.append(f"{end} {phase.losses[max(phase.losses)]:.2f}\n", style=colour)
    text.append(" " * label + f"1{steps:>{max(1, -(-steps // per_column) - 1)}}", style="dim")
    return text


def sparkline(losses: Mapping[int, float], per_column: int, *, low: float, high: float) -> str:
    """A bar for each ``per_column`` steps from step 1 on; blanks where there are none."""
    bars = []
    for start in range(1, max(losses) + 1, per_column):
        found = [losses[at] for at in range(start, start + per_column) if at in losses]
        share = (mean(found) - low) / (high - low or 1.0) if found else 0.0
        bars.append(_LEVELS[round(share * (len(_LEVELS) - 1))] if found else " ")
    return "".join(bars)
