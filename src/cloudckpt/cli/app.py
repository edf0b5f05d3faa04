"""What all commands share: the app, options, exit codes, and how results are printed."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal as as_size
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cloudckpt._version import __version__
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ConfigError,
    InvalidURIError,
)

FAILED, WRONG, NOTHING_THERE, DAMAGED, DIFFERENT = 1, 2, 3, 4, 5
"""Exit codes; `WRONG` is also typer's for wrong arguments, and 130 is its for Ctrl-C."""

_BETWEEN_LINES = 10.0  # seconds between two lines about progress

app = typer.Typer(
    name="cloudckpt",
    help="Look at checkpoints in object stores, verify, compare, copy and delete them. Options "
    "come from the environment, as everywhere in cloudckpt. The exit code is 0, or 1 for a "
    "failure, 2 for wrong arguments or options, 3 if there is no checkpoint, 4 if one is damaged, "
    "5 if two differ, 130 after Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which joins the lines of a paragraph
)

Run = Annotated[str, typer.Argument(help="The folder of a run, e.g. s3://bucket/run.")]
Checkpoint = Annotated[str, typer.Argument(help="A checkpoint, e.g. s3://bucket/run/step-1000.")]
StepName = Annotated[str, typer.Option(help="The name pattern of the run's checkpoints.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch, where there is none
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by >&-: what is printed there goes nowhere
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names that its encoding does not have
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except CloudCheckpointError as error:
        fail(error, code_of(error))
    except BrokenPipeError:  # who reads has seen enough; nor is there anybody to be told
        sys.stdout = sys.stderr
        sys.exit(FAILED)
    except OSError as error:
        sys.stdout = sys.stderr  # what it still holds is not written at exit either
        fail(f"the system has refused something, such as writing the output: {error}", FAILED)


def fail(error: object, code: int) -> NoReturn:
    """Says what went wrong on stderr, and ends the process."""
    say(error)
    sys.exit(code)


def say(error: object) -> None:
    """Says what went wrong on stderr."""
    print(f"cloudckpt: {safe(str(error))}", file=sys.stderr, flush=True)


def code_of(error: CloudCheckpointError) -> int:
    """The exit code of a command that has failed."""
    codes = {
        CheckpointCorruptError: DAMAGED,
        CheckpointNotFoundError: NOTHING_THERE,
        ConfigError: WRONG,
        InvalidURIError: WRONG,
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), FAILED)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"cloudckpt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def confirm(question: str, yes: bool) -> None:
    """Asks on a terminal, unless the user has said yes already.

    Raises:
        typer.BadParameter: If there is nobody to ask.
        typer.Exit: If the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("this is not a terminal, so nothing was deleted: give --yes")
    if not typer.confirm(question):
        raise typer.Exit(FAILED)


def safe(text: str) -> str:
    """A text that others have written, such as a name, on one line and without control characters.

    They are shown as Python writes them, so that a name can neither move a terminal's cursor nor
    pass for another field or line.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def print_json(document: Any) -> None:
    """Prints the result of a command for programs: dicts, lists and plain values."""
    print(json.dumps(_strict(document), indent=2, default=str, allow_nan=False))


def _strict(value: Any) -> Any:
    """What JSON has no numbers for becomes ``"nan"``, ``"inf"`` and ``"-inf"``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _strict(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(one) for one in value]
    return value


def print_rows(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[int] | set[int] = frozenset(),
    styles: Mapping[str, str] | None = None,
) -> None:
    """Prints columns on a terminal, and elsewhere lines whose fields are separated by tabs.

    Args:
        names: The heads of the columns; shown on a terminal only.
        rows: The fields, as others may have written them.
        right: The columns that are aligned to the right.
        styles: The style of a whole row that has this text in one of its fields.
    """
    fields = [[safe(field) for field in row] for row in rows]
    if not sys.stdout.isatty():
        for row in fields:
            print("\t".join(row))
        return
    console, styles = Console(), styles or {}
    widths = [max(map(cell_len, column)) for column in zip(names, *fields, strict=True)]
    for number, row in enumerate([list(names), *fields]):
        padded = []
        for index, field in enumerate(row):
            gap = " " * (widths[index] - cell_len(field))
            padded.append(gap + field if index in right else field + gap)
        style = "dim" if number == 0 else next((styles[one] for one in row if one in styles), None)
        console.out("  ".join(padded).rstrip(), style=style, highlight=False)


@contextmanager
def progress_bar(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows the bytes of a transfer: a bar on a terminal, and else a line now and then, on stderr.

    Args:
        what: What is done, such as ``verifying``.
        shown: Whether anything is shown.

    Yields:
        What is to be called with the bytes that are done and those that there are, by any thread.
    """
    if not shown:
        yield lambda done, total: None
    elif not sys.stderr.isatty():
        yield _Lines(what).update
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Tells of a transfer in lines, for logs; the first one when it has taken a while."""

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
