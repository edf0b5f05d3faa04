"""Forwards our events to torch's loggers."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import dcp_logger, dcp_step_logger
from cloudckpt.events import Event

__all__ = ["logged_by_torch", "tell_torchs_logger"]


def logged_by_torch(checkpoint_id: str, group: dist.ProcessGroup | None) -> Any:
    """Logs a step of a save by torch's logger, under its name, as torch's saver would."""
    if (decorator := dcp_step_logger()) is None:
        return lambda step: step
    return decorator(checkpoint_id=checkpoint_id, process_group=group)


def tell_torchs_logger(event: Event) -> None:
    """Logs a phase as torch logs its own functions: a dict, at level DEBUG, or ERROR if it failed.

    The keys are torch's where it has one for it: ``checkpoint_id``, ``func_name`` (for example
    ``cloudckpt.upload``), ``event`` (``end`` or ``exception``), ``time`` and ``times_spent`` in
    nanoseconds, ``local_rank`` in the group that saves, and with a process group ``global_rank``
    and ``world_size``; in addition, ``bytes``, and ``error`` or ``detail`` with the class of an
    error.
    """
    logger = dcp_logger()
    level = logging.ERROR if event.failed else logging.DEBUG
    if logger is None or not logger.isEnabledFor(level):
        return
    spent = int(event.seconds * 1e9)
    message: dict[str, str | int] = {
        "checkpoint_id": event.uri,
        "uuid": str(uuid.uuid4().int),
        "func_name": f"cloudckpt.{event.phase}",
        "event": "exception" if event.failed else "end",
        "time": int(event.began * 1e9) + spent,
        "times_spent": spent,
        "local_rank": str(event.rank),
        "bytes": event.nbytes,
    }
    if dist.is_available() and dist.is_initialized():
        message["global_rank"] = str(dist.get_rank())
        message["world_size"] = str(dist.get_world_size())
    if event.detail:
        message["error" if event.failed else "detail"] = event.detail
    logger.log(level, message, extra={"cloudckpt_event": event})
