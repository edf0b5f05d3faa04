from __future__ import annotations

import json
import uuid

import pytest
import torch

import cloudckpt
from cli.printed import rows
from cloudckpt import Config
from cloudckpt.cli import runs
from cloudckpt.stores import registry
from cloudckpt.stores.base import ObjectInfo, once
from memory_store import MemoryStore


@pytest.mark.parametrize("name", ["run", "misspelt"])
def test_ls_of_nothing_says_so(cli, capsys, tmp_path, name):
    (tmp_path / "run").mkdir()
    assert cli("ls", str(tmp_path / name)) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "there are no checkpoints in" in err
    assert name in err
    assert cli("ls", str(tmp_path / name), "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_ls_shows_steps_and_which_are_torn(cli, capsys, run):
    assert cli("ls", str(run)) == 0
    assert [(row[0], row[1], row[4].rpartition("/")[2]) for row in rows(capsys)] == [
        ("1", "committed", "step-1"),
        ("2", "torn", "step-2"),
        ("3", "committed", "step-3"),
        ("4", "committed", "step-4"),
        ("5", "committed", "step-5"),
    ]


def test_ls_prints_json(cli, capsys, run):
    assert cli("ls", str(run), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found] == [1, 2, 3, 4, 5]
    assert all(one["nbytes"] > 6000 for one in found)


def test_ls_shows_what_steps_share_and_what_is_kept_for_them(cli, capsys, tmp_path):
    frozen = torch.arange(100_000)
    for step in (1, 2, 3):
        state = {"frozen": frozen, "step": step}
        cloudckpt.save(
            state, checkpoint_id=str(tmp_path / f"step-{step}"), config=Config(incremental=True)
        )
    cloudckpt.delete(str(tmp_path / "step-1"))
    assert cli("ls", str(tmp_path)) == 0
    found = rows(capsys)
    assert [(row[0], row[1]) for row in found] == [
        ("1", "kept"),
        ("2", "committed"),
        ("3", "committed"),
    ]
    assert [row[3] for row in found] == ["0 bytes", "801.3 kB", "801.3 kB"]
    assert cli("ls", str(tmp_path), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["shared"] > 800_000 for one in told] == [False, True, True]
    assert [one["is_referred_to"] for one in told] == [True, False, False]
    metadata = tmp_path / "step-2" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-1])
    assert cli("ls", str(tmp_path)) == 0
    assert [row[3] for row in rows(capsys)] == ["0 bytes", "?", "801.3 kB"]
    assert cli("ls", str(tmp_path), "--json") == 0
    assert [one["shared"] for one in json.loads(capsys.readouterr().out)][1] is None


def test_latest_prints_the_newest_committed_one(cli, capsys, run, tmp_path):
    assert cli("latest", str(run)) == 0
    assert capsys.readouterr().out == f"{(run / 'step-5').as_uri()}\n"
    assert cli("latest", str(tmp_path / "other")) == 3
    assert "no committed checkpoint" in capsys.readouterr().err


def test_rm_deletes_what_it_may_and_asks_nobody_who_is_not_there(cli, capsys, run):
    wanted = [str(run / "step-1"), str(run / "step-3")]
    assert cli("rm", *wanted) == 2
    assert "--yes" in capsys.readouterr().err
    assert cli("rm", *wanted, "--yes") == 0
    assert [row[0].split()[0] for row in rows(capsys)] == ["deleted", "deleted"]
    assert cli("ls", str(run)) == 0
    assert [row[0] for row in rows(capsys)] == ["2", "4", "5"]


def test_rm_deletes_what_is_there_and_names_all_that_is_not(cli, capsys, run):
    wanted = [str(run / f"step-{step}") for step in (1, 8, 9, 3)]
    assert cli("rm", *wanted, "--yes") == 3
    printed = capsys.readouterr()
    assert [line.split("/")[-1] for line in printed.out.splitlines()] == ["step-1", "step-3"]
    assert all(f"step-{step}" in printed.err for step in (8, 9))


def test_rm_asks_on_a_terminal(cli, monkeypatch, run):
    answers = [False, True]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question: answers.pop(0))
    assert cli("rm", str(run / "step-1")) == 1
    assert (run / "step-1" / ".metadata").exists()
    assert cli("rm", str(run / "step-1")) == 0
    assert not (run / "step-1" / ".metadata").exists()


@pytest.mark.parametrize(
    ("step", "code", "told"),
    [
        ("step-5", 0, "committed"),
        ("step-2", 1, "no saving process has left anything"),
        ("step-77", 3, "there is no checkpoint"),
    ],
    ids=["committed", "torn", "missing"],
)
def test_adopt_tells_what_is_committed_torn_or_not_there(cli, capsys, run, step, code, told):
    assert cli("adopt", str(run / step)) == code
    out, err = capsys.readouterr()
    assert told in (err if code else out)
    assert (run / step / ".metadata").exists() == (code == 0)


def test_sweep_deletes_what_it_has_shown_and_nothing_else(cli, capsys, run, monkeypatch):
    shown = run / "step-2" / "__0_0.0123456789abcdef.distcp"
    later = run / "step-2" / "__0_0.fedcba9876543210.distcp"
    saved = next((run / "step-5").glob("*.distcp"))
    shown.write_bytes(b"x" * 1000)
    (run / "step-5" / ".metadata").rename(run / "step-5" / "elsewhere")

    def answer(question: str, yes: bool) -> None:
        assert "Delete 3 objects" in question  # with those of the torn checkpoint
        later.write_bytes(b"x" * 1000)
        (run / "step-5" / "elsewhere").rename(run / "step-5" / ".metadata")

    monkeypatch.setattr(runs, "confirm", answer)
    assert cli("sweep", str(run), "--older-than", "0") == 0
    assert "deleted 2 objects" in capsys.readouterr().out
    assert later.exists()
    assert saved.exists()
    assert not shown.exists()


