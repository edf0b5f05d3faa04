"""torch_checkpointing saves a sharded state to a run, or loads it, as docs/frameworks.md shows it.

It gathers its metadata by tensors on a GPU; on a CPU it does so by torch's gathering of objects.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_checkpointing.barriers import DefaultStoreBarrier
from torch_checkpointing.checkpoint_writer import CheckpointWriter, CheckpointWriterConfig
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.metadata_manager import DefaultMetadataManager

import page
from results import tell

SAVE = 'written = manager.save("s3://bucket/run/step-1000", {"model": model_state})'
WAIT = "written.result()\n"
LOAD = 'manager.load("s3://bucket/run/step-1000", into={"model": model_state})'


def _gathered(self: object, data: object, process_group: object = None) -> dict[int, object]:
    found: list[object] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


def _nothing_written(self: object, items: object, state: object) -> None:
    raise OSError("this rank is to fail")


def _killed(self: object, timeout: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # all is written, and nothing committed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    parser.add_argument("--save", choices=["at once", "in background"])
    parser.add_argument("--failing-rank", type=int)
    parser.add_argument("--killed", action="store_true")
    parser.add_argument("--own", action="store_true", help="something of each rank, too")
    told = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    DefaultMetadataManager._all_gather_pickled_data = _gathered
    whole = torch.arange(64.0).reshape(16, 4) if told.save else torch.zeros(16, 4)
    weight = distribute_tensor(whole, mesh, [Shard(0)])
    changed = {"s3://bucket/run/step-1000": told.uri}
    if told.save == "at once":
        changed |= {
            "CheckpointManager.Config(": "CheckpointManager.Config(save=at_once, ",
            WAIT: "",
        }
    if told.own:
        changed['{"model": model_state}'] = '{"model": model_state, "own": own}'
    changed |= {LOAD: ""} if told.save else {SAVE: "", WAIT: ""}
    if told.failing_rank == dist.get_rank():
        CheckpointWriter._write_keys = _nothing_written
    if told.killed:
        DefaultStoreBarrier.execute_barrier = _killed
    program = page.code("torch_checkpointing", changed)
    soon = CheckpointWriterConfig(checkpoint_write_barrier_timeout_sec=5)
    at_once = SyncCheckpointSaverConfig(writer_config=soon)
    seen: dict[str, object] = {"model_state": {"weight": weight}, "at_once": at_once}
    own = {"rank": torch.tensor(dist.get_rank() if told.save else -1)}
    seen["own"] = own
    try:
        exec(program, seen)
    except Exception as error:  # noqa: BLE001 - of this rank, or torch's that another one did not come
        tell(failure=str(error))
    else:
        dist.barrier()
        found = weight.full_tensor().flatten().tolist()
        tell(weight=found, **({"own": int(own["rank"])} if told.own else {}))
    seen["manager"].close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
