"""What of stock torch is elsewhere, or not at all, in some of the torches that are supported."""

from types import ModuleType

import pytest

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
except ImportError:  # before torch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter", "experiments"]


def experiments() -> ModuleType:
    """torch's experimental checkpointers; a torch that has them no longer skips the test."""
    return pytest.importorskip(
        "torch.distributed.checkpoint._experimental",
        reason="this torch has no torch.distributed.checkpoint._experimental",
        exc_type=ImportError,
    )
