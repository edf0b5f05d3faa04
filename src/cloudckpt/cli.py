"""The command ``cloudckpt``: looks at runs and checkpoints, verifies them, and deletes them."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from enum import Enum
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.filesize import decimal as as_size
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

from cloudckpt import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    MissingDependencyError,
    __version__,
)
from cloudckpt.runs import catalog, contents, deleting, sweeping
from cloudckpt.runs.steps import DEFAULT_PATTERN

__all__ = ["main"]

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


class Mode(str, Enum):
    """Which values of a metric are the best."""

    min = "min"
    max = "max"


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
        _fail(error, DAMAGED)
    except CheckpointNotFoundError as error:
        _fail(error, NOTHING_THERE)
    except CloudCheckpointError as error:
        _fail(error, FAILED)


def _fail(error: object, code: int) -> None:
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


@app.command()
def ls(run: Run, step_name: StepName = DEFAULT_PATTERN, as_json: Json = False) -> None:
    """List the checkpoints of a run: step, age, size, and whether each is committed or torn."""
    found = catalog.list_checkpoints(run, step_name=step_name)
    if as_json:
        _print_json([dataclasses.asdict(one) for one in found])
        return
    now = datetime.now(timezone.utc).timestamp()
    rows = [
        [
            "-" if one.step is None else str(one.step),
            "committed" if one.is_committed else "torn",
            as_size(one.nbytes),
            "" if one.modified is None else _age(now - one.modified),
            one.uri,
        ]
        for one in found
    ]
    _print_rows(["step", "state", "size", "age", "checkpoint"], rows, right={0, 2, 3})


@app.command()
def latest(run: Run, step_name: StepName = DEFAULT_PATTERN) -> None:
    """Print the newest committed checkpoint of a run."""
    found = catalog.latest(run, step_name=step_name)
    if found is None:
        raise CheckpointNotFoundError("there is no committed checkpoint in this run", uri=run)
    print(found)


@app.command()
def inspect(
    checkpoint: Checkpoint,
    pattern: Annotated[
        str, typer.Argument(help="Which names, e.g. 'model.*'; * stands for any text.")
    ] = "*",
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: names, shapes, types, sizes, and what was noted with it."""
    found = contents.inspect(checkpoint)
    items = [item for item in found.items if fnmatchcase(item.name, pattern)]
    if as_json:
        document = {
            "uri": found.uri,
            "has_checksums": found.has_checksums,
            "notes": dataclasses.asdict(found.notes),
            "items": [dataclasses.asdict(item) for item in items],
        }
        _print_json(document)
        return
    rows = [
        [
            item.name,
            "value" if item.dtype is None else item.dtype,
            "" if item.shape is None else " x ".join(map(str, item.shape)) or "scalar",
            as_size(item.nbytes),
            str(item.chunks),
        ]
        for item in items
    ]
    _print_rows(["name", "type", "shape", "size", "chunks"], rows, right={3, 4})
    print(f"{len(items)} entries, {as_size(sum(item.nbytes for item in items))}")
    if not found.has_checksums:
        print("It has no checksums: it was not written by cloudckpt.")
    if found.notes.step is not None:
        print(f"step {found.notes.step}")
    for name, value in found.notes.metrics.items():
        print(f"{name} = {value:g}")


@app.command()
def verify(checkpoint: Checkpoint, as_json: Json = False, quiet: Quiet = False) -> None:
    """Read all of a checkpoint and compare each block with its checksum."""
    with _progress("verifying", shown=not (quiet or as_json)) as progress:
        found = contents.verify(checkpoint, progress=progress)
    if as_json:
        _print_json(dataclasses.asdict(found))
        return
    what = "as it was written" if found.has_checksums else "there; it has no checksums to compare"
    print(f"{checkpoint}: all of it is {what} ({found.items} items, {as_size(found.nbytes)})")


