"""Commands that read checkpoints without their tensors: ``inspect`` and ``diff``."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses
import json
import pathlib
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import typer

import cloudckpt
from cloudckpt.cli.app import code_of, fail
from cloudckpt.cli.call import CHECKPOINTS, Call, command
from cloudckpt.cli.output import Size, safe
from cloudckpt.cli.page import page
from cloudckpt.errors import CloudCheckpointError

if TYPE_CHECKING:  # it takes torch
    from cloudckpt.runs import CheckpointContents, StoredItem

_SAME, _DIFFERENT, _TROUBLE = 0, 1, 2  # exit codes of diff(1)
_STYLES = {"added": "green", "removed": "red", "unknown": "dim"}


@command(CHECKPOINTS)
def inspect(call: Call, checkpoint: str, pattern: str = "*", *, html: str | None = None) -> None:
    """Show what is in a checkpoint: names, shapes, types, sizes, and its notes.

    Args:
        call: The options that all commands share.
        checkpoint: The checkpoint, e.g. s3://bucket/run/step-1000.
        pattern: Pattern of the names to show, e.g. 'model.*'; * matches any text.
        html: Write an HTML page to this file: sizes, notes, and times of the save.
    """
    contents = cloudckpt.inspect(checkpoint, config=call.config)
    items = tuple(item for item in contents.items if fnmatchcase(item.name, pattern))
    if html is not None:
        text = page(dataclasses.replace(contents, items=items))
        pathlib.Path(html).write_text(text, encoding="utf-8")
    rows: list[dict[str, object]] = []
    for item in items:
        form = {"type": item.dtype or "value", "shape": _shape(item)}
        rows.append({"name": item.name, **form, "size": Size(item.nbytes), "chunks": item.chunks})
    document = {
        "uri": contents.uri,
        "has_checksums": contents.has_checksums,
        "notes": dataclasses.asdict(contents.notes),
        "shared": dict(contents.shared),
        "items": [dataclasses.asdict(item) for item in items],
    }
    call.show(rows if html is None else [{"page": html}], document)
    if html is None and call.is_interactive:
        _print_notes(contents, items)


def _print_notes(contents: "CheckpointContents", items: "tuple[StoredItem, ...]") -> None:
    """Prints the notes and other facts of a checkpoint beneath the table of its entries."""
    print(f"entries: {len(items)}, {Size(sum(item.nbytes for item in items))}")
    for uri, nbytes in contents.shared.items():
        print(f"{Size(nbytes)} are shared with {safe(uri)}: run cloudckpt unshare before a move.")
    if not contents.has_checksums:
        print("There are no checksums: these are safetensors, or files of another program.")
    if contents.notes.step is not None:
        print(f"step {contents.notes.step}")
    for name, value in contents.notes.metrics.items():
        print(f"{safe(name)} = {value:g}")
    for name, kept in contents.notes.user.items():
        print(f"{safe(name)}: {safe(json.dumps(kept, ensure_ascii=False))}")


@command(CHECKPOINTS)
def diff(call: Call, first: str, second: str, pattern: str = "*") -> None:
    """Show how two checkpoints differ: in names, shapes, types and, by checksums, content.

    The exit code is 0 if they are the same, 1 if they differ, 2 if the checksums can't be compared
    or the command failed, 3 if a checkpoint does not exist, 4 if one is damaged.

    Args:
        call: The options that all commands share.
        first: A checkpoint, e.g. s3://bucket/run/step-1000.
        second: The checkpoint to compare with.
        pattern: Pattern of the names to compare, e.g. 'model.*'; * matches any text.
    """
    try:
        comparison = cloudckpt.diff(first, second, pattern=pattern, config=call.config)
    except CloudCheckpointError as error:
        fail(error, max(code_of(error), _TROUBLE))
    rows: list[dict[str, object]] = [
        {
            "verdict": item.verdict,
            "name": item.name,
            "first": _form(item.first),
            "second": _form(item.second),
            "differing": None if item.differing is None else Size(item.differing),
        }
        for item in comparison.items
        if item.verdict != "same"
    ]
    call.show(rows, {**dataclasses.asdict(comparison), "are_same": comparison.are_same}, _STYLES)
    counts = Counter[str](item.verdict for item in comparison.items)
    if call.is_interactive:
        print(", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts)) or "empty")
    if comparison.are_same is None:
        fail(
            "entries that can't be compared by their checksums (verdict: unknown), and may differ: "
            f"{counts['unknown']}; load both checkpoints to compare them",
            _TROUBLE,
        )
    raise typer.Exit(_SAME if comparison.are_same else _DIFFERENT)


def _form(item: "StoredItem | None") -> str:
    """Returns a tensor's type and shape as text, "value" for other entries, empty for None."""
    if item is None or item.shape is None:
        return "" if item is None else "value"
    return f"{item.dtype} {_shape(item)}"


def _shape(item: "StoredItem") -> str:
    return "" if item.shape is None else " x ".join(map(str, item.shape)) or "scalar"
