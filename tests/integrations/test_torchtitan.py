"""torchtitan is adapted when it is imported; what it is like is seen by integration/frameworks."""

import dataclasses
import importlib
import sys

import pytest
import torch

import cloudckpt

_MODULE = "torchtitan.components.checkpointer.dcp"
_LIKE_TORCHTITAN = """
from dataclasses import dataclass
from torchtitan.tools import filesystem

class BaseCheckpointManager:
    @dataclass
    class Config:
        folder: str
        last_save_in_hf: bool = False
        last_save_model_only: bool = True
        initial_load_in_hf: bool = False
        initial_load_in_hf_quantized: bool = False
        initial_load_model_only: bool = True
        initial_load_path: str | None = None

        def __post_init__(self):
            if self.last_save_in_hf and "://" in self.folder:
                raise ValueError("last_save_in_hf is not supported with a remote folder")
            if self.initial_load_in_hf and "://" in self.initial_load_path:
                raise ValueError("initial_load_in_hf is not supported with a remote path")

class CheckpointManager(BaseCheckpointManager):
    def dcp_save(self, state_dict, checkpoint_id, async_mode, gc=False, to_hf=False): ...
"""


@pytest.fixture
def torchtitan(tmp_path, monkeypatch):
    """A package in the place of torchtitan; returns the file that its managers are in."""
    if importlib.util.find_spec("torchtitan"):
        pytest.skip("the real one is here")
    folder = tmp_path / "torchtitan" / "components" / "checkpointer"
    folder.mkdir(parents=True)
    (folder / "dcp.py").write_text(_LIKE_TORCHTITAN)
    (tmp_path / "torchtitan" / "tools").mkdir()
    (tmp_path / "torchtitan" / "tools" / "filesystem.py").write_text(
        "def rmtree(path): path.clear()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield folder / "dcp.py"
    cloudckpt.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
        del sys.modules[name]


@pytest.mark.parametrize("first", ["install", "import"])
def test_the_refusal_of_models_on_uris_is_taken_back(torchtitan, first):
    if first == "install":
        cloudckpt.install()
    module = importlib.import_module(_MODULE)
    cloudckpt.install()
    cloudckpt.install()

    config = module.BaseCheckpointManager.Config
    assert config("s3://bucket/run", last_save_in_hf=True).last_save_in_hf
    assert not config("s3://bucket/run").last_save_in_hf
    for refused in (
        {"folder": "hdfs://node/run"},
        {"folder": "s3://bucket/run", "last_save_model_only": False},
    ):
        with pytest.raises(ValueError, match="not supported"):
            config(**refused, last_save_in_hf=True)
    begun = {"folder": "run", "initial_load_in_hf": True}
    assert config(**begun, initial_load_path="s3://bucket/model").initial_load_in_hf
    for refused in (
        {"initial_load_path": "hdfs://node/model"},
        {"initial_load_path": "s3://bucket/model", "initial_load_in_hf_quantized": True},
    ):
        with pytest.raises(ValueError, match="not supported"):
            config(**begun, **refused)
    cloudckpt.uninstall()
    with pytest.raises(ValueError, match="not supported"):
        config("s3://bucket/run", last_save_in_hf=True)


def test_one_that_is_unlike_refuses_uris_by_name(torchtitan):
    torchtitan.write_text(_LIKE_TORCHTITAN.replace("to_hf", "as_hf"))
    cloudckpt.install()
    module = importlib.import_module(_MODULE)
    with pytest.raises(cloudckpt.errors.InstallError, match="dcp_save has no parameter 'to_hf'"):
        module.BaseCheckpointManager.Config("s3://bucket/run")
    with pytest.raises(cloudckpt.errors.InstallError, match="dcp_save has no parameter 'to_hf'"):
        module.CheckpointManager().dcp_save({}, "s3://bucket/run/step-1", None)
    assert module.BaseCheckpointManager.Config("run").folder == "run"


def test_it_removes_by_ours_whoever_serves_the_scheme(torchtitan, s3, monkeypatch):
    monkeypatch.setattr("fsspec.core.url_to_fs", None)
    config = dataclasses.replace(s3.config, incremental=True)
    cloudckpt.install(config=config)
    module = importlib.import_module(_MODULE)
    for step in (1, 2):
        cloudckpt.save({"w": torch.ones(9)}, checkpoint_id=f"{s3.uri}/step-{step}", config=config)
    module.filesystem.rmtree(f"{s3.uri}/step-1")
    module.filesystem.rmtree(f"{s3.uri}/step-0")  # nothing
    assert not cloudckpt.exists(f"{s3.uri}/step-1", config=config)
    cloudckpt.verify(f"{s3.uri}/step-2", config=config)

    local = ["a path, here"]
    module.filesystem.rmtree(local)
    assert not local
