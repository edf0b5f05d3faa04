"""SIGTERM in the saving process: heeded between two saves, not within one."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from types import FrameType

__all__ = ["Termination"]


class Termination:
    """Ends this process when it is asked to by SIGTERM, but lets a save under way end first.

    Schedulers send the signal to whole process groups, some time before they end them by force: it
    is the trainer's to decide what is still to be saved.

    Attributes:
        is_due: Whether the signal has come.
    """

    def __init__(self, connection: Connection) -> None:
        """
        Args:
            connection: On which the next save comes: one that is there already is under way.
        """
        self.is_due = False
        self._connection = connection
        self._is_idle = True
        signal.signal(signal.SIGTERM, self._on_signal)

    def hold(self) -> None:
        """A save begins."""
        self._is_idle = False

    def let_go(self) -> None:
        """It has ended."""
        self._is_idle = True
        if self.is_due:
            _end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_due = True
        if self._is_idle and not self._connection.poll():
            _end()


def _end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
