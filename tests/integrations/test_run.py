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


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_script_or_module_is_run_with_cloudckpt_installed(folder, tmp_path_factory, how):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    train, cwd = (
        ([str(folder / "train.py")], elsewhere) if how == "script" else (["-m", "train"], folder)
    )
    ended = _run("-m", "cloudckpt.run", *train, "--x", "-m", cwd=cwd)
    assert ended.returncode == 7, ended.stderr
    told = ["__main__ ['--x', '-m'] train.py train.py", "CloudStorageWriter"]
    assert ended.stdout.split("\n")[:2] == told


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