def test_prune_keeps_what_is_asked_for(cli, capsys, run):
    arguments = ("prune", str(run), "--max-to-keep", "1", "--keep-period", "3")
    assert cli(*arguments, "--dry-run") == 0
    assert [row[0].rpartition("/")[2] for row in rows(capsys)] == ["step-1", "step-4"]
    assert cli(*arguments, "--yes", "--quiet") == 0
    assert capsys.readouterr().out == ""
    assert cli(*arguments, "--yes") == 0
    assert capsys.readouterr().out == "nothing to delete\n"
    assert [step for step in (1, 3, 4, 5) if (run / f"step-{step}" / ".metadata").exists()] == [
        3,
        5,
    ]
    assert (run / "logs" / "events").exists()


def test_prune_keeps_the_best(cli, capsys, run):
    arguments = ("prune", str(run), "--max-to-keep", "1", "--best-metric", "loss", "--dry-run")
    assert cli(*arguments) == 0
    assert [row[0].rpartition("/")[2] for row in rows(capsys)] == ["step-1", "step-4"]


def test_prune_keeps_what_it_can_not_compare_and_says_so(cli, capsys, run, caplog):
    metadata = run / "step-1" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b'"loss"', b'"lass"'))
    arguments = ("prune", str(run), "--max-to-keep", "1", "--best-metric", "loss", "--dry-run")
    assert cli(*arguments) == 0
    assert [row[0].rpartition("/")[2] for row in rows(capsys)] == ["step-4"]
    assert "the notes of step-1 can't be read" in caplog.text


def test_sweep_takes_what_no_checkpoint_names(cli, capsys, run):
    leftover = run / "step-2" / "__0_0.0123456789abcdef.distcp"
    leftover.write_bytes(b"x" * 1000)
    before = sorted(run.rglob("*"))
    assert cli("sweep", str(run), "--yes") == 0
    assert capsys.readouterr().out == "nothing is left over\n"
    assert sorted(run.rglob("*")) == before
    every = ("sweep", str(run), "--older-than", "0")
    assert cli(*every, "--dry-run") == 0
    assert f"would delete {leftover.as_uri()}" in capsys.readouterr().out
    assert cli(*every) == 2
    assert cli(*every, "--yes") == 0
    assert "deleted 2 objects" in capsys.readouterr().out  # with those of the torn checkpoint
    assert not list((run / "step-2").iterdir())
    for step in (1, 3, 4, 5):
        assert cli("verify", str(run / f"step-{step}")) == 0
    assert (run / "logs" / "events").exists()


class Long(MemoryStore):
    """A run of many steps in a store that lists a thousand names at a time."""

    def __init__(self, steps: int) -> None:
        super().__init__(uuid.uuid4().hex)  # opened stores are kept
        self.folders = [f"step-{step}" for step in range(1, steps + 1)]
        self.requests: list[str] = []

    def list_level(self, prefix, retry=once):
        if prefix != "run/":
            self.requests.append(prefix)
            return iter([ObjectInfo(f"{prefix}.metadata", 1000, "version", modified=1.7e9)])
        self.requests += ["folders"] * (len(self.folders) // 1000 + 1)
        return iter(self.folders)

    def get_range(self, key, *args, **kwargs):
        self.requests.append(key)
        return ObjectInfo(key, 1000, "version", modified=1.7e9)

    head = get_range


@pytest.fixture
def long_run(monkeypatch) -> Long:
    store = Long(10_000)
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: store})
    return store


def test_ls_of_ten_thousand_takes_twelve_listings_and_three_looks_at_each(cli, capsys, long_run):
    assert cli("ls", f"{long_run.root}/run") == 0
    assert [int(row[0]) for row in rows(capsys)] == list(range(1, 10_001))
    assert long_run.requests.count("folders") <= 12
    looks = [request for request in long_run.requests if request != "folders"]
    levels = [f"run/{name}/" for name in long_run.folders]
    notes = [f"run/{name}/.metadata" for name in long_run.folders] * 2
    assert sorted(looks) == sorted(levels + notes)


def test_latest_of_a_thousand_takes_four_requests(cli, capsys, long_run):
    del long_run.folders[1000:]
    assert cli("latest", f"{long_run.root}/run") == 0
    assert capsys.readouterr().out == f"{long_run.root}/run/step-1000\n"
    assert len(long_run.requests) <= 4


def test_no_option_deletes_all_checkpoints_of_a_run(cli, capsys, run):
    assert cli("prune", str(run), "--max-to-keep", "0", "--yes") == 2
    assert "max_to_keep=0" in capsys.readouterr().err


def test_good_checkpoints_are_not_deleted_in_favour_of_a_damaged_one(cli, capsys, run):
    (run / "step-5" / ".metadata").write_bytes(b"damaged")
    assert cli("prune", str(run), "--max-to-keep", "1", "--yes") == 4
    assert "delete it before" in capsys.readouterr().err
    assert (run / "step-4" / ".metadata").exists()
