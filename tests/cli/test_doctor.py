from __future__ import annotations


def test_each_finding_is_a_line_and_quiet_tells_only_what_is_not_well(cli, tmp_path):
    found = cli("doctor", tmp_path / "run", "--size", "1").rows
    assert {len(fields) for fields in found} == {4}
    assert [fields[1] for fields in found][-2:] == ["speed", "clean-up"]
    quiet = cli("doctor", tmp_path / "run", "--size", "1", "--quiet")
    assert (quiet.code, "ok" in [fields[0] for fields in quiet.rows]) == (0, False)


def test_what_does_not_work_is_in_the_exit_code(cli, tmp_path):
    (tmp_path / "file").touch()
    ended = cli("doctor", tmp_path / "file" / "run", "--size", "1", "--json")
    assert (ended.code, ended.json["works"]) == (1, False)
    assert cli("doctor", "s3:/bucket/run").code == 2
    assert cli("doctor", "memory://a/b", "--size", "2000").code == 2


def test_json_has_numbers(cli, tmp_path):
    document = cli("doctor", tmp_path, "--size", "1", "--json").json
    [speed] = [one for one in document["findings"] if one["check"] == "speed"]
    assert document["works"] is True
    assert speed["values"]["up"] > 0


def test_reading_only_leaves_a_folder_as_it_is(cli, tmp_path):
    assert cli("doctor", tmp_path / "run", "--read-only", "--quiet").code == 0
    assert list(tmp_path.iterdir()) == []
