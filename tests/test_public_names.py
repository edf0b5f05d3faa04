"""The public names: a change here is a change for users. ``cloudckpt.__doc__`` has the rule."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import cloudckpt
from cloudckpt import errors

ROOT = Path(__file__).parent.parent

NAMES = {
    "cloudckpt": """
        AzureOptions BackgroundOptions CheckpointManager CloudStorageReader CloudStorageWriter
        Config GCSOptions LoadReport PerRank RetryPolicy S3Options __version__ aio async_save copy
        delete diff errors events exists format_utils hf inspect install integrations latest
        list_checkpoints load per_rank save sweep uninstall verify watch
    """,
    "cloudckpt.errors": " ".join(errors.__all__),  # the tree in its docstring has them
    "cloudckpt.checkpointer": """
        AsyncCheckpointer Checkpointer CheckpointerConfig CommitHook SaveFuture Stager
        SyncCheckpointer close_async_savers make_async_checkpointer make_sync_checkpointer
    """,
    "cloudckpt.runs": """
        CheckpointContents CheckpointSummary ComparedItem Comparison Copied Leftovers Preemption
        RunStatus StoredItem Verified adopt detach find_leftovers prune
    """,
    "cloudckpt.hf": "Exported SafetensorsWriter export_checkpoint load save",
    "cloudckpt.files": "FileContent FileData load_file save_file",
    "cloudckpt.format_utils": """
        BroadcastingTorchSaveReader DynamicMetaLoadPlanner Kind dcp_to_dcp
        dcp_to_torch_save kind_of torch_save_to_dcp
    """,
    "cloudckpt.experimental": "CloudCheckpointReader CloudCheckpointWriter",
    "cloudckpt.events": "Event Phase Timeline Transferred progress_bar record subscribe",
    "cloudckpt.aio": "exists inspect latest list_checkpoints load_file verify watch",
    "cloudckpt.doctor": "Finding examine",
    "cloudckpt.uri": "CheckpointURI URILike",
    "cloudckpt.integrations": "",
}
PUBLIC = {module: set(names.split()) for module, names in NAMES.items()}
FRAMEWORKS = {"accelerate", "fabric", "fsspec", "lightning", "ray", "torch_checkpointing"}
FRAMEWORKS |= {"transformers"}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_of_a_module_are_these(module):
    loaded = importlib.import_module(module)
    listed = list(getattr(loaded, "__all__", ()))
    assert set(listed) == PUBLIC[module]
    assert len(listed) == len(PUBLIC[module])
    assert [name for name in listed if not hasattr(loaded, name)] == []


def test_the_rule_names_every_public_module():
    assert set(re.findall(r":mod:`(cloudckpt\.\w+)`", cloudckpt.__doc__)) == set(PUBLIC) - {
        "cloudckpt"
    }


def test_the_page_about_public_names_has_all_modules():
    page = (ROOT / "docs" / "api.md").read_text()
    assert set(re.findall(r"^\| `(cloudckpt[.a-z_]*)` ", page, re.MULTILINE)) == set(PUBLIC)


def test_what_a_module_exports_is_there():
    for module in pkgutil.walk_packages(cloudckpt.__path__, "cloudckpt."):
        if module.name.endswith(("__main__", ".auto")):
            continue
        try:
            loaded = importlib.import_module(module.name)
            missing = [name for name in getattr(loaded, "__all__", ()) if not hasattr(loaded, name)]
        except errors.MissingDependencyError:
            assert ".integrations." in module.name  # its framework is not here
            continue
        assert missing == [], module.name
