from __future__ import annotations

import json

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
