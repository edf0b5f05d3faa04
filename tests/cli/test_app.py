from __future__ import annotations

import builtins
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import cloudckpt
from cloudckpt import __main__
from cloudckpt.cli import output
from cloudckpt.cli.app import app
from cloudckpt.errors import AccessDeniedError
from cloudckpt.stores import registry
from support.memory_store import MemoryStore

OF_RUNS = ["ls", "latest", "prune --max-to-keep 1 --yes", "sweep --yes"]
OF_CHECKPOINTS = ["inspect", "verify", "diff", "cp", "rm --yes"]


ROOT = Path(__file__).parents[2]
LOOKING = {"ls", "du", "latest", "best", "inspect", "diff", "verify", "doctor"}
EVERY = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", EVERY)
def test_each_command_prints_json_is_documented_and_runs_on_each_cloud(name):
    options = [option for parameter in EVERY[name].params for option in parameter.opts]
    of_all = {"--json", "--quiet", "-v", "--concurrency", "--endpoint-url", "--profile", "--region"}
    assert of_all <= set(options)
    assert all(parameter.help for parameter in EVERY[name].params)
    assert name in LOOKING or "--dry-run" in options
    assert f"| `{name} " in (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert f'("{name} ' in (ROOT / "integration" / "test_command_line.py").read_text("utf-8")


def test_version_and_help_tell_of_the_package(cli):
    assert cli("--version").out == f"cloudckpt {cloudckpt.__version__}\n"
    assert all(name in cli("--help").out for name in EVERY)


def test_a_shell_can_complete_commands_and_options(cli, monkeypatch):
    monkeypatch.setenv("_CLOUDCKPT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cloudckpt verify --conc")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert cli().out.split() == ["--concurrency"]


def test_verbose_logs_what_happens_and_only_then(cli, run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    assert cli("cp", run / "step-4", tmp_path / "other", "--quiet").err == ""
    assert "is a run" in cli("cp", run / "step-4", tmp_path / "other", "-v").err


def test_without_its_packages_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("cloudckpt.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(cloudckpt, "cli")
    with pytest.raises(SystemExit, match=r"needs typer; .* pip install 'cloudckpt\[cli\]'"):
        __main__.main()


class Denied(MemoryStore):
    """A store that knows the user, and lets him do nothing."""

    def _refuse(self, *args: object, **kwargs: object) -> None:
        raise AccessDeniedError("access is denied", uri="memory://secret-place")

    list = list_level = list_uploads = head = get = get_range = _refuse


@pytest.mark.parametrize("command", OF_RUNS + OF_CHECKPOINTS)
def test_what_is_denied_is_told_by_each_command(cli, monkeypatch, command):
    opener = lambda uri, config: Denied("denied")  # noqa: E731
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: opener})
    (name, *options), place = command.split(), "memory://denied/run"
    others = {"diff": [place], "cp": [f"{place}-copy"]}.get(name, [])
    ended = cli(name, place, *others, *options)
    code = 2 if command == "diff" else 1  # as of diff(1)
    assert ended == (code, "", "cloudckpt: access is denied | at memory://secret-place\n")


def test_names_with_control_characters_can_neither_forge_lines_nor_move_the_cursor(cli, tmp_path):
    name = "a\tb\nstep\x1b[2J\u202e ö 日本"
    cloudckpt.save({name: torch.zeros(2)}, checkpoint_id=tmp_path / "strange name ö")
    ended = cli("inspect", tmp_path / "strange name ö")
    assert ended.out == "a\\tb\\nstep\\x1b[2J\\u202e ö 日本\tfloat32\t2\t8 bytes\t1\n"
    assert cli("inspect", tmp_path / "strange name ö", "--json").json["items"][0]["name"] == name


def test_a_message_with_control_characters_is_one_line(cli):
    ended = cli("latest", "s3://bucket/\x1b[31mred\nblue")
    assert (ended.code, "\x1b" in ended.err) == (2, False)


def test_columns_line_up_on_a_terminal_whatever_is_in_them(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")  # without colours
    output.print_table([{"name": "日本[b]", "size": 1}, {"name": "a", "size": 22}], {"a": "yellow"})
    assert capsys.readouterr().out.splitlines() == [
        "name     size",
        "日本[b]     1",
        "a          22",
    ]


def test_progress_is_told_in_lines_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(output, "_BETWEEN_LINES", 0.0)
    with output.progress_bar("reading", shown=True) as tell:
        tell(500, 2000)
    assert capsys.readouterr().err.startswith("reading: 500 bytes of 2.0 kB (25%), ")
    with output.progress_bar("reading", shown=False) as tell:
        tell(500, 2000)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "shown"), [(4.0, ""), (9.0, "-:--:--")])
def test_a_bar_estimates_no_time_in_its_first_seconds(seconds, shown):
    task = output.Task(0, "", 100.0, 0.0, lambda: seconds)
    task.start_time = 0.0
    assert output._TimeLeft().render(task).plain == shown


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


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("latest nonsense://x/y", 2, "", "nonsense"),
        ("ls {run} >&-", 0, "", ""),
        ("ls nothing 2>&-", 3, "", ""),
        ("rm {run}/step-1 <&-", 2, "", "with --yes"),
        ("ls {run} >/dev/full", 1, "", "No space left on device"),
    ],
)
def test_it_is_a_module_too_and_closed_or_full_streams_are_no_trouble(run, line, code, out, err):
    command = f"exec '{sys.executable}' -m cloudckpt {line.format(run=run)}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, out)
    assert err in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_ends_the_command_quietly(cli, run, monkeypatch):
    def gone(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    ended = cli("ls", run)
    assert (ended.code, ended.err) == (1, "")
