"""What torch logs of errors that are raised anyway."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from torch.distributed.checkpoint import state_dict_loader

from cloudckpt.errors import CloudCheckpointError

__all__ = ["told_once"]


class _Told(logging.Filter):
    """Keeps back records of this thread that carry an error of ours."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (
            isinstance(error, CloudCheckpointError) and threading.get_ident() == self._thread
        )


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Within, torch's loader does not log the errors of a reader, which its caller raises.

    It logs a traceback for each metadata object that is not there (torch 2.13), to the root logger:
    for a first start, where no checkpoint is expected, two of them on every rank.
    """
    logger = getattr(state_dict_loader, "logger", None)
    if not isinstance(logger, logging.Logger):
        yield
        return
    ours = _Told()
    logger.addFilter(ours)
    try:
        yield
    finally:
        logger.removeFilter(ours)
