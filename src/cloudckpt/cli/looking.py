"""Commands that look into checkpoints without reading their tensors."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses
import json
from collections import Counter
from fnmatch import fnmatchcase
from typing import Annotated, Optional

import typer
from rich.filesize import decimal as as_size

import cloudckpt
from cloudckpt.cli.app import (
    DIFFERENT,
    FAILED,
    Checkpoint,
    Json,
    Quiet,
    app,
    fail,
    print_json,
    print_rows,
    safe,
)
from cloudckpt.cli.page import page

Pattern = Annotated[str, typer.Argument(help="Which names, e.g. 'model.*'; * stands for any text.")]


@app.command(rich_help_panel="Checkpoints")
def inspect(
    checkpoint: Checkpoint,
    pattern: Pattern = "*",
    html: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it, on Python 3.10 too
        typer.Option(metavar="FILE", help="Write a page with sizes, notes and how it was saved."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what is in a checkpoint: names, shapes, types, sizes, and what was noted with it."""
    found = cloudckpt.inspect(checkpoint)
    items = tuple(item for item in found.items if fnmatchcase(item.name, pattern))
    if html is not None:
        _write(html, page(dataclasses.replace(found, items=items)))
    if as_json:
        document = {
            "uri": found.uri,
            "has_checksums": found.has_checksums,
            "notes": dataclasses.asdict(found.notes),
            "shared": dict(found.shared),
            "items": [dataclasses.asdict(item) for item in items],
        }
        print_json(document)
        return
    if html is not None:
        if not quiet:
            print(f"wrote {safe(html)}")
        return
    rows = [
        [
            item.name,
            "value" if item.dtype is None else item.dtype,
            _shape(item),
            as_size(item.nbytes),
            str(item.chunks),
        ]
        for item in items
    ]
    print_rows(["name", "type", "shape", "size", "chunks"], rows, right={3, 4})
    print(f"{len(items)} entries, {as_size(sum(item.nbytes for item in items))}")
    for uri, nbytes in found.shared.items():
        print(f"{as_size(nbytes)} of it is shared with {safe(uri)}, which has to stay beside it.")
    if not found.has_checksums:
        print("It has no checksums: only checkpoints written by cloudckpt have them.")
    if found.notes.step is not None:
        print(f"step {found.notes.step}")
    for name, value in found.notes.metrics.items():
        print(f"{safe(name)} = {value:g}")
    for name, kept in found.notes.user.items():
        print(f"{safe(name)}: {safe(json.dumps(kept, ensure_ascii=False))}")


@app.command(rich_help_panel="Checkpoints")
def diff(
    first: Checkpoint,
    second: Annotated[str, typer.Argument(help="Another checkpoint.")],
    pattern: Pattern = "*",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how two checkpoints differ: in names, nesting, shapes, types and, by checksums, content.

    The exit code is 5 if they differ, and 1 if checksums can't tell.
    """
    found = cloudckpt.diff(first, second, pattern=pattern)
    counts = Counter[str](item.verdict for item in found.items)
    if as_json:
        print_json({**dataclasses.asdict(found), "are_same": found.are_same})
    else:
        rows = [
            [
                item.verdict,
                item.name,
                _form(item.first),
                _form(item.second),
                "" if item.differing is None else as_size(item.differing),
            ]
            for item in found.items
            if item.verdict != "same"
        ]
        styles = {"added": "green", "removed": "red", "unknown": "dim"}
        columns = ["", "name", "first", "second", "differing"]
        print_rows(columns, rows, right={4}, styles=styles)
        if not quiet:
            print(
                ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts)) or "empty"
            )
        if found.empty_dicts:
            print(f"empty dicts in only one of them: {', '.join(map(safe, found.empty_dicts))}")
    if found.are_same is None:
        fail(f"{counts['unknown']} entries can't be compared by checksums", FAILED)
    if not found.are_same:
        raise typer.Exit(DIFFERENT)


def _write(name: str, text: str) -> None:
    try:
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fail(f"{name} can't be written: {error.strerror}", FAILED)


def _form(item: "cloudckpt.runs.StoredItem | None") -> str:
    """Type and shape of an entry."""
    if item is None:
        return ""
    if item.shape is None:
        return "value"
    return f"{item.dtype} {_shape(item)}"


def _shape(item: "cloudckpt.runs.StoredItem") -> str:
    return "" if item.shape is None else " x ".join(map(str, item.shape)) or "scalar"
