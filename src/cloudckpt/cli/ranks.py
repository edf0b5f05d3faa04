"""Runs a command on all ranks that a launcher has started; only rank 0 prints.

``WORLD_SIZE`` alone does not show that a launcher has started the command: pods of training jobs
have it, with ``RANK`` and ``MASTER_ADDR``, and a command started in such a pod (``kubectl exec``)
would wait at the running job's address for ranks that never come. torchrun also sets
``TORCHELASTIC_RUN_ID``; with other launchers the user passes a flag.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import typer

from cloudckpt.cli.app import code_of, say
from cloudckpt.errors import CloudCheckpointError, ProcessGroupError

if TYPE_CHECKING:
    import torch.distributed as dist

_MEETING = timedelta(minutes=5)  # the time in which all ranks must start
_LONGEST = timedelta(days=1)  # how long ranks wait for the slowest; a dead rank is detected at once


@dataclass(frozen=True)
class Ranks:
    """The ranks that take part in a command.

    Attributes:
        are_many: Whether there are several ranks.
        prints: Whether this rank prints.
    """

    are_many: bool = False
    prints: bool = True

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None for a single process.

        Drop all references to the group before the process ends.
        """
        if not self.are_many:
            return None
        import torch.distributed as dist

        return dist.group.WORLD


@contextmanager
def together(wanted: bool | None) -> Iterator[Ranks]:
    """Joins the ranks of a launcher, on one machine or many, for the time of the block.

    The block must raise an error of cloudckpt on all ranks. Rank 0 prints the error, and all ranks
    then exit with the same code; they wait for each other before, because torchrun stops all ranks
    when the first one fails. A ProcessGroupError, or an exception that is not cloudckpt's, is
    raised unchanged.

    Args:
        wanted: Whether there are several ranks, by the user's flag; None checks for torchrun.

    Raises:
        typer.BadParameter: If ``wanted`` is True, and the environment lacks the number of ranks.
        ProcessGroupError: If the ranks can't connect to each other.
    """
    if not _are_many(wanted):
        yield Ranks()
        return
    import torch.distributed as dist

    from cloudckpt.checkpoint.torch_private import set_group_timeout
    from cloudckpt.dcp.failures import release_frames
    from cloudckpt.dcp.meeting import no_more_expected

    # torchrun sends SIGTERM to the other ranks when one dies; they clean up as after Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        dist.init_process_group("gloo", timeout=_MEETING)
        set_group_timeout(_LONGEST, dist.group.WORLD)
    except (RuntimeError, ValueError) as exc:
        raise ProcessGroupError(
            "the ranks, whose number WORLD_SIZE gives, did not connect to each other: start the "
            "command on all of them, or give --no-ranks",
            cause=exc,
        ) from exc
    prints = dist.get_rank() == 0
    try:
        yield Ranks(are_many=True, prints=prints)
    except BaseException as error:
        # the error's frames refer to the group, whose threads would abort the ending process
        release_frames(error)
        if isinstance(error, ProcessGroupError) or not isinstance(error, CloudCheckpointError):
            raise
        if prints:
            say(error)
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        sys.exit(code_of(error))
    finally:
        no_more_expected()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        gc.collect()


def _are_many(wanted: bool | None) -> bool:
    """Returns whether several ranks take part: by the user's flag, or if None, by the environment.

    Raises:
        typer.BadParameter: If ranks are wanted, and the environment lacks their number.
    """
    if wanted is None:
        wanted = "TORCHELASTIC_RUN_ID" in os.environ
        if not wanted and os.environ.get("WORLD_SIZE", "1") != "1":
            say(
                "the command was not started by torchrun, so this process works alone; to share "
                "the work, start it with torchrun, or on each rank with --ranks"
            )
    if not wanted:
        return False
    try:
        return int(os.environ["WORLD_SIZE"]) > 1
    except (KeyError, ValueError):
        raise typer.BadParameter(
            "--ranks needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment: "
            "start the command with torchrun"
        ) from None
