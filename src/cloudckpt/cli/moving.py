"""Commands that read all of a checkpoint."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Optional

import typer
from rich.filesize import decimal as as_size

import cloudckpt
from cloudckpt.cli.app import (
    Checkpoint,
    Json,
    Quiet,
    app,
    print_json,
    print_rows,
    progress_bar,
    safe,
)
from cloudckpt.cli.ranks import Together, together
from cloudckpt.errors import CheckpointCorruptError, Damage


@app.command(rich_help_panel="Checkpoints")
def verify(
    checkpoint: Checkpoint,
    ranks: Together = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Read all of a checkpoint and compare each block with its checksum.

    All that is damaged is listed: item, object, the first byte and the one after the last, and what
    is wrong. Started by torchrun, the ranks divide the work.
    """
    with together(ranks) as joined:
        shown = joined.speaks and not (quiet or as_json)
        try:
            with progress_bar("verifying", shown=shown) as progress:
                found = cloudckpt.verify(checkpoint, process_group=joined.group, progress=progress)
        except CheckpointCorruptError as error:
            if joined.speaks:
                _print_damages(checkpoint, error.damages, as_json)
            raise
        if not joined.speaks:
            return
        if as_json:
            print_json({**dataclasses.asdict(found), "damages": []})
            return
        what = (
            "as it was written" if found.has_checksums else "there; it has no checksums to compare"
        )
        print(
            f"{safe(checkpoint)}: all of it is {what} ({found.items} items, "
            f"{as_size(found.nbytes)})"
        )


def _print_damages(checkpoint: str, damages: Sequence[Damage], as_json: bool) -> None:
    if as_json:
        document = [dataclasses.asdict(damage) for damage in damages]
        print_json({"checkpoint": checkpoint, "damages": document})
        return
    rows = [
        [
            damage.item,
            damage.object,
            "" if damage.start is None else str(damage.start),
            "" if damage.stop is None else str(damage.stop),
            damage.what,
        ]
        for damage in damages
    ]
    if rows:
        print_rows(["item", "object", "from", "to", "what"], rows, right={2, 3})


@app.command(rich_help_panel="Checkpoints")
def cp(
    source: Annotated[str, typer.Argument(help="A checkpoint, or the folder of a run.")],
    target: Annotated[str, typer.Argument(help="Where to copy it.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at the target.")
    ] = False,
    step_name: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it, on Python 3.10 too
        typer.Option(help="Of a run, copy only checkpoints with such names, e.g. 'step-{step}'."),
    ] = None,
    ranks: Together = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a checkpoint, or all of a run, to another place, within a cloud or across clouds.

    It is compared with its checksums on the way, and becomes visible when all of it is there.
    Started by torchrun, the ranks divide the work.
    """
    with together(ranks) as joined:
        shown = joined.speaks and not (quiet or as_json)
        with progress_bar("copying", shown=shown) as progress:
            copied = cloudckpt.copy(
                source,
                target,
                overwrite=overwrite,
                step_name=step_name,
                process_group=joined.group,
                progress=progress,
            )
        if not joined.speaks:
            return
        if as_json:
            print_json({"target": target, **dataclasses.asdict(copied)})
        elif not quiet:
            there = f"; {copied.already_there} there already" if copied.already_there else ""
            way = "by the store itself" if copied.by_store == copied.nbytes else "streamed"
            if 0 < copied.by_store < copied.nbytes:
                way = f"{as_size(copied.by_store)} by the store itself, the rest streamed"
            checkpoints = "checkpoint" if copied.checkpoints == 1 else "checkpoints"
            what = ""
            if copied.checkpoints:
                what = f" ({copied.objects} objects, {as_size(copied.nbytes)}, {way})"
            print(f"{safe(target)}: copied {copied.checkpoints} {checkpoints}{what}{there}")


@app.command(rich_help_panel="Checkpoints")
def detach(
    checkpoint: Checkpoint, ranks: Together = None, as_json: Json = False, quiet: Quiet = False
) -> None:
    """Make a checkpoint self-contained that shares bytes with others of its run.

    What it shares is copied into its own folder. Started by torchrun, the ranks divide the work.
    """
    with together(ranks) as joined:
        shown = joined.speaks and not (quiet or as_json)
        with progress_bar("copying", shown=shown) as progress:
            copied = cloudckpt.runs.detach(
                checkpoint, process_group=joined.group, progress=progress
            )
        if not joined.speaks:
            return
        if as_json:
            print_json({"checkpoint": checkpoint, **dataclasses.asdict(copied)})
        elif not quiet:
            what = (
                f"{as_size(copied.nbytes)} were copied" if copied.checkpoints else "it already did"
            )
            print(f"{safe(checkpoint)} stands alone: {what}")
