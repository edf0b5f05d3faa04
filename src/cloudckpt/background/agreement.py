"""How saving processes agree on which save they are about to carry out.

A saving process may die and be replaced while those of other ranks go on. Before each save all of
them compare its number, so that no rank ever takes part in another save than the rest.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from cloudckpt.errors import AsyncSaveError, CloudCheckpointError

__all__ = ["agree"]

Verdict = Literal["go", "superseded"]


def agree(number: int, failure: CloudCheckpointError | None) -> Verdict:
    """Waits until all ranks are at the same save.

    Args:
        number: The number of this rank's save, counted alike on all ranks.
        failure: Why this rank can't take part.

    Returns:
        ``go`` if all ranks are at this save, ``superseded`` if others have gone on to a later one.

    Raises:
        AsyncSaveError: If a rank can't take part; on all of them, with its reason.
    """
    while True:
        # the highest and the lowest number in one reduction, and whether anybody failed
        asked = [number, -number, int(failure is not None)]
        seen = torch.tensor(asked, dtype=torch.int64, device="cpu")
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        highest, lowest, failed = int(seen[0]), -int(seen[1]), bool(seen[2])
        if number < highest:
            return "superseded"
        if lowest < highest:
            continue  # the others will give up theirs and come
        if failed:
            raise _first_failure(failure)
        return "go"


def _first_failure(own: CloudCheckpointError | None) -> CloudCheckpointError:
    found: list[CloudCheckpointError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    rank, error = next((rank, error) for rank, error in enumerate(found) if error is not None)
    if error.uri is None and error.item is None and own is None:
        return AsyncSaveError(f"rank {rank} can't take part in this save", cause=error)
    return error
