"""Renders a checkpoint as one HTML file: sizes by module, entries, notes, and times of the save.

The file loads no other files. The checkpoint's data is in it as JSON, which its script shows as
text; a content security policy allows only that script, so that no name or note can run code.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections import Counter
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudckpt.runs import CheckpointContents, StoredItem
    from cloudckpt.runs.contents import SaveTimes

__all__ = ["page"]

_MOST = 20_000
"""How many of the largest entries the page shows: a browser draws so many in a second."""


def page(contents: CheckpointContents) -> str:
    """Returns the text of the HTML file for a checkpoint."""
    template = files("cloudckpt.cli").joinpath("page.html").read_text("utf-8")
    for name, tag in (("SCRIPT", "script"), ("STYLE", "style")):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        template = template.replace(f"'{name}'", f"'sha256-{digest}'")
    data = json.dumps(_document(contents), separators=(",", ":"), ensure_ascii=True)
    for char in "<>&":  # escaped, so that no text can end the script element or begin a comment
        data = data.replace(char, f"\\u{ord(char):04x}")
    return template.replace(">DATA<", f">{data}<")


def _document(contents: CheckpointContents) -> dict[str, Any]:
    """Returns the data of the page, which gets it as JSON."""
    items = sorted(contents.items, key=lambda item: item.nbytes, reverse=True)
    kept, others = items[:_MOST], items[_MOST:]
    weights = Counter[str]()
    for item in kept:
        weights[_type(item)] += item.nbytes
    types = {name: number for number, (name, _) in enumerate(weights.most_common())}
    notes = contents.notes
    return {
        "uri": contents.uri,
        "name": contents.uri.rstrip("/").rpartition("/")[2] or contents.uri,
        "nbytes": contents.nbytes,
        "count": len(items),
        "others": [len(others), sum(item.nbytes for item in others)],
        "checksums": contents.has_checksums,
        "step": notes.step,
        "metrics": [[name, f"{value:g}"] for name, value in notes.metrics.items()],
        "user": json.dumps(notes.user, indent=2, ensure_ascii=False) if notes.user else "",
        "types": list(types),
        "items": _rows(sorted(kept, key=lambda item: item.name.split(".")), types),
        "save": None if contents.times is None else _save(contents.times),
    }


def _type(item: StoredItem) -> str:
    """Returns the element type of an entry; ``value`` if it is not a tensor."""
    return item.dtype or "value"


def _rows(items: list[StoredItem], types: dict[str, int]) -> list[list[Any]]:
    """Returns ``[shared, rest, type, shape, nbytes, chunks]`` for each entry.

    ``shared`` is the number of parts that the name, split at dots, has in common with the name
    before; ``rest`` is the name without them; ``type`` is the number of the type in `types`.
    """
    rows: list[list[Any]] = []
    before: list[str] = []
    for item in items:
        parts = item.name.split(".")
        pairs = zip(parts[:-1], before, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rest, before = ".".join(parts[shared:]), parts
        rows.append([shared, rest, types[_type(item)], item.shape, item.nbytes, item.chunks])
    return rows


def _save(times: SaveTimes) -> dict[str, Any]:
    """Returns the timeline of a save, for the page.

    ``began`` is its beginning in seconds since 1970, ``commit`` that of its commit in milliseconds
    after ``began``, and ``world`` the number of ranks. ``ranks`` has a list for each rank: its
    number; when it began to plan, began to send, and had sent everything, each in milliseconds
    after ``began``; and its bytes.
    """
    began = min(row[1] for row in times.ranks)
    return {
        "began": began / 1000,
        "commit": times.committing - began,
        "world": len(times.ranks),
        "ranks": [
            [rank, *(moment - began for moment in moments), nbytes]
            for rank, *moments, nbytes in times.ranks
        ],
    }
