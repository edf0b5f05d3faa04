from __future__ import annotations

import json

import torch
import torch.distributed.checkpoint

from cli.printed import rows


def test_inspect_shows_entries_by_pattern_and_notes(cli, capsys, run):
    assert cli("inspect", str(run / "step-4"), "w*") == 0
    assert rows(capsys) == [
        ["w", "float32", "500 x 3", "6.0 kB", "1"],
        ["1 entries, 6.0 kB"],
        ["step 4"],
        ["loss = 1"],
    ]
    assert cli("inspect", str(run / "step-4"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in found["items"]] == ["step", "w"]
    assert found["notes"]["metrics"] == {"loss": 1.0}


def test_diff_shows_what_differs_and_says_so_by_its_exit_code(cli, capsys, run):
    first, second = str(run / "step-1"), str(run / "step-4")
    assert cli("diff", first, first) == 0
    assert rows(capsys) == [["2 same"]]
    assert cli("diff", first, second) == 5
    assert rows(capsys) == [
        ["changed", "step", "value", "value", "1.3 kB"],
        ["changed", "w", "float32 500 x 3", "float32 500 x 3", "6.0 kB"],
        ["2 changed"],
    ]
    assert cli("diff", first, second, "w", "--json") == 5
    found = json.loads(capsys.readouterr().out)
    assert found["are_same"] is False
    assert [item["verdict"] for item in found["items"]] == ["changed"]
    assert cli("diff", first, str(run / "step-2")) == 3


def test_diff_says_what_it_could_not_tell(cli, capsys, run, tmp_path):
    torch.distributed.checkpoint.save(
        {"w": torch.ones(500, 3), "step": 1}, checkpoint_id=str(tmp_path / "torch"), no_dist=True
    )
    assert cli("diff", str(run / "step-1"), str(tmp_path / "torch")) == 1
    assert "2 entries can't be compared by checksums" in capsys.readouterr().err


def test_inspect_writes_a_page(cli, capsys, run, tmp_path):
    file = tmp_path / "step 4.html"
    assert cli("inspect", str(run / "step-4"), "w*", "--html", str(file)) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    text = file.read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert '"loss","1"' in text
    assert '"world":1' in text  # how it was saved
    assert cli("inspect", str(run / "step-4"), "--html", str(tmp_path / "no" / "x.html")) == 1
    assert "can't be written: No such file" in capsys.readouterr().err
