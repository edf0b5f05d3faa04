"""Commands that read all of a checkpoint."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses

from rich.filesize import decimal as as_size

from cloudckpt.cli.app import Checkpoint, Json, Quiet, app, print_json, progress_bar, safe
from cloudckpt.runs import verifying


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
