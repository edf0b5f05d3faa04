"""``install()`` and our classes leave every function of every framework as it is."""

import importlib
import sys

import pytest

import cloudckpt
from support.identities import identities

FRAMEWORKS = {
    "accelerate": ["accelerate.accelerator", "accelerate.checkpointing", "accelerate.tracking"],
    "lightning": ["lightning.pytorch", "lightning.fabric"],
    "ray": ["ray.train", "ray.train.v2._internal.execution.context"],
    "torch_checkpointing": ["torch_checkpointing.checkpoint_manager"],
    "transformers": ["transformers.trainer", "transformers.modeling_utils"],
}
OURS = ["accelerate", "fabric", "lightning", "ray", "torch_checkpointing.storage", "transformers"]


def _changed(before: dict, *packages: str) -> set:
    now = identities(*packages)
    return {pair for pair, value in before.items() if now.get(pair) is not value}


@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_frameworks_are_untouched_and_torch_but_for_five_functions() -> None:
    for module in (name for names in FRAMEWORKS.values() for name in names):
        importlib.import_module(module)
    theirs = identities(*FRAMEWORKS)
    cloudckpt.install()  # imports what it changes in torch
    cloudckpt.uninstall()
    torchs = identities("torch")
    finders = list(sys.meta_path)

    cloudckpt.install()
    try:
        for name in OURS:
            importlib.import_module(f"cloudckpt.integrations.{name}")
        assert not _changed(theirs, *FRAMEWORKS)
        assert sys.meta_path == finders
        changed = {name for _, name in _changed(torchs, "torch")}
        assert changed == {"_storage_setup", "__init__"}
        assert len(_changed(torchs, "torch")) == 3 + 4  # three modules have the first one
    finally:
        cloudckpt.uninstall()
    assert not _changed(torchs, "torch")
