"""Commands that torchrun has started on several ranks, of which the first one speaks."""

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
def together() -> Iterator[Ranks]:
    """Joins the ranks that torchrun has started, on one machine or many, for the time of the block.

    A failure, which the block raises on all ranks alike, is printed by the first one, and ends all
    with the same exit code, none of them before it was printed: torchrun stops the rest when the
    first process ends.

    Raises:
        ProcessGroupError: If the ranks do not find each other.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Ranks()
        return
    import torch.distributed as dist

    from cloudckpt.checkpoint.torch_private import set_group_timeout
    from cloudckpt.dcp.failures import release_frames

    # torchrun stops the others like this when one dies; then they clean up, as after Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        dist.init_process_group("gloo", timeout=_MEETING)
        set_group_timeout(_LONGEST, dist.group.WORLD)
    except (RuntimeError, ValueError) as exc:
        raise ProcessGroupError(
            "the ranks that WORLD_SIZE speaks of did not find each other: start the command by "
            "torchrun, or unset WORLD_SIZE",
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
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        gc.collect()
