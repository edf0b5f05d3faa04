"""torch's own ``async_save`` with our writer, in a thread and in a process, on two ranks."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from .layouts import LAYOUTS, spread
from .places import Place
from .values import assert_same, numbered

_PATIENCE = 150.0  # seconds


def _save(place: Place, kind: AsyncCheckpointerType) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where the saving processes meet
    try:
        state = {**spread({"sharded": numbered(101, 400)}, LAYOUTS["2 rows"]), "step": 6}
        state[f"of {dist.get_rank()}"] = [dist.get_rank(), "x"]
        writer = place.writer()
        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        assert isinstance(future.result(_PATIENCE), Metadata)
    finally:
        del os.environ["MASTER_ADDR"]
        _async_process_executor._CHECKPOINT_PROCESS = None  # which ends it


@pytest.mark.parametrize("kind", AsyncCheckpointerType, ids=str)
def test_async_save_of_torch_saves_by_our_writer(kind, s3, ranks):
    ranks(2, _save, s3, kind, deadline=280)
    loaded = {"sharded": torch.zeros(101, 400), "step": 0, "of 0": [], "of 1": []}
    s3.load(loaded)
    expected = {"sharded": numbered(101, 400), "step": 6, "of 0": [0, "x"], "of 1": [1, "x"]}
    assert_same(loaded, expected)
