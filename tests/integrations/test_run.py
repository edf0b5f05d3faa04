"""``python -m cloudckpt.run`` and ``import cloudckpt.auto``: a script is run as it is."""

import importlib
import os
import subprocess
import sys

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from support.forks import child

_SCRIPT = """
import os, pickle, sys
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
import beside

class Mine: ...

pickle.loads(pickle.dumps(Mine()))
print(__name__, sys.argv[1:], os.path.basename(sys.argv[0]), os.path.basename(__file__))
print(type(FileSystemWriter("s3://bucket/run")).__name__)
raise SystemExit(7)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "beside.py").write_text("")
    return tmp_path


def _run(*command, cwd):
    environment = dict(os.environ, AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x")
    environment["AWS_REGION"] = "us-east-1"
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _said(ended):
    assert ended.returncode == 7, ended.stderr
    return ended.stdout.split("\n")


def test_a_script_is_run_with_cloudckpt_installed(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    ended = _run("-m", "cloudckpt.run", str(folder / "train.py"), "--x", "-m", cwd=elsewhere)
    assert _said(ended)[:2] == ["__main__ ['--x', '-m'] train.py train.py", "CloudStorageWriter"]


def test_a_module_is_run_with_cloudckpt_installed(folder):
    ended = _run("-m", "cloudckpt.run", "-m", "train", "--x", cwd=folder)
    assert _said(ended)[:2] == ["__main__ ['--x'] train.py train.py", "CloudStorageWriter"]


def _written_by_after_auto() -> str:
    importlib.import_module("cloudckpt.auto")
    return type(FileSystemWriter("s3://bucket/run")).__name__


def test_importing_auto_installs():
    with child(_written_by_after_auto) as running:
        assert running.wait() == (0, "CloudStorageWriter")


def test_without_a_script_the_usage_is_told(folder):
    ended = _run("-m", "cloudckpt.run", "--folder", "s3://x", cwd=folder)
    assert ended.returncode == 1
    assert "usage: python -m cloudckpt.run" in ended.stderr
