"""Save and load PyTorch distributed checkpoints straight to and from object stores.

>>> import cloudckpt
>>> cloudckpt.save(state_dict, checkpoint_id="s3://bucket/run/step-1000")  # doctest: +SKIP
>>> cloudckpt.load(state_dict, checkpoint_id="s3://bucket/run/step-1000")  # doctest: +SKIP

What needs torch is imported when it is first asked for: a command that only lists a run starts in a
fraction of the time that torch takes to be imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from cloudckpt import events
from cloudckpt._version import __version__
from cloudckpt.config import (
    AzureOptions,
    BackgroundOptions,
    Config,
    GCSOptions,
    RetryPolicy,
    S3Options,
)
from cloudckpt.errors import *  # noqa: F403 - all errors are public, and listed there
from cloudckpt.errors import Damage
from cloudckpt.errors import __all__ as _errors
from cloudckpt.fork import late_imports
from cloudckpt.uri import CheckpointURI

if TYPE_CHECKING:  # for who reads the code; imported by _LATER
    from cloudckpt import aio
    from cloudckpt.api import exists, load, save
    from cloudckpt.background.async_save import async_save, close_async_savers
    from cloudckpt.background.save import SaveFuture
    from cloudckpt.background.stager import Stager
    from cloudckpt.checkpoint.metadata import add_safe_metadata_globals
    from cloudckpt.checkpointer import (
        AsyncCheckpointer,
        Checkpointer,
        CheckpointerConfig,
        CommitHook,
        SyncCheckpointer,
        make_async_checkpointer,
        make_sync_checkpointer,
    )
    from cloudckpt.dcp.reader import CloudStorageReader
    from cloudckpt.dcp.writer import CloudStorageWriter
    from cloudckpt.files import FileContent, load_file, save_file
    from cloudckpt.integrations.install import install, uninstall
    from cloudckpt.runs.catalog import CheckpointSummary, latest, list_checkpoints
    from cloudckpt.runs.comparing import ComparedItem, Comparison, diff
    from cloudckpt.runs.contents import CheckpointContents, StoredItem, inspect
    from cloudckpt.runs.copying import Copied, copy
    from cloudckpt.runs.deleting import delete
    from cloudckpt.runs.manager import CheckpointManager
    from cloudckpt.runs.preemption import Preemption
    from cloudckpt.runs.sweeping import Leftovers, find_leftovers, sweep
    from cloudckpt.runs.verifying import Verified, verify
    from cloudckpt.transfer.stats import Transferred

__all__ = [
    "AsyncCheckpointer",
    "AzureOptions",
    "BackgroundOptions",
    "CheckpointContents",
    "CheckpointManager",
    "CheckpointSummary",
    "CheckpointURI",
    "Checkpointer",
    "CheckpointerConfig",
    "CloudStorageReader",
    "CloudStorageWriter",
    "CommitHook",
    "ComparedItem",
    "Comparison",
    "Config",
    "Copied",
    "Damage",
    "FileContent",
    "GCSOptions",
    "Leftovers",
    "Preemption",
    "RetryPolicy",
    "S3Options",
    "SaveFuture",
    "Stager",
    "StoredItem",
    "SyncCheckpointer",
    "Transferred",
    "Verified",
    "__version__",
    "add_safe_metadata_globals",
    "aio",
    "async_save",
    "close_async_savers",
    "copy",
    "delete",
    "diff",
    "exists",
    "find_leftovers",
    "inspect",
    "install",
    "latest",
    "list_checkpoints",
    "load",
    "load_file",
    "make_async_checkpointer",
    "make_sync_checkpointer",
    "save",
    "save_file",
    "sweep",
    "uninstall",
    "verify",
    *_errors,
]

_LATER = {
    name: module
    for module, names in {
        "api": "exists load save",
        "background.async_save": "async_save close_async_savers",
        "background.save": "SaveFuture",
        "background.stager": "Stager",
        "checkpoint.metadata": "add_safe_metadata_globals",
        "checkpointer": "AsyncCheckpointer Checkpointer CheckpointerConfig CommitHook "
        "SyncCheckpointer make_async_checkpointer make_sync_checkpointer",
        "dcp.reader": "CloudStorageReader",
        "dcp.writer": "CloudStorageWriter",
        "files": "FileContent load_file save_file",
        "integrations.install": "install uninstall",
        "runs.catalog": "CheckpointSummary latest list_checkpoints",
        "runs.comparing": "ComparedItem Comparison diff",
        "runs.contents": "CheckpointContents StoredItem inspect",
        "runs.copying": "Copied copy",
        "runs.deleting": "delete",
        "runs.manager": "CheckpointManager",
        "runs.preemption": "Preemption",
        "runs.sweeping": "Leftovers find_leftovers sweep",
        "runs.verifying": "Verified verify",
        "transfer.stats": "Transferred",
    }.items()
    for name in names.split()
}
_MODULES = frozenset(
    {
        "aio",
        "api",
        "background",
        "checkpoint",
        "checkpointer",
        "dcp",
        "doctor",
        "experimental",
        "files",
        "format_utils",
        "hf",
        "integrations",
        "runs",
        "stores",
        "torch_files",
        "transfer",
    }
)

if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _LATER and name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with late_imports:
            if name in _MODULES:
                return import_module(f"{__name__}.{name}")  # it is an attribute from now on
            found = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
        return globals().setdefault(name, found)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER, *_MODULES})


def _tell_torchs_logger(event: events.Event) -> None:
    """That logger has a handler only where torch's part was imported, whoever did it."""
    if "torch.distributed.checkpoint" in sys.modules:
        with late_imports:
            from cloudckpt.dcp.torch_log import tell_torchs_logger
        tell_torchs_logger(event)


events.subscribe(_tell_torchs_logger, progress=False)
