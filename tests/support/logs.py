"""What cloudckpt logs, where no fixture of pytest can be had: on ranks."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    """What is logged as a warning within the block."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("cloudckpt")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
