"""torch_checkpointing saves a sharded state to a run, or loads it.

It gathers its metadata by tensors on a GPU; on a CPU it does so by torch's gathering of objects.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.schema import ItemSpec

from cloudckpt.integrations.torch_checkpointing import CloudStorageConfig
from results import tell


def _gathered(self: object, data: object, process_group: object = None) -> dict[int, object]:
    found: list[object] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


def _state(mesh: object, fill: float | None) -> dict[str, dict[str, object]]:
    whole = torch.arange(64.0).reshape(16, 4) if fill is None else torch.full((16, 4), fill)
    return {"model": {"weight": distribute_tensor(whole, mesh, [Shard(0)])}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--in-background", action="store_true")
    told = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = CheckpointManager.Config(
        storage_config=CloudStorageConfig(),
        items={"model": ItemSpec(requires_copy=True, resharder=DefaultResharder())},
        default=ItemSpec(requires_copy=False),
    )
    if told.in_background:
        config.save = AsyncCheckpointSaverConfig()
    DefaultMetadataManager._all_gather_pickled_data = _gathered
    manager = config.build()
    if told.save:
        written = manager.save(told.uri, _state(mesh, None))
        if written is not None:
            written.result()
        dist.barrier()
        tell()
    else:
        state = _state(mesh, 0.0)
        loaded = manager.load(told.uri, into=state)
        weight = loaded["model"]["weight"]
        assert isinstance(weight, DTensor)
        tell(weight=weight.full_tensor().flatten().tolist())
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
