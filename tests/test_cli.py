from __future__ import annotations

import subprocess
import sys

import pytest

import cloudckpt
from cloudckpt import cli

pytest.importorskip("typer", reason="the command line needs the extra 'demo'")
pytest.importorskip("rich", reason="the command line needs the extra 'demo'")
pytest.importorskip("moto", reason="the demo needs the extra 'demo'")


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Runs the command in this process; returns its exit code or message."""
    monkeypatch.setattr(sys, "argv", ["cloudckpt", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


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


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_packages_of_the_command_line_says_what_to_install(monkeypatch, package):
    without(monkeypatch, package)
    message = run_cli(monkeypatch, "--version")
    assert package in str(message)
    assert "pip install 'cloudckpt[demo]'" in str(message)


@pytest.mark.parametrize("package", ["moto", "flask", "boto3", "numpy"])
def test_demo_without_its_packages_says_what_to_install(monkeypatch, demo_result, package):
    without(monkeypatch, package)
    message = run_cli(monkeypatch, "demo")
    assert package in str(message)
    assert "pip install 'cloudckpt[demo]'" in str(message)
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


def test_failed_check_of_the_demo_is_a_failure_of_the_command(monkeypatch, demo_result):
    demo_result["returns"] = False
    assert "a check" in str(run_cli(monkeypatch, "demo"))


def test_failed_rank_is_told_without_a_traceback(monkeypatch, demo_result):
    from cloudckpt.demo.children import ChildError

    demo_result["returns"] = ChildError("rank(s) [1] failed")
    assert run_cli(monkeypatch, "demo") == "cloudckpt: the demo failed: rank(s) [1] failed"


def test_bad_bucket_is_told_without_a_traceback(monkeypatch, demo_result):
    demo_result["returns"] = cloudckpt.BucketNotFoundError("no such bucket", uri="s3://nowhere")
    assert run_cli(monkeypatch, "demo") == "cloudckpt: no such bucket | at s3://nowhere"


def test_keep_without_a_bucket_is_a_usage_error(monkeypatch, demo_result, capsys):
    assert run_cli(monkeypatch, "demo", "--keep") == 2
    assert "--keep needs --uri" in capsys.readouterr().err
    assert "steps" not in demo_result, "the demo must not start"


def test_too_few_steps_are_a_usage_error(monkeypatch, demo_result):
    assert run_cli(monkeypatch, "demo", "--steps", "5") == 2
    assert "steps" not in demo_result, "the demo must not start"


@pytest.mark.parametrize("uri", ["nonsense://x/y", "memory://x", "/some/folder"])
def test_demo_refuses_a_place_that_is_no_bucket(monkeypatch, uri):
    message = run_cli(monkeypatch, "demo", "--uri", uri)
    assert "s3://" in str(message)


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
