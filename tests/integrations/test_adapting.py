"""Frameworks that look otherwise than is known; integration/frameworks sees the real ones."""

import importlib
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt.integrations import adapting, local_only

URI = "s3://bucket/run"
MODELS, OPTIONS = "transformers.modeling_utils", "transformers.training_args"
TOKENS = "transformers.tokenization_utils_base"

SAVING = """
import os

class PreTrainedModel{bases}:
    def {method}(self, {parameter}, push=False):
        os.makedirs({parameter})
"""
MOVED = SAVING.format(bases="", method="save_pretrained", parameter="save_directory")
MOVED = MOVED.replace("PreTrainedModel", "Saving") + "class PreTrainedModel(Saving): ...\n"
KNOWN_OPTIONS = """
from dataclasses import dataclass

@dataclass
class TrainingArguments:
    output_dir: str
    def __post_init__(self):
        self.seen = self.output_dir
"""
KNOWN_TOKENS = """
class PreTrainedTokenizerBase:
    def save_pretrained(self, save_directory): ...
    def __call__(self, text): return text
    def encode(self, text): return text
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes packages that stand in for frameworks, and puts this process into an empty folder."""
    packages, here = tmp_path / "packages", tmp_path / "cwd"
    packages.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(packages)

    def write(modules):
        for name, source in modules.items():
            *folders, file = name.split(".")
            folder = packages.joinpath(*folders)
            folder.mkdir(parents=True, exist_ok=True)
            for package in [folder, *folder.parents]:
                if packages in package.parents:
                    (package / "__init__.py").touch()
            (folder / f"{file}.py").write_text(source)
            version = packages / folders[0] / "__init__.py"
            version.write_text("__version__ = '9.1'\n")
        importlib.invalidate_caches()

    tops = {name.partition(".")[0] for name in adapting._ADAPTERS}
    for top in tops:
        if importlib.util.find_spec(top):
            pytest.skip(f"the real {top} is here")
    yield write
    cloudckpt.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]
    assert not [*here.iterdir()]  # no folder s3: above all


@pytest.fixture(params=["install first", "import first"])
def imported(request, written):
    """Imports modules, whose sources are given, before or after ``install``."""

    def import_them(modules):
        written(modules)
        if request.param == "install first":
            cloudckpt.install()
        found = [importlib.import_module(name) for name in modules]
        cloudckpt.install()
        return found

    return import_them


def test_a_method_that_has_moved_to_a_base_is_refused_and_comes_back(imported, tmp_path):
    [module] = imported({MODELS: MOVED})
    model = module.PreTrainedModel()
    for given in (URI, Path(URI)):
        with pytest.raises(cloudckpt.errors.CloudCheckpointError, match="s3://bucket/run"):
            model.save_pretrained(given)
    with pytest.raises(cloudckpt.errors.InstallError, match=r"cloudckpt\.hf\.save"):
        model.save_pretrained(save_directory=URI, push=True)
    model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model").is_dir()

    cloudckpt.uninstall()
    assert "save_pretrained" not in vars(module.PreTrainedModel)
    assert module.PreTrainedModel.save_pretrained is module.Saving.save_pretrained


@pytest.mark.parametrize(
    ("source", "method", "unknown"),
    [
        (
            SAVING.format(bases="", method="save_pretrained", parameter="target"),
            "save_pretrained",
            "save_pretrained has no parameter 'save_directory'",
        ),
        (
            SAVING.format(bases="", method="store", parameter="place"),
            "store",
            "there is no transformers.modeling_utils.PreTrainedModel.save_pretrained",
        ),
        (
            SAVING.format(bases="", method="save_pretrained", parameter="where").replace(
                "PreTrainedModel", "Model"
            ),
            "save_pretrained",
            "there is no transformers.modeling_utils.PreTrainedModel.save_pretrained",
        ),
    ],
    ids=["renamed parameter", "renamed method", "renamed class"],
)
def test_an_unknown_shape_refuses_uris_by_name_and_takes_paths(
    imported, tmp_path, source, method, unknown
):
    [module] = imported({MODELS: source})
    [kind] = [value for value in vars(module).values() if isinstance(value, type)]
    save = getattr(kind(), method)
    for given in (URI, Path(URI), cloudckpt.uri.CheckpointURI.parse(URI)):
        with pytest.raises(cloudckpt.errors.InstallError) as failed:
            save(given)
        assert failed.value.uri == URI
        assert f"{kind.__name__}.{method} of transformers 9.1" in str(failed.value)
        assert unknown in str(failed.value)
        assert "call cloudckpt.save" in str(failed.value)
    save(tmp_path / "model")
    assert (tmp_path / "model").is_dir()

    before = getattr(kind, method)
    cloudckpt.uninstall()
    assert getattr(kind, method) is not before
    assert getattr(kind, method).__code__.co_filename == module.__file__


def test_a_function_of_an_unknown_module_refuses_uris(imported, tmp_path):
    source = "import os\ndef save_model(model, target):\n    os.makedirs(target)\n"
    [module] = imported({MODELS: source})
    with pytest.raises(cloudckpt.errors.InstallError, match=r"save_model of transformers 9\.1"):
        module.save_model(None, target=URI)
    module.save_model(None, tmp_path / "model")
    cloudckpt.uninstall()
    assert module.save_model.__code__.co_filename == module.__file__


