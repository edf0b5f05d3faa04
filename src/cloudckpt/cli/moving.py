"""Commands that read all of a checkpoint."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses
from typing import Annotated, Optional

import typer
from rich.filesize import decimal as as_size

from cloudckpt.cli.app import Checkpoint, Json, Quiet, app, print_json, progress_bar, safe
from cloudckpt.cli.ranks import together
from cloudckpt.runs import copying, verifying


@app.command(rich_help_panel="Checkpoints")
def verify(checkpoint: Checkpoint, as_json: Json = False, quiet: Quiet = False) -> None:
    """Read all of a checkpoint and compare each block with its checksum."""
    with progress_bar("verifying", shown=not (quiet or as_json)) as progress:
        found = verifying.verify(checkpoint, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    what = "as it was written" if found.has_checksums else "there; it has no checksums to compare"
    print(f"{safe(checkpoint)}: all of it is {what} ({found.items} items, {as_size(found.nbytes)})")


@app.command(rich_help_panel="Checkpoints")
def cp(
    source: Annotated[str, typer.Argument(help="A checkpoint, or the folder of a run.")],
    target: Annotated[str, typer.Argument(help="Where it, or the run, will be.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at the target.")
    ] = False,
    step_name: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it, on Python 3.10 too
        typer.Option(help="Of a run, copy only what is called so, e.g. 'step-{step}'."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a checkpoint, or all of a run, to another place, within a cloud or across clouds.

    It is compared with its checksums on the way, and becomes visible when all of it is there.
    Started by torchrun, the ranks divide the work.
    """
    with together() as ranks:
        shown = ranks.speaks and not (quiet or as_json)
        with progress_bar("copying", shown=shown) as progress:
            copied = copying.copy(
                source,
                target,
                overwrite=overwrite,
                step_name=step_name,
                process_group=ranks.group,
                progress=progress,
            )
        if not ranks.speaks:
            return
        if as_json:
            print_json({"target": target, **dataclasses.asdict(copied)})
        elif not quiet:
            there = f", {copied.already_there} there already" if copied.already_there else ""
            count = (
                "1 checkpoint" if copied.checkpoints == 1 else f"{copied.checkpoints} checkpoints"
            )
            print(
                f"{safe(target)}: copied {count} ({copied.objects} objects, "
                f"{as_size(copied.nbytes)}){there}"
            )
