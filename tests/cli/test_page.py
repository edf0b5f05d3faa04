"""The page of a checkpoint shows what is in it, loads nothing, and runs nothing of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from cloudckpt.checkpoint.notes import Notes
from cloudckpt.cli.page import page
from cloudckpt.runs.contents import CheckpointContents, SaveTimes, StoredItem

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> & \u2028 ü \udc80"


def tensor(name: str, *shape: int) -> StoredItem:
    nbytes = 4
    for size in shape:
        nbytes *= size
    return StoredItem(name=name, shape=shape, dtype="float32", nbytes=nbytes, chunks=2)


def contents(*items: StoredItem, notes: Notes | None = None, times=None) -> CheckpointContents:
    return CheckpointContents(
        uri="s3://bucket/run/step-7",
        items=items,
        notes=notes if notes is not None else Notes(),
        has_checksums=True,
        times=times,
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
    notes = Notes(step=7, metrics={"loss": 0.5, "x": float("nan")}, user={"commit": "4f1c9e2"})
    text = page(contents(*(tensor(name, 2, 3) for name in names), notes=notes))
    assert sorted(names_of(text)) == sorted(names)
    data = data_of(text)
    assert (data["nbytes"], data["count"], data["step"]) == (9 * 24, 9, 7)
    assert data["metrics"] == [["loss", "0.5"], ["x", "nan"]]
    assert json.loads(data["user"]) == {"commit": "4f1c9e2"}
    assert data["types"] == ["float32"]
    assert data["items"][0][3:] == [[2, 3], 24, 2]


def test_names_and_notes_can_run_no_code() -> None:
    notes = Notes(metrics={HOSTILE: 1.0}, user={HOSTILE: HOSTILE})
    text = page(contents(tensor(HOSTILE, 1), notes=notes))
    empty = page(contents())
    assert text.count("<") == empty.count("<")
    assert "alert(1)<" not in text
    assert names_of(text) == [HOSTILE]


def test_it_allows_its_own_script_and_style_and_loads_nothing() -> None:
    text = page(contents(tensor("w", 1)))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; ")
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert not re.search(
        r"(src|href)=|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text
    )
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}  # a name


def test_of_very_many_entries_the_largest_are_shown_and_the_others_counted() -> None:
    items = [tensor(f"w{number}", number + 1) for number in range(20_003)]
    data = data_of(page(contents(*items)))
    assert data["count"] == 20_003
    assert data["others"] == [3, 4 + 8 + 12]
    assert len(data["items"]) == 20_000


def test_what_the_save_took_is_in_it() -> None:
    ranks = tuple((rank, 100_000, 100_500, 102_000 + 1000 * rank, 10) for rank in range(2))
    text = page(contents(times=SaveTimes(ranks=ranks, committing=103_250)))
    assert data_of(text)["save"] == {
        "began": 100.0,
        "commit": 3250,
        "world": 2,
        "ranks": [[0, 0, 500, 2000, 10], [1, 0, 500, 3000, 10]],
    }
    assert data_of(page(contents()))["save"] is None