def test_a_framework_is_changed_in_all_modules_or_refuses_in_all(imported):
    unknown = SAVING.format(bases="", method="save_pretrained", parameter="target")
    options, models, tokens = imported(
        {OPTIONS: KNOWN_OPTIONS, MODELS: unknown, TOKENS: KNOWN_TOKENS}
    )
    for give in (
        options.TrainingArguments,
        models.PreTrainedModel().save_pretrained,
        tokens.PreTrainedTokenizerBase().save_pretrained,
    ):
        with pytest.raises(
            cloudckpt.errors.InstallError, match="has no parameter 'save_directory'"
        ):
            give(URI)
    assert options.TrainingArguments("run").seen == "run"
    cloudckpt.uninstall()
    assert options.TrainingArguments(URI).seen == URI
    assert tokens.PreTrainedTokenizerBase().save_pretrained(URI) is None


def test_texts_that_look_like_uris_are_no_places(imported):
    unknown = SAVING.format(bases="", method="save_pretrained", parameter="target")
    _, tokens = imported({MODELS: unknown, TOKENS: KNOWN_TOKENS})
    tokenizer = tokens.PreTrainedTokenizerBase()
    assert tokenizer(URI) == tokenizer.encode(URI) == URI


def test_no_import_of_a_framework_fails(imported):
    imported(dict.fromkeys(adapting._ADAPTERS, "Strategy = ModelCheckpoint = pl_load = 5\n"))
    assert {*adapting._unknown} == {
        *("accelerate", "lightning", "peft", "pytorch_lightning", "ray"),
        *("torch_checkpointing", "torchtitan", "transformers"),
    }


def test_no_error_of_ours_fails_an_import(imported, monkeypatch, tmp_path):
    def changes(module):
        yield module.PreTrainedModel, "save_pretrained", None
        raise KeyError("ours")

    monkeypatch.setattr(local_only, "changes", changes)
    [module] = imported({MODELS: MOVED})
    with pytest.raises(cloudckpt.errors.InstallError, match=r"KeyError\('ours'\)"):
        module.PreTrainedModel().save_pretrained(URI)
    module.PreTrainedModel().save_pretrained(tmp_path / "model")


def test_a_framework_in_an_archive_is_changed(written, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "frameworks.zip", "w") as archive:
        archive.writestr("transformers/__init__.py", "")
        archive.writestr("transformers/modeling_utils.py", MOVED)
        archive.writestr("transformers/other.py", "")
    monkeypatch.syspath_prepend(tmp_path / "frameworks.zip")
    cloudckpt.install()
    module = importlib.import_module(MODELS)
    importlib.import_module("transformers.other")
    assert not adapting._unknown
    with pytest.raises(cloudckpt.errors.InstallError, match=r"cloudckpt\.hf\.save"):
        module.PreTrainedModel().save_pretrained(URI)


LIGHTNINGS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
PLUGIN = """
import os
class Files:
    def save_checkpoint(self, checkpoint, {path}, storage_options=None):
        os.makedirs({path})
    def load_checkpoint(self, path, map_location=None):
        return "Lightning's"
    def remove_checkpoint(self, path): ...
class TorchCheckpointIO(Files): ...
"""
STRATEGY = """
class Strategy:
    def save_checkpoint(self, checkpoint, filepath, storage_options=None): ...
    def load_checkpoint(self, checkpoint_path, weights_only=None): ...
"""


@pytest.mark.parametrize("package", LIGHTNINGS)
def test_inherited_methods_of_lightnings_plugin_take_uris(imported, tmp_path, package):
    [module] = imported({f"{LIGHTNINGS[package]}.plugins.io.torch_io": PLUGIN.format(path="path")})
    plugin, uri = module.TorchCheckpointIO(), (tmp_path / "run" / "step-1").as_uri()
    plugin.save_checkpoint({"weight": torch.ones(2)}, uri)
    assert torch.equal(plugin.load_checkpoint(uri)["weight"], torch.ones(2))
    assert cloudckpt.exists(uri)
    plugin.remove_checkpoint(uri)
    assert not cloudckpt.exists(uri)
    assert plugin.load_checkpoint("run") == "Lightning's"
    assert plugin.load_checkpoint("https://example.org/a.ckpt") == "Lightning's"
    cloudckpt.uninstall()
    assert plugin.load_checkpoint(uri) == "Lightning's"
    assert "load_checkpoint" not in vars(module.TorchCheckpointIO)


@pytest.mark.parametrize("package", LIGHTNINGS)
def test_lightning_of_an_unknown_shape_refuses_uris_in_all_of_its_classes(imported, package):
    strategies = {"lightning": "lightning.pytorch"}.get(package, package)
    strategy, plugin = imported(
        {
            f"{strategies}.strategies.strategy": STRATEGY,
            f"{LIGHTNINGS[package]}.plugins.io.torch_io": PLUGIN.format(path="target"),
        }
    )
    expected = re.escape("TorchCheckpointIO.save_checkpoint has no parameter 'path'")
    for save in (
        strategy.Strategy().save_checkpoint,
        plugin.TorchCheckpointIO().save_checkpoint,
    ):
        with pytest.raises(cloudckpt.errors.InstallError, match=expected):
            save({}, URI)
    with pytest.raises(cloudckpt.errors.InstallError, match=expected):
        plugin.TorchCheckpointIO().load_checkpoint(URI)
