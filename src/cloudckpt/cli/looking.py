"""Commands that look into checkpoints without reading their tensors."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses
from fnmatch import fnmatchcase
from typing import Annotated

import typer
from rich.filesize import decimal as as_size

from cloudckpt.cli.app import Checkpoint, Json, app, print_json, print_rows, safe
from cloudckpt.runs import contents


@app.command(rich_help_panel="Checkpoints")
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
        print_json(document)
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
    print_rows(["name", "type", "shape", "size", "chunks"], rows, right={3, 4})
    print(f"{len(items)} entries, {as_size(sum(item.nbytes for item in items))}")
    if not found.has_checksums:
        print("It has no checksums: it was not written by cloudckpt.")
    if found.notes.step is not None:
        print(f"step {found.notes.step}")
    for name, value in found.notes.metrics.items():
        print(f"{safe(name)} = {value:g}")
