"""What a user wants to happen around a commit."""

from __future__ import annotations

import logging

from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["CommitHook", "run_after"]

logger = logging.getLogger("cloudckpt")


class CommitHook:
    """Called on the coordinator, around the one request that makes a checkpoint visible.

    With a saving process, that is where it is called: it must be picklable then.
    """

    def before_commit(self, uri: str, metadata: Metadata) -> None:
        """All data is in the store, and nothing is visible; raising fails the save on all ranks."""

    def after_commit(self, uri: str, metadata: Metadata) -> None:
        """The checkpoint is committed; what is raised here is logged, and undoes nothing."""


def run_after(hook: CommitHook, uri: str, metadata: Metadata) -> None:
    """Calls a hook after the commit, which nothing may make look like a failure."""
    try:
        hook.after_commit(uri, metadata)
    except Exception:
        logger.exception("the hook after the commit of %s failed; the checkpoint is committed", uri)
