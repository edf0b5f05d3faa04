"""How a checkpointer is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt.config import Config
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.dcp.writer import CommitHook

__all__ = ["CheckpointerConfig"]


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig:
    """What a checkpointer is made of.

    Attributes:
        config: The options of saving and loading.
        process_group: The ranks that save and load together; None for all.
        no_dist: Whether this process saves and loads alone.
        kind: Whether an asynchronous checkpointer saves in a process beside the trainer, or in a
            thread of it.
        stager: Copies the state for an asynchronous save; None for cloudckpt's own.
        planner: Makes the planner, once for all saves.
        commit_hook: Called on the coordinator around each commit.
        trust_pickle: Whether pickles in checkpoints may run any code.
    """

    config: Config = field(default_factory=Config)
    process_group: dist.ProcessGroup | None = None
    no_dist: bool = False
    kind: AsyncCheckpointerType = AsyncCheckpointerType.PROCESS
    stager: AsyncStager | None = None
    planner: Callable[[], SavePlanner] = CloudSavePlanner
    commit_hook: CommitHook | None = None
    trust_pickle: bool = False
