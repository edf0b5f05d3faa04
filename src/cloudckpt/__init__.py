"""Save and load PyTorch distributed checkpoints straight to and from object stores.

>>> import cloudckpt
>>> cloudckpt.save(state_dict, checkpoint_id="s3://bucket/run/step-1000")  # doctest: +SKIP
>>> cloudckpt.load(state_dict, checkpoint_id="s3://bucket/run/step-1000")  # doctest: +SKIP
"""

from cloudckpt import aio
from cloudckpt._version import __version__
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
from cloudckpt.config import (
    AzureOptions,
    BackgroundOptions,
    Config,
    GCSOptions,
    RetryPolicy,
    S3Options,
)
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import *  # noqa: F403 - all errors are public, and listed there
from cloudckpt.errors import Damage
from cloudckpt.errors import __all__ as _errors
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
from cloudckpt.uri import CheckpointURI

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
