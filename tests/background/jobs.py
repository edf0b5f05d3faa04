"""What trainers do that are made to be killed."""

import os

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import CloudStorageWriter, Config, RetryPolicy, S3Options
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.config import MIB
from faults.states import filled

from .saves import PATIENCE

__all__ = ["config_for", "save_and_stand_still", "save_on_and_on"]


def config_for(endpoint: str) -> Config:
    """Options that lead to an S3 endpoint and give up soon."""
    return Config(
        connections=4,
        part_size=5 * MIB,
        conditional_writes="on",
        retry=RetryPolicy(attempts=4, base=0.01, cap=0.05, deadline=20.0),
        s3=S3Options(endpoint_url=endpoint, addressing_style="path"),
    )


def save_on_and_on(uri: str, endpoint: str, family: str, log: str, first: int, nbytes: int) -> None:
    """Saves step after step, in a process beside it, until it is killed.

    Args:
        uri: Where to, again and again.
        endpoint: The way there.
        family: A name in the environment of all processes that are begun here.
        log: A file to which the steps are written that were saved.
        first: The first step.
        nbytes: The size of a state dict.
    """
    os.environ["FAMILY"] = family
    with AsyncSaver(no_dist=True, kind=AsyncCheckpointerType.PROCESS) as saver:
        for step in range(first, first + 1000):
            writer = CloudStorageWriter(uri, config=config_for(endpoint))
            saver.save(filled(step, nbytes), writer).written.result(PATIENCE)
            with open(log, "a") as file:
                file.write(f" {step}")


def save_and_stand_still(uri: str, family: str, endpoint: str, nbytes: int) -> None:
    """Begins a save that the endpoint holds up."""
    os.environ["FAMILY"] = family
    with AsyncSaver(no_dist=True, kind=AsyncCheckpointerType.PROCESS) as saver:
        writer = CloudStorageWriter(uri, config=config_for(endpoint))
        saver.save(filled(1, nbytes), writer).written.result(PATIENCE)
