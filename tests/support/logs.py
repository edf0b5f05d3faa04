"""What cloudckpt logs, where no fixture of pytest can be had: on ranks."""

import contextlib
import logging
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def warnings_of_ours(note: Callable[[str], object] | None = None) -> Iterator[list[str]]:
    """What is logged as a warning within the block; ``note``, if given, gets it instead."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: (note or found.append)(record.getMessage())
    logger = logging.getLogger("cloudckpt")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
