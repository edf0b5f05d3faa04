"""What all commands share: the app, options, exit codes, and how results are printed."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from cloudckpt._version import __version__
from cloudckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CloudCheckpointError

FAILED, NOTHING_THERE, DAMAGED, INTERRUPTED = 1, 3, 4, 130  # 2 is typer's, for wrong arguments

app = typer.Typer(
    name="cloudckpt",
    help="Look at checkpoints in object stores, verify them and delete them. Options come from the "
    "environment, as everywhere in cloudckpt. The exit code is 0, or 1 for a failure, 2 for wrong "
    "arguments, 3 if there is no checkpoint, 4 if one is damaged, 130 after Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Run = Annotated[str, typer.Argument(help="The folder of a run, e.g. s3://bucket/run.")]
Checkpoint = Annotated[str, typer.Argument(help="A checkpoint, e.g. s3://bucket/run/step-1000.")]
StepName = Annotated[str, typer.Option(help="What the checkpoints of the run are called.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    try:
        app(standalone_mode=True)
    except CheckpointCorruptError as error:
        fail(error, DAMAGED)
    except CheckpointNotFoundError as error:
        fail(error, NOTHING_THERE)
    except CloudCheckpointError as error:
        fail(error, FAILED)


def fail(error: object, code: int) -> NoReturn:
    """Says what went wrong on stderr, and ends the process."""
    print(f"cloudckpt: {error}", file=sys.stderr)
    sys.exit(code)


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
        raise typer.BadParameter("nobody can be asked here: give --yes")
    if not typer.confirm(question):
        raise typer.Exit(FAILED)


def print_json(document: Any) -> None:
    """Prints the result of a command for programs."""
    print(json.dumps(document, indent=2, default=str, allow_nan=True))


def print_rows(names: list[str], rows: list[list[str]], *, right: set[int]) -> None:
    """A table on a terminal; else lines whose fields are separated by tabs."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


@contextmanager
def progress_bar(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """What a transfer tells of its bytes, as a bar on a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda done, total: None
        return
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
