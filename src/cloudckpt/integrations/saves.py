"""Saves a framework's checkpoints one after another, and runs actions after their commits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt.checkpointer import (
    Checkpointer,
    CheckpointerConfig,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from cloudckpt.config import Config
from cloudckpt.errors import CloudCheckpointError

__all__ = ["Saves"]

logger = logging.getLogger("cloudckpt")


class Saves:
    """Saves one checkpoint after another; all ranks that save together must make the same calls.

    There is at most one save in the background, in a thread: a saving process could often not
    import the framework's script. Deletions wait until the save is committed, so that there is
    always a committed checkpoint.
    """

    def __init__(
        self,
        config: Config,
        *,
        asynchronous: bool,
        no_dist: bool = False,
        stager: AsyncStager | None = None,
    ) -> None:
        """
        Args:
            config: Options for saving.
            asynchronous: Whether saves run in the background.
            no_dist: Whether this process saves alone.
            stager: Stages the state for a background save; None for cloudckpt's own stager.
        """
        options = CheckpointerConfig(
            config=config, no_dist=no_dist, kind=AsyncCheckpointerType.THREAD, stager=stager
        )
        make = make_async_checkpointer if asynchronous else make_sync_checkpointer
        self._checkpointer: Checkpointer = make(options)
        self._asynchronous = asynchronous
        self._left: list[Callable[[], object]] = []

    def save(self, state: dict[str, Any], uri: str) -> None:
        """Saves a state dict, or begins a background save, after the previous save has ended.

        Raises:
            CloudCheckpointError: The errors of :func:`cloudckpt.save`, of this save or the previous
                one.
        """
        self.finish()
        self._checkpointer.save(uri, state)

    def then(self, act: Callable[[], object]) -> None:
        """Calls ``act`` when the last save is committed: now, or in a later call of this object.

        If the save fails, ``act`` is not called.
        """
        if self._asynchronous:
            self._left.append(act)
        else:
            act()

    def finish(self) -> None:
        """Waits until the last save is committed.

        Raises:
            CloudCheckpointError: If the save failed; raised on all ranks.
        """
        left, self._left = self._left, []
        self._checkpointer.wait()
        for act in left:
            act()

    def close(self) -> None:
        """Waits until the last save is committed, and releases threads and memory.

        Raises:
            CloudCheckpointError: If the save failed; it is only logged if another error is being
                raised.
        """
        is_failing = sys.exc_info()[1] is not None
        try:
            try:
                self.finish()
            finally:
                self._checkpointer.close()
        except CloudCheckpointError as failure:
            if not is_failing:
                raise
            logger.error("a checkpoint was not saved: %s", failure)
