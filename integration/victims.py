"""What a rank does that is to be killed in the middle of a save."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Mapping

import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import Config
from cloudckpt.errors import CloudCheckpointError
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI

__all__ = ["REFUSED", "Death", "of_step", "run"]

REFUSED = 3
"""The exit code of a rank whose save raised one of our errors."""

Death = tuple[str, int, str]
"""The call of the store at which a rank dies, how many pass before, and the end of their key."""


def of_step(step: int, nbytes: int) -> dict[str, torch.Tensor]:
    """What two ranks save: an item of each, every element the step."""
    return {f"of rank {rank}": torch.full((nbytes,), step, dtype=torch.uint8) for rank in (0, 1)}


def run(
    environment: Mapping[str, str],
    rank: int,
    meeting: str,
    uri: str,
    config: Config,
    step: int,
    nbytes: int,
    death: Death | None,
) -> None:
    """Saves its part, or dies; ends the process."""
    os.environ.update(environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    if death is not None:
        _die_at(uri, config, *death)
    name = f"of rank {rank}"
    state = {name: of_step(step, nbytes)[name]}
    try:
        cloudckpt.save(state, checkpoint_id=uri, config=config)
    except CloudCheckpointError:
        os._exit(REFUSED)
    os._exit(0)  # a group whose other rank was killed can't be destroyed in an orderly way


def _die_at(uri: str, config: Config, verb: str, passed: int, suffix: str) -> None:
    store = open_store(CheckpointURI.parse(uri), config)
    original = getattr(store, verb)
    left = [passed]

    def deadly(target, *arguments, **options):
        if getattr(target, "key", target).endswith(suffix):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        return original(target, *arguments, **options)

    setattr(store, verb, deadly)
