"""What trainers do that are made to be killed."""

import os

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import CloudStorageWriter, Config, RetryPolicy, S3Options
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.config import MIB
from faults.states import filled

from .saves import PATIENCE

__all__ = ["config_for", "save_and_stand_still"]


def config_for(endpoint: str) -> Config:
    """Options that lead to an S3 endpoint and give up soon."""
    return Config(
        connections=4,
        part_size=5 * MIB,
        conditional_writes="on",
        retry=RetryPolicy(attempts=4, base=0.01, cap=0.05, deadline=20.0),
        s3=S3Options(endpoint_url=endpoint, addressing_style="path"),
    )


def save_and_stand_still(uri: str, family: str, endpoint: str, nbytes: int) -> None:
    """Begins a save that the endpoint holds up."""
    os.environ["FAMILY"] = family
    with AsyncSaver(no_dist=True, kind=AsyncCheckpointerType.PROCESS) as saver:
        writer = CloudStorageWriter(uri, config=config_for(endpoint))
        saver.save(filled(1, nbytes), writer).written.result(PATIENCE)
