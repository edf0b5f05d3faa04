"""Frameworks are changed in whatever order they and cloudckpt are imported, and back."""

import importlib
import subprocess
import sys

import pytest

import cloudckpt
from cloudckpt.integrations import adapting

MODULES = sorted(adapting._ADAPTERS)
THERE = [name for name in MODULES if "torchtitan" not in name]  # it takes a minute to import

LATER = """
import sys, importlib, cloudckpt.auto
{mine}
for name in {names}:
    importlib.import_module(name)
from cloudckpt.integrations import adapting
owners = [owner for owner, _, _ in adapting._replaced]
print(sorted({{getattr(owner, "__module__", owner.__name__) for owner in owners}}))
"""


@pytest.mark.parametrize(
    "mine", ["", "import cloudckpt.integrations.lightning, cloudckpt.integrations.accelerate"]
)
def test_what_is_imported_after_install_is_changed(mine: str) -> None:
    script = LATER.format(mine=mine, names=THERE)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().splitlines()[-1] == str(THERE)
    assert "newer than this cloudckpt knows" not in ended.stderr


def test_what_was_imported_before_is_changed_and_changed_back() -> None:
    for name in THERE:
        importlib.import_module(name)
    cloudckpt.uninstall()
    before = {name: dict(vars(sys.modules[name])) for name in THERE}
    cloudckpt.install()
    changed = [(owner, name, vars(owner)[name]) for owner, name, _ in adapting._replaced]
    assert {getattr(owner, "__module__", owner.__name__) for owner, _, _ in changed} == {*THERE}
    cloudckpt.uninstall()
    assert all(vars(owner)[name] is not value for owner, name, value in changed)
    assert before == {name: dict(vars(sys.modules[name])) for name in THERE}
