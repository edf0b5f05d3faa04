"""Tries what `make build` has made: what is in it, and that it runs in an empty environment.

A new environment sees the wheel and, of this environment, nothing but the packages that the wheel
requires, directly or not: no package of a test, and no numpy, can help out.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

_IMPORT_ALL = """
import importlib, pkgutil, sys
import cloudckpt
from cloudckpt.errors import MissingDependencyError

assert cloudckpt.__file__.startswith(sys.prefix), cloudckpt.__file__
# these are imported by those who have what they are for
optional = ("integrations.", "stores.", "cli")
for module in pkgutil.walk_packages(cloudckpt.__path__, "cloudckpt."):
    try:
        importlib.import_module(module.name)
    except (MissingDependencyError, ModuleNotFoundError) as error:
        assert module.name.removeprefix("cloudckpt.").startswith(optional), (module.name, error)
"""

_SAVE_AND_LOAD = """
import sys, torch, cloudckpt

cloudckpt.save({"w": torch.arange(5.0), "step": 7}, checkpoint_id=sys.argv[1], no_dist=True)
state = {"w": torch.zeros(5), "step": 0}
cloudckpt.load(state, checkpoint_id=sys.argv[1], no_dist=True)
assert state["w"].tolist() == [0, 1, 2, 3, 4] and state["step"] == 7
"""


def main(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    _look_into(wheel, sdist)
    with tempfile.TemporaryDirectory() as made:
        at = os.path.realpath(made)
        base = _environment(Path(at, "base"), wheel, extras=set())
        _run(base, "-W", "ignore", "-c", _IMPORT_ALL)
        _run(base, "-W", "ignore", "-c", _SAVE_AND_LOAD, f"{at}/run/step-7")
        refused = _ended(base, "-m", "cloudckpt", "--help")
        assert refused.returncode == 1, refused
        assert "pip install 'cloudckpt[cli]'" in refused.stderr, refused
        with_cli = _environment(Path(at, "cli"), wheel, extras={"cli"})
        command = with_cli.with_name("cloudckpt")
        assert "verify" in _run(command, "--help")
        assert _run(command, "latest", f"{at}/run") == f"file://{at}/run/step-7\n"
    print(f"{wheel.name} and {sdist.name} are as they should be")


def _look_into(wheel: Path, sdist: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"cloudckpt"}, tops
    assert "cloudckpt/py.typed" in names
    assert not [name for name in names if "/testing/" in name or "/demo/" in name]
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    files = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "pyproject.toml"}
    assert tops - {".gitignore"} == files | {"src"}, tops


def _environment(at: Path, wheel: Path, extras: set[str]) -> Path:
    """A new environment; returns its Python."""
    venv.create(at, with_pip=False, symlinks=True)
    python = at / "bin" / "python"
    (packages,) = at.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", "--no-deps", str(wheel)], check=True)
    wanted = f"cloudckpt[{','.join(extras)}]" if extras else "cloudckpt"
    for name in _requirements(wheel, wanted):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(distribution(name).locate_file(top))
    return python


def _requirements(wheel: Path, wanted: str) -> set[str]:
    """The names of the packages that this asks for, directly or not."""
    metadata = zipfile.ZipFile(wheel).read(_metadata_of(wheel)).decode()
    lines = [line for line in metadata.partition("\n\n")[0].splitlines() if ": " in line]
    asked = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    found: set[str] = set()
    queue = [(Requirement(wanted), asked)]
    while queue:
        requirement, needs = queue.pop()
        for need in map(Requirement, needs):
            environments = [{"extra": extra} for extra in requirement.extras or {""}]
            if need.marker and not any(map(need.marker.evaluate, [{"extra": ""}, *environments])):
                continue
            if need.name not in found:
                found.add(need.name)
                queue.append((need, list(distribution(need.name).requires or ())))
    return found


def _metadata_of(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name}-{version}.dist-info/METADATA"


def _run(program: Path, *arguments: str) -> str:
    ended = _ended(program, *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _ended(program: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(program), *(("-I",) if program.name == "python" else ()), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
