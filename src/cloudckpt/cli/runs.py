"""Commands about runs: which checkpoints there are, and which are to go."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from enum import Enum
from typing import Annotated, Optional

import typer
from rich.filesize import decimal as as_size

import cloudckpt
from cloudckpt.cli.app import (
    Checkpoint,
    Json,
    Quiet,
    Run,
    StepName,
    Yes,
    app,
    confirm,
    print_json,
    print_rows,
    safe,
    say,
)
from cloudckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from cloudckpt.runs.steps import DEFAULT_PATTERN

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")]


LEFTOVERS_AGE = 24.0
"""Hours: ``sweeping.LEFTOVERS_AGE``, which takes torch to be asked."""


class Mode(str, Enum):
    """Which values of a metric are the best."""

    min = "min"
    max = "max"


@app.command(rich_help_panel="Runs")
def ls(run: Run, step_name: StepName = DEFAULT_PATTERN, as_json: Json = False) -> None:
    """List the checkpoints of a run: step, age, size, and whether each is committed.

    Abandoned: committed, but not of the training that the next job restores. Torn: an interrupted
    save left it. Pending: its trainers were killed and their saving processes send the rest, which
    the next job or `cloudckpt adopt` commits. Kept: deleted, except for data that later steps
    share; in a run that has such steps, the metadata of every step is read.
    """
    found = cloudckpt.list_checkpoints(run, step_name=step_name)
    shared: dict[str, int | None] = {}
    if any(one.is_referred_to for one in found):
        shared = {one.uri: _shared(one) for one in found if one.is_committed}
    if as_json:
        print_json([{**dataclasses.asdict(one), "shared": shared.get(one.uri, 0)} for one in found])
        return
    now = datetime.now(timezone.utc).timestamp()
    rows = [
        [
            "-" if one.step is None else str(one.step),
            _state(one),
            as_size(one.nbytes),
            *([_size(shared.get(one.uri, 0))] if shared else []),
            "" if one.modified is None else _age(now - one.modified),
            one.uri,
        ]
        for one in found
    ]
    columns = ["step", "state", "size", *(["shared"] if shared else []), "age"]
    right = {0, *range(2, len(columns))}
    if any(one.is_abandoned for one in found):  # then it matters whose each of them is
        columns.append("job")
        rows = [[*row[:-1], one.job[:8], row[-1]] for row, one in zip(rows, found, strict=True)]
    columns.append("checkpoint")
    print_rows(
        columns, rows, right=right, styles=dict.fromkeys(["abandoned", "torn", "pending"], "yellow")
    )
    if not found:
        say(f"there are no checkpoints in {run} whose names are like {step_name!r}")


def _state(one: cloudckpt.runs.CheckpointSummary) -> str:
    if one.is_committed:
        return "abandoned" if one.is_abandoned else "committed"
    if one.is_pending:
        return "pending"
    return "kept" if one.is_referred_to else "torn"


def _shared(one: cloudckpt.runs.CheckpointSummary) -> int | None:
    """The bytes that a checkpoint has in the folders of others; None if it is damaged."""
    try:
        return sum(cloudckpt.inspect(one.uri).shared.values())
    except CheckpointNotFoundError:  # deleted meanwhile
        return 0
    except CheckpointCorruptError:
        return None


def _size(nbytes: int | None) -> str:
    return "?" if nbytes is None else as_size(nbytes)


@app.command(rich_help_panel="Runs")
def adopt(
    checkpoint: Checkpoint,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for processes that are still sending.")
    ] = 60.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Commit a checkpoint whose trainers were killed before they could, if all of it was sent."""
    from cloudckpt.runs import adopting

    adopting.adopt(checkpoint, wait=wait)
    if as_json:
        print_json({"committed": checkpoint})
    elif not quiet:
        print(f"committed {safe(checkpoint)}")


@app.command(rich_help_panel="Runs")
def latest(run: Run, step_name: StepName = DEFAULT_PATTERN, as_json: Json = False) -> None:
    """Print the newest committed checkpoint of a run."""
    found = cloudckpt.latest(run, step_name=step_name)
    if found is None:
        raise CheckpointNotFoundError("there is no committed checkpoint in this run", uri=run)
    if as_json:
        print_json({"uri": found})
    else:
        print(found)


