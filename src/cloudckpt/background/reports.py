"""What the saving process tells its trainer: outcomes, log records, signs of life."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from multiprocessing.connection import Connection

__all__ = ["Pulse", "Sender", "forward_logs"]


class Sender:
    """Sends from several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, content: object) -> None:
        with self._lock:
            self._connection.send((kind, content))


class Pulse:
    """Signs of life for a trainer that waits for an outcome.

    Attributes:
        interval: Seconds between two of them.
        is_wanted: Whether it waits.
    """

    def __init__(self, sender: Sender, interval: float) -> None:
        self.interval = interval
        self.is_wanted = False
        self._sender = sender
        self._last = time.monotonic()

    def beat(self) -> None:
        """Sends one if it is time."""
        now = time.monotonic()
        if self.is_wanted and now - self._last >= self.interval:
            self._last = now
            with contextlib.suppress(OSError):  # the trainer is gone
                self._sender.send("alive", None)


def forward_logs(sender: Sender, levels: dict[str, int]) -> None:
    """Sends log records to the trainer.

    Args:
        sender: Sends them.
        levels: Of loggers by name; that of the root under the empty one.
    """

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if hasattr(record, "cloudckpt_event"):
                return  # the trainer gets the event, and logs it
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
                record.exc_info = None
            with contextlib.suppress(Exception):
                sender.send("log", record)

    logging.getLogger().handlers[:] = [Forward()]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