@app.command()
def rm(
    checkpoints: Annotated[list[str], typer.Argument(help="Checkpoints to delete.")],
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Delete checkpoints: first what makes them visible, then their data, and nothing else."""
    _confirm(f"Delete {_counted(checkpoints)}?", yes)
    for checkpoint in checkpoints:
        deleting.delete(checkpoint)
        if not quiet:
            print(f"deleted {checkpoint}")


@app.command()
def prune(
    run: Run,
    max_to_keep: Annotated[int, typer.Option(help="Keep the newest, or the best, so many.")],
    keep_period: Annotated[
        Optional[int],  # noqa: UP045 - typer reads it, on Python 3.10 too
        typer.Option(help="Keep the steps that this divides, too."),
    ] = None,
    best_metric: Annotated[
        Optional[str],  # noqa: UP045 - see above
        typer.Option(help="Keep the best by this metric instead of the newest."),
    ] = None,
    best_mode: Annotated[Mode, typer.Option(help="Which values of it are the best.")] = Mode.min,
    step_name: StepName = DEFAULT_PATTERN,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Delete the checkpoints of a run that are not to be kept; never the newest committed one."""
    unneeded = deleting.unneeded(
        run,
        max_to_keep=max_to_keep,
        keep_period=keep_period,
        best_metric=best_metric,
        best_mode=best_mode.value,
        step_name=step_name,
    )
    if dry_run or not unneeded:
        for checkpoint in unneeded:
            print(f"would delete {checkpoint}")
        if not unneeded and not quiet:
            print("nothing is to be deleted")
        return
    rm(unneeded, yes=yes, quiet=quiet)


@app.command()
def sweep(
    run: Run,
    older_than: Annotated[
        float,
        typer.Option(min=0, help="Hours; less than a day only if no job is saving there."),
    ] = sweeping.LEFTOVERS_AGE / 3600,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Delete what saves that were killed have left: data of no checkpoint, and open uploads."""
    found = sweeping.find_leftovers(run, older_than=older_than * 3600)
    for uri in found.unread:
        print(f"cloudckpt: {uri} can't be read: all beside it stays", file=sys.stderr)
    what = (
        f"{len(found.objects)} objects ({as_size(found.nbytes)}) and {len(found.uploads)} uploads"
    )
    if dry_run:
        for uri in (*found.objects, *found.uploads):
            print(f"would delete {uri}")
    elif found.objects or found.uploads:
        _confirm(f"Delete {what} in {run}?", yes)
        sweeping.sweep(run, older_than=older_than * 3600)
        if not quiet:
            print(f"deleted {what}")
    elif not quiet:
        print("nothing is left over")


@app.command()
def demo(
    uri: Annotated[
        Optional[str],  # noqa: UP045 - see above
        typer.Option(
            help="Use this bucket, e.g. s3://bucket/path, instead of an embedded S3 server."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=6, help="Steps to train.")] = 48,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the checkpoints in the bucket of --uri.")
    ] = False,
) -> None:
    """Train a small GPT, kill it in the middle of a save, and resume on more and fewer ranks.

    Needs no account and no network unless --uri is given.
    """
    if keep and uri is None:
        raise typer.BadParameter("--keep needs --uri: the embedded server keeps nothing")
    _require("demo", "moto", "flask", "boto3", "numpy")

    from cloudckpt.demo.children import ChildError
    from cloudckpt.demo.run import run

    try:
        passed = run(uri, steps=steps, keep=keep, console=Console())
    except ChildError as error:
        _fail(f"the demo failed: {error}", FAILED)
    if not passed:
        _fail("the demo failed: a check marked with ✗ above did not hold", FAILED)


def _require(extra: str, *packages: str) -> None:
    """Checks that the packages of an extra are installed.

    Raises:
        MissingDependencyError: If one is not.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"this command needs {', '.join(missing)}; "
            f"install it with: pip install 'cloudckpt[{extra}]'"
        )


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody can be asked here: give --yes")
    if not typer.confirm(question):
        raise typer.Exit(FAILED)


def _counted(checkpoints: list[str]) -> str:
    if len(checkpoints) == 1:
        return checkpoints[0]
    return f"{len(checkpoints)} checkpoints, from {checkpoints[0]} to {checkpoints[-1]}"


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, default=str, allow_nan=True))


def _print_rows(names: list[str], rows: list[list[str]], *, right: set[int]) -> None:
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


def _age(seconds: float) -> str:
    """Such as ``3 h``; what a clock that is ahead says is ``0 s``."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"


@contextmanager
def _progress(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
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
