"""torchtitan's manager on torch_checkpointing takes URIs behind ``install()``.

That of torchtitan 0.3 saves nothing yet; a later one is a stub here, with what is asked of it.
"""

import dataclasses
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from torchtitan.tools import filesystem

from cloudckpt.integrations import adapting
from cloudckpt.integrations.shapes import UnknownShapeError
from cloudckpt.integrations.torch_checkpointing import CloudStorage
from cloudckpt.integrations.torchtitan_manager import changes

OF_0_3 = """
import sys, types
import torch_checkpointing.default_resharder as resharders
missing = types.ModuleType("torch_checkpointing.dtensor_resharder")
missing.DTensorResharder = resharders.DefaultResharder  # its name in an earlier torch_checkpointing
sys.modules[missing.__name__] = missing
import cloudckpt
cloudckpt.install()
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager
assert TorchCheckpointingManager.Config(folder="run").folder == "run"
try:
    TorchCheckpointingManager.Config(folder="s3://bucket/run")
except cloudckpt.errors.InstallError as error:
    print(error)
"""


class Manager:
    """A stub: it refuses URIs in its constructor, and takes a storage."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        folder: str = "checkpoint"
        initial_load_path: str | None = None
        _owner: ClassVar[Any] = None

        def build(self, **given: Any) -> Any:
            return self._owner(config=dataclasses.replace(self), **given)

    def __init__(
        self, config: Config, *, states: object, base_folder: str = "", storage_config: Any = None
    ) -> None:
        self.folder = filesystem.join(base_folder, config.folder)
        self.initial_load_path = config.initial_load_path
        for path in (self.folder, self.initial_load_path):
            if path and filesystem.is_remote(path):
                raise ValueError("remote URIs are not yet supported")
        self.states = states
        self.storage = (storage_config or LocalFileSystemStorageConfig()).create_storage()


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module like torchtitan's, changed as ``install`` changes it, and changed back."""
    module = types.ModuleType("torchtitan.components.checkpointer.like")
    module.TorchCheckpointingManager = Manager
    module.filesystem = filesystem
    Manager.Config._owner = Manager
    adapting._replace("torchtitan-like", list(changes(module)))
    yield module
    adapting._revert("torchtitan-like")
    with pytest.raises(ValueError, match="not yet supported"):
        Manager.Config(folder="s3://frameworks/run").build(states=1)


def test_the_manager_reads_and_writes_uris_by_our_storage(
    module: types.ModuleType, environment: dict[str, str], run: str
) -> None:
    config = Manager.Config(folder=run, initial_load_path=f"{run}-before/step-3")
    manager = config.build(states=1, base_folder="outputs")
    assert isinstance(manager, Manager)
    assert (manager.folder, manager.initial_load_path) == (run, f"{run}-before/step-3")
    assert config.folder == run
    path = Path(manager.folder) / "step-1" / "metadata.pkl"
    manager.storage.write(path, b"saved")
    assert manager.storage.read(path) == b"saved"


def test_paths_go_the_way_of_the_manager(module: types.ModuleType, tmp_path: Path) -> None:
    manager = Manager.Config(folder="run").build(states=1, base_folder=str(tmp_path))
    assert manager.folder == f"{tmp_path}/run"
    assert not isinstance(manager.storage, CloudStorage)
    with pytest.raises(ValueError, match="not yet supported"):
        Manager.Config(folder="hdfs://node/run").build(states=1)


def test_one_that_takes_no_base_folder_is_not_known() -> None:
    class Other(Manager):
        def __init__(self, config: object, storage_config: object) -> None: ...

    module = types.ModuleType("torchtitan.components.checkpointer.like")
    module.TorchCheckpointingManager = Other
    with pytest.raises(UnknownShapeError, match="no parameter 'base_folder'"):
        list(changes(module))


def test_that_of_0_3_refuses_uris_by_name(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OF_0_3], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "torchtitan 0.3.0" in ended.stdout
    assert "takes no storage" in ended.stdout
