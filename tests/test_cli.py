from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt import cli

pytest.importorskip("moto", reason="the demo needs the extra 'demo'")


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Runs the command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["cloudckpt", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture
def demo_result(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Replaces the demo; holds what it was called with, and what it is to return or raise."""
    called: dict[str, object] = {"returns": True}

    def run(location: str | None, *, steps: int, keep: bool, console: object) -> object:
        called.update(location=location, steps=steps, keep=keep)
        if isinstance(called["returns"], Exception):
            raise called["returns"]
        return called["returns"]

    monkeypatch.setattr("cloudckpt.demo.run.run", run)
    return called


def test_version_is_that_of_the_package(monkeypatch, capsys):
    assert run_cli(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"cloudckpt {cloudckpt.__version__}\n"


def test_help_lists_the_commands(monkeypatch, capsys):
    assert run_cli(monkeypatch, "--help") == 0
    assert "demo" in capsys.readouterr().out


def test_unknown_command_is_a_usage_error(monkeypatch, capsys):
    assert run_cli(monkeypatch, "destroy") == 2
    assert "destroy" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["moto", "flask", "boto3", "numpy"])
def test_demo_without_its_packages_says_what_to_install(monkeypatch, demo_result, package, capsys):
    without(monkeypatch, package)
    assert run_cli(monkeypatch, "demo") == 1
    message = capsys.readouterr().err
    assert package in message
    assert "pip install 'cloudckpt[demo]'" in message
    assert "steps" not in demo_result, "the demo must not start"


def test_version_needs_no_package_of_the_demo(monkeypatch):
    without(monkeypatch, "moto")
    assert run_cli(monkeypatch, "--version") == 0


def test_demo_passes_its_options_on(monkeypatch, demo_result):
    arguments = ("demo", "--uri", "s3://bucket/runs", "--steps", "12", "--keep")
    assert run_cli(monkeypatch, *arguments) == 0
    assert demo_result["location"] == "s3://bucket/runs"
    assert demo_result["steps"] == 12
    assert demo_result["keep"] is True


def test_failed_check_of_the_demo_is_a_failure_of_the_command(monkeypatch, demo_result, capsys):
    demo_result["returns"] = False
    assert run_cli(monkeypatch, "demo") == 1
    assert "a check" in capsys.readouterr().err


def test_failed_rank_is_told_without_a_traceback(monkeypatch, demo_result, capsys):
    from cloudckpt.demo.children import ChildError

    demo_result["returns"] = ChildError("rank(s) [1] failed")
    assert run_cli(monkeypatch, "demo") == 1
    assert capsys.readouterr().err == "cloudckpt: the demo failed: rank(s) [1] failed\n"


def test_bad_bucket_is_told_without_a_traceback(monkeypatch, demo_result, capsys):
    demo_result["returns"] = cloudckpt.BucketNotFoundError("no such bucket", uri="s3://nowhere")
    assert run_cli(monkeypatch, "demo") == 1
    assert capsys.readouterr().err == "cloudckpt: no such bucket | at s3://nowhere\n"


def test_keep_without_a_bucket_is_a_usage_error(monkeypatch, demo_result, capsys):
    assert run_cli(monkeypatch, "demo", "--keep") == 2
    assert "--keep needs --uri" in capsys.readouterr().err
    assert "steps" not in demo_result, "the demo must not start"


def test_too_few_steps_are_a_usage_error(monkeypatch, demo_result):
    assert run_cli(monkeypatch, "demo", "--steps", "5") == 2
    assert "steps" not in demo_result, "the demo must not start"


@pytest.mark.parametrize("uri", ["nonsense://x/y", "memory://x", "/some/folder"])
def test_demo_refuses_a_place_that_is_no_bucket(monkeypatch, uri, capsys):
    assert run_cli(monkeypatch, "demo", "--uri", uri) == 1
    assert "s3://" in capsys.readouterr().err


def test_exit_code_of_the_process_says_that_it_failed():
    command = "from cloudckpt.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", command, "demo", "--uri", "nonsense://x/y"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 1
    assert "nonsense" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of five steps, of which the second is torn, with a stranger's folder beside them."""
    folder = tmp_path / "run"
    with cloudckpt.CheckpointManager(
        folder, asynchronous=False, preemption=cloudckpt.Preemption(signals=())
    ) as manager:
        for step in range(1, 6):
            state = {"w": torch.full((500, 3), float(step)), "step": step}
            manager.save(step, state, metrics={"loss": abs(step - 3.0)})
    (folder / "step-2" / ".metadata").unlink()
    (folder / "logs").mkdir()
    (folder / "logs" / "events").write_text("mine")
    return folder


def lines(capsys) -> list[list[str]]:
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


def test_ls_shows_steps_and_which_are_torn(monkeypatch, capsys, run):
    assert run_cli(monkeypatch, "ls", str(run)) == 0
    assert [(row[0], row[1], row[4].rpartition("/")[2]) for row in lines(capsys)] == [
        ("1", "committed", "step-1"),
        ("2", "torn", "step-2"),
        ("3", "committed", "step-3"),
        ("4", "committed", "step-4"),
        ("5", "committed", "step-5"),
    ]


def test_ls_prints_json(monkeypatch, capsys, run):
    assert run_cli(monkeypatch, "ls", str(run), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found] == [1, 2, 3, 4, 5]
    assert all(one["nbytes"] > 6000 for one in found)


def test_latest_prints_the_newest_committed_one(monkeypatch, capsys, run, tmp_path):
    assert run_cli(monkeypatch, "latest", str(run)) == 0
    assert capsys.readouterr().out == f"{(run / 'step-5').as_uri()}\n"
    assert run_cli(monkeypatch, "latest", str(tmp_path / "other")) == 3
    assert "no committed checkpoint" in capsys.readouterr().err


def test_inspect_shows_entries_by_pattern_and_notes(monkeypatch, capsys, run):
    assert run_cli(monkeypatch, "inspect", str(run / "step-4"), "w*") == 0
    assert lines(capsys) == [
        ["w", "float32", "500 x 3", "6.0 kB", "1"],
        ["1 entries, 6.0 kB"],
        ["step 4"],
        ["loss = 1"],
    ]
    assert run_cli(monkeypatch, "inspect", str(run / "step-4"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in found["items"]] == ["step", "w"]
    assert found["notes"]["metrics"] == {"loss": 1.0}


def test_verify_tells_whole_ones_and_damaged_ones_apart(monkeypatch, capsys, run):
    assert run_cli(monkeypatch, "verify", str(run / "step-5")) == 0
    assert "all of it is as it was written (2 items" in capsys.readouterr().out
    [data] = (run / "step-5").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[2000] ^= 1
    data.write_bytes(content)
    assert run_cli(monkeypatch, "verify", str(run / "step-5"), "--quiet") == 4
    assert "do not match their checksum" in capsys.readouterr().err
    assert run_cli(monkeypatch, "verify", str(run / "step-2")) == 3


def test_rm_deletes_what_it_may_and_asks_nobody_who_is_not_there(monkeypatch, capsys, run):
    wanted = [str(run / "step-1"), str(run / "step-3")]
    assert run_cli(monkeypatch, "rm", *wanted) == 2
    assert "--yes" in capsys.readouterr().err
    assert run_cli(monkeypatch, "rm", *wanted, "--yes") == 0
    assert [row[0].split()[0] for row in lines(capsys)] == ["deleted", "deleted"]
    assert run_cli(monkeypatch, "ls", str(run)) == 0
    assert [row[0] for row in lines(capsys)] == ["2", "4", "5"]
    assert run_cli(monkeypatch, "rm", *wanted, "--yes") == 3


def test_rm_asks_on_a_terminal(monkeypatch, run):
    answers = [False, True]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question: answers.pop(0))
    assert run_cli(monkeypatch, "rm", str(run / "step-1")) == 1
    assert (run / "step-1" / ".metadata").exists()
    assert run_cli(monkeypatch, "rm", str(run / "step-1")) == 0
    assert not (run / "step-1" / ".metadata").exists()


def test_prune_keeps_what_is_asked_for(monkeypatch, capsys, run):
    arguments = ("prune", str(run), "--max-to-keep", "1", "--keep-period", "3")
    assert run_cli(monkeypatch, *arguments, "--dry-run") == 0
    assert [row[0].rpartition("/")[2] for row in lines(capsys)] == ["step-1", "step-4"]
    assert run_cli(monkeypatch, *arguments, "--yes", "--quiet") == 0
    assert capsys.readouterr().out == ""
    assert run_cli(monkeypatch, *arguments, "--yes") == 0
    assert capsys.readouterr().out == "nothing is to be deleted\n"
    assert [step for step in (1, 3, 4, 5) if (run / f"step-{step}" / ".metadata").exists()] == [
        3,
        5,
    ]
    assert (run / "logs" / "events").exists()


def test_prune_keeps_the_best(monkeypatch, capsys, run):
    arguments = ("prune", str(run), "--max-to-keep", "1", "--best-metric", "loss", "--dry-run")
    assert run_cli(monkeypatch, *arguments) == 0
    assert [row[0].rpartition("/")[2] for row in lines(capsys)] == ["step-1", "step-4"]


def test_it_is_a_module_too():
    ended = subprocess.run(
        [sys.executable, "-m", "cloudckpt", "latest", "nonsense://x/y"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 1
    assert "nonsense" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_sweep_takes_what_no_checkpoint_names(monkeypatch, capsys, run):
    leftover = run / "step-2" / "__0_0.0123456789abcdef.distcp"
    leftover.write_bytes(b"x" * 1000)
    before = sorted(run.rglob("*"))
    assert run_cli(monkeypatch, "sweep", str(run), "--yes") == 0
    assert capsys.readouterr().out == "nothing is left over\n"
    assert sorted(run.rglob("*")) == before
    for path in run.rglob("*"):
        os.utime(path, (0, 0))
    assert run_cli(monkeypatch, "sweep", str(run), "--dry-run") == 0
    assert f"would delete {leftover.as_uri()}" in capsys.readouterr().out
    assert run_cli(monkeypatch, "sweep", str(run)) == 2
    assert run_cli(monkeypatch, "sweep", str(run), "--yes") == 0
    assert "deleted 3 objects" in capsys.readouterr().out  # with those of the torn checkpoint
    assert not list((run / "step-2").iterdir())
    for step in (1, 3, 4, 5):
        assert run_cli(monkeypatch, "verify", str(run / f"step-{step}")) == 0
    assert (run / "logs" / "events").exists()
