"""The page of a checkpoint shows what is in it, loads nothing, and runs nothing of it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re

from cloudckpt.checkpoint.notes import Notes
from cloudckpt.cli.page import page
from cloudckpt.runs.contents import CheckpointContents, SaveTimes, StoredItem

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> & \u2028 ü \udc80"


def made(*names: str, notes: Notes | None = None, times=None) -> str:
    """The page of a checkpoint of tensors, each a row longer than the one before."""
    items = tuple(
        StoredItem(name=name, shape=(n, 3), dtype="float32", nbytes=12 * n, chunks=2)
        for n, name in enumerate(names, start=1)
    )
    return page(
        CheckpointContents(
            uri="s3://bucket/run/step-7",
            items=items,
            notes=notes if notes is not None else Notes(),
            has_checksums=True,
            times=times,
        )
    )


def data_of(text: str) -> dict[str, object]:
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(data)


def names_of(text: str) -> list[str]:
    """As the script of the page puts them together."""
    found: list[str] = []
    before: list[str] = []
    for shared, rest, *_ in data_of(text)["items"]:
        before = before[:shared] + rest.split(".")
        found.append(".".join(before))
    return found


def test_all_entries_notes_and_metrics_are_in_it() -> None:
    names = ["a", "a.b", "a.b.c", "a.b.d", "a.bb.d", "b", "", "..", "x.y"]
    notes = Notes(step=7, metrics={"loss": 0.5, "x": math.nan}, user={"commit": "4f1c9e2"})
    text = made(*names, notes=notes)
    assert sorted(names_of(text)) == sorted(names)
    data = data_of(text)
    assert (data["nbytes"], data["count"], data["step"]) == (45 * 12, 9, 7)
    assert data["metrics"] == [["loss", "0.5"], ["x", "nan"]]
    assert json.loads(data["user"]) == {"commit": "4f1c9e2"}
    assert data["types"] == ["float32"]
    assert [3, 3] in [item[3] for item in data["items"]]


def test_names_and_notes_can_run_no_code_and_it_loads_nothing() -> None:
    text = made(HOSTILE, notes=Notes(metrics={HOSTILE: 1.0}, user={HOSTILE: HOSTILE}))
    assert text.count("<") == made().count("<")
    assert "alert(1)<" not in text
    assert names_of(text) == [HOSTILE]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    unsafe = r"(?<!img )(src|href)=|innerHTML|outerHTML|insertAdjacent|document\.write|eval\("
    assert not re.search(unsafe, made("w"))
    assert {*re.findall(r"https?://[\w./]+", text)} == {"http://www.w3.org/2000/svg"}  # a name


def test_of_very_many_entries_the_largest_are_shown_and_the_others_counted() -> None:
    data = data_of(made(*(f"w{number}" for number in range(20_003))))
    assert data["count"] == 20_003
    assert data["others"] == [3, 12 + 24 + 36]
    assert len(data["items"]) == 20_000


def test_what_the_save_took_is_in_it() -> None:
    ranks = tuple((rank, 100_000, 100_500, 102_000 + 1000 * rank, 10) for rank in range(2))
    assert data_of(made(times=SaveTimes(ranks=ranks, committing=103_250)))["save"] == {
        "began": 100.0,
        "commit": 3250,
        "world": 2,
        "ranks": [[0, 0, 500, 2000, 10], [1, 0, 500, 3000, 10]],
    }
    assert data_of(made())["save"] is None
