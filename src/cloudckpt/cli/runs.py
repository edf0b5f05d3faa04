"""Commands about runs, which list, prune, sweep, recover and delete checkpoints."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import typer
from rich.filesize import decimal as as_size

import cloudckpt
from cloudckpt.cli.app import say
from cloudckpt.cli.call import RUNS, Call, command, seconds
from cloudckpt.cli.output import Moment, Size, safe
from cloudckpt.config import config_or_default
from cloudckpt.errors import CheckpointNotFoundError
from cloudckpt.runs import CheckpointSummary, finding
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention
from cloudckpt.uri import CheckpointURI

_YELLOW = dict.fromkeys(["abandoned", "incomplete", "pending"], "yellow")


@command(RUNS)
def ls(call: Call, locations: list[str], *, step_name: str = DEFAULT_PATTERN) -> None:
    """List the checkpoints of a run; of a folder or bucket, the runs beneath it.

    States: committed; abandoned (committed, but not part of the training that the next job
    restores); incomplete (left by an interrupted save, or being saved); pending (its job was
    killed, and the next job or `cloudckpt recover` can commit it); kept (deleted, except for data
    that other checkpoints share).

    Args:
        call: The options that all commands share.
        locations: Runs, folders, buckets or checkpoints, e.g. s3://bucket/run. In each folder
            name, * matches any text and ? one character.
        step_name: Pattern of the checkpoints' folder names.
    """
    summaries = _checkpoints(call, locations, step_name)
    if not summaries:
        _show_runs(call, locations, step_name, _newest_of)
        return
    rows = []
    for summary in summaries:
        row: dict[str, object] = {"step": "-" if summary.step is None else summary.step}
        row |= {"state": _state(summary), "size": Size(summary.nbytes), "age": _age(summary)}
        if any(other.is_abandoned for other in summaries):
            row["job"] = summary.job[:8]
        rows.append(row | {"checkpoint": summary.uri})
    call.show(rows, [dataclasses.asdict(summary) for summary in summaries], _YELLOW)


def _age(summary: CheckpointSummary | None) -> Moment | None:
    return None if summary is None or summary.modified is None else Moment(summary.modified)


def _checkpoints(call: Call, locations: Sequence[str], step_name: str) -> list[CheckpointSummary]:
    """Returns the checkpoints of a run, if its folder is the only location, without wildcards.

    Otherwise returns the locations that are checkpoints themselves.
    """
    uris = [uri for location in locations for uri in finding.matching(location, call.config)]
    if uris == locations and len(uris) == 1:
        return cloudckpt.list_checkpoints(uris[0], step_name=step_name, config=call.config)
    wanted = [
        uri
        for uri in map(CheckpointURI.parse, uris)
        if finding.is_checkpoint(Run(uri, config=call.config).view, uri)
    ]
    return [
        summary
        for run in dict.fromkeys(uri.parent for uri in wanted)
        for summary in cloudckpt.list_checkpoints(run, step_name=step_name, config=call.config)
        if summary.uri in map(str, wanted)
    ]


def _state(summary: CheckpointSummary) -> str:
    """Returns the state of a checkpoint, as ``ls`` prints it."""
    if summary.is_committed:
        return "abandoned" if summary.is_abandoned else "committed"
    if summary.is_pending:
        return "pending"
    return "kept" if summary.is_referred_to else "incomplete"


def _show_runs(
    call: Call,
    locations: Sequence[str],
    step_name: str,
    describe: Callable[[Run], dict[str, object]],
) -> None:
    """Shows a row for each run beneath the locations.

    Raises:
        CheckpointNotFoundError: If there is no run.
    """
    runs = _runs_beneath(call, locations, step_name)
    call.show([{**describe(run), "run": str(run.root)} for run in runs])
    _refuse_none(runs, locations)


def _newest_of(run: Run) -> dict[str, object]:
    newest = run.newest()
    last = None if newest is None else run.summary(run.names.name(newest))
    return {"latest": newest, "steps": len(run.steps(warns=False)), "age": _age(last)}


def _sizes_of(run: Run) -> dict[str, object]:
    summaries = run.summaries()
    return {
        "size": Size(sum(item.nbytes for item in summaries)),
        "abandoned": Size(sum(item.nbytes for item in summaries if item.is_abandoned)),
        "uncommitted": Size(sum(item.nbytes for item in summaries if not item.is_committed)),
        "checkpoints": len(summaries),
    }


def _runs_beneath(
    call: Call, locations: Sequence[str], step_name: str = DEFAULT_PATTERN
) -> list[Run]:
    runs = [
        run
        for location in locations
        for uri in finding.matching(location, call.config)
        for run in finding.runs_beneath(uri, step_name=step_name, config=call.config)
    ]
    return list({run.root: run for run in runs}.values())


def _refuse_none(results: Sequence[object], locations: Sequence[str]) -> None:
    """Raises a CheckpointNotFoundError if nothing was found at the locations."""
    if not results:
        what = "there are no checkpoints here or in the folders beneath: check the location"
        raise CheckpointNotFoundError(what, uri=", ".join(locations))


@command(RUNS)
def du(call: Call, locations: list[str], *, step_name: str = DEFAULT_PATTERN) -> None:
    """Show the size of each run in a folder or bucket: in all, abandoned, and not committed.

    Args:
        call: The options that all commands share.
        locations: Runs, folders or buckets, e.g. s3://bucket. In each folder name, * matches any
            text and ? one character.
        step_name: Pattern of the checkpoints' folder names.
    """
    _show_runs(call, locations, step_name, _sizes_of)


@command(RUNS)
def latest(call: Call, run: str, *, step_name: str = DEFAULT_PATTERN) -> None:
    """Print the newest committed checkpoint of a run that is not abandoned.

    Args:
        call: The options that all commands share.
        run: The folder of a run, e.g. s3://bucket/run.
        step_name: Pattern of the checkpoints' folder names.
    """
    newest = cloudckpt.latest(run, step_name=step_name, config=call.config)
    if newest is None:
        what = "there is no committed checkpoint in this run: check the location and --step-name"
        raise CheckpointNotFoundError(what, uri=run)
    call.show([{"checkpoint": newest}], {"uri": newest})


@command(RUNS)
def best(
    call: Call,
    run: str,
    *,
    metric: str,
    mode: Literal["min", "max"],
    step_name: str = DEFAULT_PATTERN,
) -> None:
    """Print the checkpoint of a run with the best value of a metric; skips abandoned ones.

    Args:
        call: The options that all commands share.
        run: The folder of a run, e.g. s3://bucket/run.
        metric: Name of the metric to compare, e.g. loss.
        mode: Whether the lowest (min) or the highest value (max) is the best.
        step_name: Pattern of the checkpoints' folder names.
    """
    from cloudckpt.runs.pruning import best_step

    folder = Run(run, step_name=step_name, config=call.config)
    result = best_step(folder, Retention(best_metric=metric, best_mode=mode))
    if result is None:
        what = f"no committed step has the metric {metric!r}: cloudckpt inspect shows all metrics"
        raise CheckpointNotFoundError(what, uri=run)
    step, score = result
    uri = str(folder.uri(step))
    call.show([{"checkpoint": uri}], {"uri": uri, "step": step, metric: score})


@command(RUNS, writes=True)
def recover(call: Call, checkpoint: str, *, wait: str = "60s") -> None:
    """Commit a checkpoint whose job was killed after all data was uploaded.

    Args:
        call: The options that all commands share.
        checkpoint: The checkpoint, e.g. s3://bucket/run/step-1000.
        wait: Maximum time to wait for processes that are still uploading, e.g. 60s.
    """
    from cloudckpt.runs import adopting

    state = "committed"
    if call.dry_run:
        uri = CheckpointURI.parse(checkpoint)
        run = Run(uri.parent, config=call.config)
        summary = run.summary(uri.folder)
        _refuse_none([summary] if summary else [], [checkpoint])
        state = "incomplete" if summary is None else _state(summary)
    else:
        adopting.adopt(checkpoint, wait=seconds(wait), config=call.config)
    row = {"state": state, "checkpoint": checkpoint}
    call.done([row], row)


@command(RUNS, writes=True, asks=True)
def rm(call: Call, locations: list[str], *, recursive: bool = False) -> None:
    """Delete checkpoints (the commit first, then the data), or whole runs. Other files stay.

    Args:
        call: The options that all commands share.
        locations: Checkpoints, e.g. s3://bucket/run/step-1000; with --recursive, runs or folders.
            In each folder name, * matches any text and ? one character.
        recursive: Delete whole runs, at the locations or beneath them: all checkpoints, and the
            leftovers of killed saves. No job may be saving there.
    """
    from cloudckpt.runs.deleting import delete_at, delete_run

    runs, alone = dict[CheckpointURI, Run](), dict[str, CheckpointURI]()
    for uri in [uri for one in locations for uri in finding.matching(one, call.config)]:
        found = _runs_beneath(call, [uri]) if recursive else []
        runs |= {run.root: run for run in found}
        alone |= {} if found else {str(at): at for at in [CheckpointURI.parse(uri)]}
    listed = {root: cloudckpt.list_checkpoints(root, config=call.config) for root in runs}
    inside = [one for found in listed.values() for one in found]
    alone = {uri: at for uri, at in alone.items() if uri not in {one.uri for one in inside}}
    missing = [uri for uri, at in alone.items() if not cloudckpt.exists(at, config=call.config)]
    wanted = [*(one.uri for one in inside), *(uri for uri in alone if uri not in missing)]

    def delete(deleted: Callable[[str], object]) -> None:
        for root, found in listed.items():
            delete_run(root, config=call.config, deleted=deleted)
            for one in found:  # also those that were never committed
                deleted(one.uri)
        for uri in wanted[len(inside) :]:
            try:
                delete_at(alone[uri], config_or_default(call.config), deleted=partial(deleted, uri))
            except CheckpointNotFoundError:  # another process has deleted it
                deleted(uri)

    size = as_size(sum(one.nbytes for one in inside))
    _delete(call, wanted, delete, f"whole runs of {size}, with " if runs else "")
    if missing:
        what = "there is no committed checkpoint to delete: check the location"
        what += "" if recursive else "; to delete a whole run, give --recursive"
        what += "; for what an interrupted save has left, use cloudckpt sweep"
        raise CheckpointNotFoundError(what, uri=", ".join(missing))


@command(RUNS, writes=True, asks=True)
def prune(
    call: Call,
    run: str,
    *,
    max_to_keep: int | None = None,
    best_to_keep: int | None = None,
    keep_younger_than: str | None = None,
    keep_period: int | None = None,
    best_metric: str | None = None,
    best_mode: Literal["min", "max"] | None = None,
    abandoned: bool = False,
    step_name: str = DEFAULT_PATTERN,
) -> None:
    """Delete the checkpoints of a run that no given rule keeps; the newest always stays.

    Args:
        call: The options that all commands share.
        run: The folder of a run, e.g. s3://bucket/run.
        max_to_keep: Keep this many of the newest checkpoints; with --best-metric and without
            --best-to-keep, this many of the best.
        best_to_keep: Keep this many of the best checkpoints, and all without the metric.
        keep_younger_than: Keep checkpoints that were committed within this time, e.g. 2h.
        keep_period: Keep steps that are multiples of this number.
        best_metric: Name of the metric that decides which checkpoints are the best, e.g. loss.
        best_mode: Whether the lowest (min) or the highest values (max) are the best.
        abandoned: Also delete all abandoned checkpoints; they stay by default.
        step_name: Pattern of the checkpoints' folder names.
    """
    from cloudckpt.runs import pruning

    if (max_to_keep, best_to_keep, keep_younger_than, abandoned) == (None, None, None, False):
        raise typer.BadParameter(
            "nothing says what to keep: give --max-to-keep, --best-to-keep or "
            "--keep-younger-than; or --abandoned, which deletes abandoned checkpoints alone"
        )
    rule = partial(
        pruning.prune,
        run,
        max_to_keep=max_to_keep,
        best_to_keep=best_to_keep,
        keep_younger_than=None if keep_younger_than is None else seconds(keep_younger_than),
        keep_period=keep_period,
        best_metric=best_metric,
        best_mode=best_mode,
        abandoned=abandoned,
        step_name=step_name,
        config=call.config,
    )
    unneeded = rule(dry_run=True)
    # the rules are applied again: if a job has gone back to an earlier step, they may keep more
    _delete(call, unneeded, lambda deleted: rule(only=unneeded, deleted=deleted))


def _delete(
    call: Call,
    wanted: Sequence[str],
    delete: Callable[[Callable[[str], object]], object],
    what: str = "",
) -> None:
    """Deletes checkpoints after a confirmation, and prints for each whether it was deleted.

    Args:
        call: The options that all commands share.
        wanted: The URIs of the checkpoints.
        delete: A function that deletes them. Its argument is a function to call with the URI of
            each deleted checkpoint.
        what: Text for the question before the number of checkpoints, such as the size of runs.
    """
    gone = set(wanted if call.dry_run else ())
    if wanted and not call.dry_run:
        ends = " to ".join(map(safe, dict.fromkeys((wanted[0], wanted[-1]))))
        call.confirm(f"Delete {what}checkpoints ({len(wanted)}): {ends}?")
    try:
        if wanted and not call.dry_run:
            delete(gone.add)
    finally:
        verb = "would delete" if call.dry_run else "deleted"
        rows = [{"action": verb if uri in gone else "kept", "checkpoint": uri} for uri in wanted]
        kept = [uri for uri in wanted if uri not in gone]
        call.done(rows, {"checkpoints": [uri for uri in wanted if uri in gone], "kept": kept})


@command(RUNS, writes=True, asks=True)
def sweep(call: Call, run: str, *, older_than: str = "24h") -> None:
    """Delete leftovers of killed saves: unreferenced data and unfinished uploads.

    Args:
        call: The options that all commands share.
        run: The folder of a run, e.g. s3://bucket/run.
        older_than: Minimum age of leftovers, e.g. 24h. Less is safe only if no job is saving there.
    """
    from cloudckpt.runs import sweeping

    age = seconds(older_than)
    leftovers = sweeping.find_leftovers(run, older_than=age, config=call.config)
    for uri in leftovers.unread:
        say(f"{uri} is damaged, so all objects it may name stay: restore its backup, or delete it")
    if not call.dry_run and (leftovers.objects or leftovers.uploads):
        objects = f"{len(leftovers.objects)} objects ({as_size(leftovers.nbytes)})"
        call.confirm(f"Delete {objects} and {len(leftovers.uploads)} uploads in {safe(run)}?")
        leftovers = sweeping.sweep(run, older_than=age, only=leftovers, config=call.config)
    verbs = ("would delete", "would abort") if call.dry_run else ("deleted", "aborted")
    kinds = zip(verbs, (leftovers.objects, leftovers.uploads), strict=True)
    rows = [{"action": verb, "object": uri} for verb, uris in kinds for uri in uris]
    call.done(rows, dataclasses.asdict(leftovers))
