"""Lists, restores, copies, compares, verifies, prunes and sweeps the checkpoints of a run.

The package exports four functions, the result types of the functions in :mod:`cloudckpt`, and the
types that a ``CheckpointManager`` takes and returns. All are imported on first use, as most need
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudckpt._lazy import imported_later

if TYPE_CHECKING:  # for readers and type checkers; imported on first use
    from cloudckpt.runs.adopting import adopt
    from cloudckpt.runs.catalog import CheckpointSummary
    from cloudckpt.runs.comparing import ComparedItem, Comparison
    from cloudckpt.runs.contents import CheckpointContents, StoredItem
    from cloudckpt.runs.copying import Copied, detach
    from cloudckpt.runs.preemption import Preemption
    from cloudckpt.runs.pruning import prune
    from cloudckpt.runs.saves import RunStatus
    from cloudckpt.runs.sweeping import Leftovers, find_leftovers
    from cloudckpt.runs.verifying import Verified

__all__ = [
    "CheckpointContents",
    "CheckpointSummary",
    "ComparedItem",
    "Comparison",
    "Copied",
    "Leftovers",
    "Preemption",
    "RunStatus",
    "StoredItem",
    "Verified",
    "adopt",
    "detach",
    "find_leftovers",
    "prune",
]

if not TYPE_CHECKING:  # type checkers would accept any name with it
    __getattr__, __dir__ = imported_later(
        __name__,
        {
            "adopting": "adopt",
            "catalog": "CheckpointSummary",
            "comparing": "ComparedItem Comparison",
            "contents": "CheckpointContents StoredItem",
            "copying": "Copied detach",
            "preemption": "Preemption",
            "pruning": "prune",
            "saves": "RunStatus",
            "sweeping": "Leftovers find_leftovers",
            "verifying": "Verified",
        },
    )
