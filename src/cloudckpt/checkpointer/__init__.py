"""One object for a job: saves and loads its checkpoints, now or in the background."""

from cloudckpt.checkpointer.checkpointer import (
    AsyncCheckpointer,
    Checkpointer,
    SyncCheckpointer,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from cloudckpt.checkpointer.config import CheckpointerConfig
from cloudckpt.dcp.writer import CommitHook

__all__ = [
    "AsyncCheckpointer",
    "Checkpointer",
    "CheckpointerConfig",
    "CommitHook",
    "SyncCheckpointer",
    "make_async_checkpointer",
    "make_sync_checkpointer",
]