@app.command(rich_help_panel="Runs")
def rm(
    checkpoints: Annotated[list[str], typer.Argument(help="Checkpoints to delete.")],
    yes: Yes = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete checkpoints: first what makes them visible, then their data, and nothing else."""
    confirm(f"Delete {_counted(checkpoints)}?", yes)
    _delete(checkpoints, as_json, quiet)


@app.command(rich_help_panel="Runs")
def prune(
    run: Run,
    max_to_keep: Annotated[int, typer.Option(help="How many to keep: the newest, or the best.")],
    keep_period: Annotated[
        Optional[int],  # noqa: UP045 - typer reads it, on Python 3.10 too
        typer.Option(help="Keep steps that this number divides, too."),
    ] = None,
    best_metric: Annotated[
        Optional[str],  # noqa: UP045 - see above
        typer.Option(help="Keep the best by this metric instead of the newest."),
    ] = None,
    best_mode: Annotated[Mode, typer.Option(help="Which values of it are the best.")] = Mode.min,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Delete abandoned checkpoints, too.")
    ] = False,
    step_name: StepName = DEFAULT_PATTERN,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete the checkpoints of a run that are not to be kept; never the newest committed one."""
    from cloudckpt.runs import deleting

    unneeded = deleting.unneeded(
        run,
        max_to_keep=max_to_keep,
        keep_period=keep_period,
        best_metric=best_metric,
        best_mode=best_mode.value,
        abandoned=abandoned,
        step_name=step_name,
    )
    if not dry_run and unneeded:
        confirm(f"Delete {_counted(unneeded)}?", yes)
        _delete(unneeded, as_json, quiet)
    elif as_json:
        print_json({"dry_run": dry_run, "checkpoints": unneeded})
    else:
        for checkpoint in unneeded:
            print(f"would delete {safe(checkpoint)}")
        if not unneeded and not quiet:
            print("nothing to delete")


@app.command(rich_help_panel="Runs")
def sweep(
    run: Run,
    older_than: Annotated[
        float,
        typer.Option(min=0, help="Hours; less than a day only if no job is saving there."),
    ] = LEFTOVERS_AGE,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete what killed saves have left: data of no checkpoint, and unfinished uploads."""
    from cloudckpt.runs.sweeping import Sweep

    sweep = Sweep(run, older_than=older_than * 3600)
    found = sweep.found()
    for uri in found.unread:
        print(
            f"cloudckpt: {safe(uri)} can't be read, so everything beside it stays", file=sys.stderr
        )
    if not dry_run and (found.objects or found.uploads):
        confirm(f"Delete {_told(found)} in {safe(run)}?", yes)
        if not yes:  # that has taken a while
            sweep.narrow()
        found = sweep.carried_out()
    if as_json:
        print_json({"dry_run": dry_run, **dataclasses.asdict(found)})
    elif not (found.objects or found.uploads):
        if not quiet:
            print("nothing is left over")
    elif dry_run:
        for uri in found.objects:
            print(f"would delete {safe(uri)}")
        for uri in found.uploads:
            print(f"would abort the upload of {safe(uri)}")
    elif not quiet:
        print(f"deleted {_told(found)}")


def _delete(checkpoints: Sequence[str], as_json: bool, quiet: bool) -> None:
    """Deletes checkpoints, and tells of each that was deleted; one that isn't there stops no other.

    Raises:
        CheckpointNotFoundError: At the end, for the first that is not there.
    """
    deleted, missing = [], list[CheckpointNotFoundError]()
    try:
        for checkpoint in checkpoints:
            try:
                cloudckpt.delete(checkpoint)
            except CheckpointNotFoundError as error:
                missing.append(error)
                continue
            deleted.append(checkpoint)
            if not (quiet or as_json):
                print(f"deleted {safe(checkpoint)}")
    finally:
        if as_json:
            print_json({"dry_run": False, "checkpoints": deleted})
    for other in missing[1:]:
        say(other)
    if missing:
        raise missing[0]


def _told(found: "cloudckpt.runs.Leftovers") -> str:
    size = as_size(found.nbytes)
    return f"{len(found.objects)} objects ({size}) and {len(found.uploads)} uploads"


def _counted(checkpoints: list[str]) -> str:
    if len(checkpoints) == 1:
        return safe(checkpoints[0])
    first, last = safe(checkpoints[0]), safe(checkpoints[-1])
    return f"{len(checkpoints)} checkpoints, from {first} to {last}"


def _age(seconds: float) -> str:
    """Such as ``3 h``; what a clock that is ahead says is ``0 s``."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"
