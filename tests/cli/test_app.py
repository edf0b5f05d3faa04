from __future__ import annotations

import builtins
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
import typer

import cloudckpt
from cloudckpt import __main__
from cloudckpt.cli import app as shared
from cloudckpt.errors import AccessDeniedError
from cloudckpt.stores import registry
from memory_store import MemoryStore

OF_RUNS = ["ls", "latest", "prune --max-to-keep 1 --yes", "sweep --yes"]
OF_CHECKPOINTS = ["inspect", "verify", "diff", "cp", "rm --yes"]


ROOT = Path(__file__).parents[2]
EVERY = typer.main.get_command(shared.app).commands


@pytest.mark.parametrize("name", EVERY)
def test_each_command_prints_json_is_documented_and_runs_on_each_cloud(name):
    options = [option for parameter in EVERY[name].params for option in parameter.opts]
    assert "--json" in options
    assert f"| `{name} " in (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert f'("{name} ' in (ROOT / "integration" / "test_command_line.py").read_text("utf-8")


def test_version_is_that_of_the_package(cli, capsys):
    assert cli("--version") == 0
    assert capsys.readouterr().out == f"cloudckpt {cloudckpt.__version__}\n"


def test_help_lists_the_commands(cli, capsys):
    assert cli("--help") == 0
    assert "verify" in capsys.readouterr().out


def test_without_its_packages_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("cloudckpt.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(cloudckpt, "cli")
    with pytest.raises(SystemExit, match=r"needs typer; .* pip install 'cloudckpt\[cli\]'"):
        __main__.main()


def test_unknown_command_is_a_usage_error(cli, capsys):
    assert cli("destroy") == 2
    assert "destroy" in capsys.readouterr().err


def test_it_is_a_module_too():
    ended = subprocess.run(
        [sys.executable, "-m", "cloudckpt", "latest", "nonsense://x/y"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 2
    assert "nonsense" in ended.stderr
    assert "Traceback" not in ended.stderr


def with_place(command: str, place: str) -> list[str]:
    name, *options = command.split()
    others = {"diff": [place], "cp": [f"{place}-copy"]}.get(name, [])
    return [name, place, *others, *options]


class Denied(MemoryStore):
    """A store that knows the user, and lets him do nothing."""

    def _refuse(self, *args: object, **kwargs: object) -> None:
        raise AccessDeniedError("access is denied", uri="memory://secret-place")

    list = list_level = list_uploads = head = get = get_latest = get_range = _refuse


@pytest.mark.parametrize("command", OF_RUNS + OF_CHECKPOINTS)
def test_what_is_denied_is_told_by_each_command(cli, monkeypatch, capsys, command):
    opener = lambda uri, config: Denied("denied")  # noqa: E731
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: opener})
    assert cli(*with_place(command, "memory://denied/run")) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "cloudckpt: access is denied | at memory://secret-place\n"


@pytest.mark.parametrize("command", OF_RUNS + OF_CHECKPOINTS)
def test_credentials_that_are_missing_are_told_by_each_command(cli, monkeypatch, capsys, command):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    bucket = f"s3://bucket-{uuid.uuid4().hex}"  # stores are kept, with their credentials
    assert cli(*with_place(command, f"{bucket}/run")) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "credentials" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", OF_CHECKPOINTS)
def test_a_folder_of_a_stranger_is_no_checkpoint(cli, capsys, run, command):
    assert cli(*with_place(command, str(run / "logs"))) == 3
    assert "no committed checkpoint" in capsys.readouterr().err
    assert (run / "logs" / "events").exists()


@pytest.mark.parametrize("command", [*OF_RUNS, *OF_CHECKPOINTS])
def test_each_command_prints_json_that_is_strict(cli, capsys, run, command):
    def no_number(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    place = run if command in OF_RUNS else run / "step-4"
    assert cli(*with_place(command, str(place)), "--json") == 0
    assert json.loads(capsys.readouterr().out, parse_constant=no_number)


def test_names_with_control_characters_can_neither_forge_lines_nor_move_the_cursor(
    cli, capsys, tmp_path
):
    name = "a\tb\nstep\x1b[2J\u202e ö 日本"
    cloudckpt.save({name: torch.zeros(2)}, checkpoint_id=tmp_path / "strange name ö")
    assert cli("inspect", str(tmp_path / "strange name ö")) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "a\\tb\\nstep\\x1b[2J\\u202e ö 日本\tfloat32\t2\t8 bytes\t1"
    assert others == ["1 entries, 8 bytes"]
    assert cli("inspect", str(tmp_path / "strange name ö"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["items"][0]["name"] == name


def test_a_message_with_control_characters_is_one_line(cli, capsys):
    assert cli("latest", "s3://bucket/\x1b[31mred\nblue") != 0
    assert "\x1b" not in capsys.readouterr().err


def test_columns_line_up_on_a_terminal_whatever_is_in_them(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")  # without colours
    shared.print_rows(
        ["name", "size"], [["日本[b]", "1"], ["a", "22"]], right={1}, styles={"a": "yellow"}
    )
    assert capsys.readouterr().out.splitlines() == [
        "name     size",
        "日本[b]     1",
        "a          22",
    ]


def test_progress_is_told_in_lines_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(shared, "_BETWEEN_LINES", 0.0)
    with shared.progress_bar("reading", shown=True) as tell:
        tell(500, 2000)
    assert capsys.readouterr().err.startswith("reading: 500 bytes of 2.0 kB (25%), ")
    with shared.progress_bar("reading", shown=False) as tell:
        tell(500, 2000)
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_ends_the_command_quietly(run):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "cloudckpt", "ls", str(run)],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=250,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
def test_output_that_can_not_be_written_is_told(run):
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "cloudckpt", "ls", str(run)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=250,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith("cloudckpt: ")
    assert "No space left on device" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


_WAITS = """
import threading
import cloudckpt
from cloudckpt.cli import main

def verify(*args, **kwargs):
    print("waiting", flush=True)
    threading.Event().wait(200)

cloudckpt.verify = verify
main()
"""


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("ls {run} >&-", 0, "", ""),
        ("ls nothing 2>&-", 0, "", ""),
        ("rm {run}/step-1 <&-", 2, "", "give --yes"),
    ],
)
def test_closed_streams_are_no_trouble(run, line, code, out, err):
    command = f"exec '{sys.executable}' -m cloudckpt {line.format(run=run)}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, out)
    assert err in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_during_the_import_ends_a_command_quietly(monkeypatch):
    def interrupted(name, *rest):
        if name == "cloudckpt.cli":
            raise KeyboardInterrupt
        return imported(name, *rest)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130


def test_ctrl_c_ends_a_command_quietly():
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS, "verify", "s3://bucket/run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=100)
    assert (child.returncode, out, err) == (130, "", "")
