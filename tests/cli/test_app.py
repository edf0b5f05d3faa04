from __future__ import annotations

import subprocess
import sys

import cloudckpt


def test_version_is_that_of_the_package(cli, capsys):
    assert cli("--version") == 0
    assert capsys.readouterr().out == f"cloudckpt {cloudckpt.__version__}\n"


def test_help_lists_the_commands(cli, capsys):
    assert cli("--help") == 0
    assert "demo" in capsys.readouterr().out


def test_unknown_command_is_a_usage_error(cli, capsys):
    assert cli("destroy") == 2
    assert "destroy" in capsys.readouterr().err


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
