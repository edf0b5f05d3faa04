"""Commands that a launcher has started on several ranks, of which the first one speaks.

``WORLD_SIZE`` alone does not say so: pods of training jobs have it, with ``RANK`` and
``MASTER_ADDR``, and whoever looks at a checkpoint from within one (``kubectl exec``) would wait at
the store of the running job for ranks that never come. torchrun gives its processes a
``TORCHELASTIC_RUN_ID`` besides; under other launchers the user says so by a flag.
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

_MEETING = timedelta(minutes=5)  # in which all ranks must have started
_LONGEST = timedelta(days=1)  # that ranks wait for the slowest; one that is gone is noticed at once


@dataclass(frozen=True)
class Ranks:
    """Who takes part in a command.

    Attributes:
        are_many: Whether there are others than this one.
        speaks: Whether this one prints.
    """

    are_many: bool = False
    speaks: bool = True

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks; None if this process is alone. Whoever keeps it keeps its threads."""
        if not self.are_many:
            return None
        import torch.distributed as dist

        return dist.group.WORLD


@contextmanager
def together(wanted: bool | None) -> Iterator[Ranks]:
    """Joins the ranks of a launcher, on one machine or many, for the time of the block.

    A failure, which the block raises on all ranks alike, is printed by the first one, and ends all
    with the same exit code, none of them before it was printed: torchrun stops the rest when the
    first process ends.

    Args:
        wanted: Whether there are others, as the user says; None if torchrun is to say so.

    Raises:
        typer.BadParameter: If the user says so, and the environment does not say how many.
        ProcessGroupError: If the ranks do not find each other.
    """
    if not _are_many(wanted):
        yield Ranks()
        return
    import torch.distributed as dist

    from cloudckpt.checkpoint.torch_private import set_group_timeout
    from cloudckpt.dcp.arrivals import no_more_expected
    from cloudckpt.dcp.failures import release_frames

    # torchrun stops the others like this when one dies; then they clean up, as after Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        dist.init_process_group("gloo", timeout=_MEETING)
        set_group_timeout(_LONGEST, dist.group.WORLD)
    except (RuntimeError, ValueError) as exc:
        raise ProcessGroupError(
            "the WORLD_SIZE ranks did not connect to each other: start the command on all of "
            "them, or give --no-ranks",
            cause=exc,
        ) from exc
    speaks = dist.get_rank() == 0
    try:
        yield Ranks(are_many=True, speaks=speaks)
    except BaseException as error:
        # its frames keep the group, whose threads abort a process that ends before them
        release_frames(error)
        if isinstance(error, ProcessGroupError) or not isinstance(error, CloudCheckpointError):
            raise
        if speaks:
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
    if wanted is None:
        wanted = "TORCHELASTIC_RUN_ID" in os.environ
        if not wanted and os.environ.get("WORLD_SIZE", "1") != "1":
            say(
                "not started by torchrun, so this process works alone; start it with torchrun "
                "and --ranks to share the work"
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
