"""Frameworks are changed in whatever order they and cloudckpt are imported, and back."""

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

import cloudckpt
from cloudckpt.integrations import adapting

MODULES = sorted(adapting._ADAPTERS)
SAID = {"ray.train": "ray.train._checkpoint"}
"""What a class says for its module, and where it is."""
THERE = [name for name in MODULES if "torchtitan" not in name]  # it takes a minute to import

LATER = """
import sys, importlib, cloudckpt.auto
{mine}
for name in {names}:
    importlib.import_module(name)
from cloudckpt.integrations import adapting
owners = [owner for made in adapting._replaced.values() for owner, _, _ in made]
assert not adapting._unknown
names = {{getattr(owner, "__module__", owner.__name__) for owner in owners}}
print(sorted({said}.get(name, name) for name in names))
"""


@pytest.mark.parametrize(
    "mine", ["", "import cloudckpt.integrations.lightning, cloudckpt.integrations.accelerate"]
)
def test_what_is_imported_after_install_is_changed(mine: str) -> None:
    script = LATER.format(mine=mine, names=THERE, said=SAID)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().splitlines()[-1] == str(THERE)


def test_what_was_imported_before_is_changed_and_changed_back() -> None:
    for name in THERE:
        importlib.import_module(name)
    cloudckpt.uninstall()
    owners = {**_classes(), **{name: sys.modules[name] for name in THERE}}
    before = {name: dict(vars(owner)) for name, owner in owners.items()}
    cloudckpt.install()
    changed = {name for name, owner in owners.items() if dict(vars(owner)) != before[name]}
    assert {name.partition(":")[0] for name in changed} == {*THERE}
    assert not adapting._unknown
    cloudckpt.uninstall()
    assert {name: dict(vars(owner)) for name, owner in owners.items()} == before


def _classes() -> dict[str, Any]:
    """All classes of the modules that are changed."""
    return {
        f"{name}:{kind}": value
        for name in THERE
        for kind, value in vars(sys.modules[name]).items()
        if inspect.isclass(value) and SAID.get(value.__module__, value.__module__) == name
    }
