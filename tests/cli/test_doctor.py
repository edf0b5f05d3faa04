from __future__ import annotations

import json

from .printed import rows


def test_each_finding_is_a_line(cli, capsys, tmp_path):
    assert cli("doctor", str(tmp_path / "run"), "--size", "1") == 0
    found = rows(capsys)
    assert {len(fields) for fields in found} == {4}
    assert [fields[1] for fields in found][-2:] == ["speed", "clean-up"]


def test_quiet_tells_only_what_is_not_well(cli, capsys, tmp_path):
    assert cli("doctor", str(tmp_path / "run"), "--size", "1", "--quiet") == 0
    assert "ok" not in [fields[0] for fields in rows(capsys)]


def test_what_does_not_work_is_in_the_exit_code(cli, capsys):
    assert cli("doctor", "s3:/bucket/run") == 1
    assert rows(capsys)[-1][:2] == ["failed", "location"]
    assert cli("doctor", "s3:/bucket/run", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["works"] is False
    assert document["findings"][-1]["check"] == "location"


def test_json_has_numbers(cli, capsys, tmp_path):
    assert cli("doctor", str(tmp_path), "--size", "1", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    [speed] = [one for one in document["findings"] if one["check"] == "speed"]
    assert document["works"] is True
    assert speed["values"]["up"] > 0


def test_reading_only_leaves_a_folder_as_it_is(cli, tmp_path):
    assert cli("doctor", str(tmp_path / "run"), "--read-only", "--quiet") == 0
    assert list(tmp_path.iterdir()) == []
