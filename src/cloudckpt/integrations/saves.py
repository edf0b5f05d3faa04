"""A framework job's saves, immediate or in the background, and the actions that follow each."""

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
    """Saves one checkpoint after another; all ranks that save together make the same calls.

    In the background there is one save at a time, in a thread: another process can seldom import a
    framework's script. Deletions wait until the save is committed, so that there is always a
    checkpoint.
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
            stager: Copies the state for a save in the background; None for cloudckpt's own.
        """
        options = CheckpointerConfig(
            config=config, no_dist=no_dist, kind=AsyncCheckpointerType.THREAD, stager=stager
        )
        make = make_async_checkpointer if asynchronous else make_sync_checkpointer
        self._checkpointer: Checkpointer = make(options)
        self._asynchronous = asynchronous
        self._left: list[Callable[[], object]] = []

    def save(self, state: dict[str, Any], uri: str) -> None:
        """Saves, or begins to save, once the previous save is committed.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.save`, for this save or the previous one.
        """
        self.finish()
        self._checkpointer.save(uri, state)

    def then(self, act: Callable[[], object]) -> None:
        """Calls ``act`` once everything saved is committed: now, or in a later call of this object.

        It is never called if the save fails.
        """
        if self._asynchronous:
            self._left.append(act)
        else:
            act()

    def finish(self) -> None:
        """Waits until the last save is committed.

        Raises:
            CloudCheckpointError: If it failed; on all ranks.
        """
        left, self._left = self._left, []
        self._checkpointer.wait()
        for act in left:
            act()

    def close(self) -> None:
        """Finishes and releases resources.

        Raises:
            CloudCheckpointError: As :meth:`finish`; it is only logged if another error is being
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
