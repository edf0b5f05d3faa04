"""torch_checkpointing saves a model as safetensors, and puts the files of a model together of it.

So does torchtitan with its last save: before the commit, into the folder above.
"""

import argparse

import torch
import torch.distributed as dist
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_writer import CallbackArgs
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.schema import ItemSpec

from cloudckpt.integrations.torch_checkpointing import CloudStorageConfig
from results import tell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    told = parser.parse_args()
    dist.init_process_group("gloo")
    # what it gathers on a GPU
    DefaultMetadataManager._all_gather_pickled_data = lambda self, data, process_group=None: {
        0: data
    }
    storage = CloudStorageConfig()

    def export(saved: CallbackArgs) -> None:
        consolidate_hf_safetensors_checkpoint(
            saved.path,
            output_dir=told.uri,
            item_key="model",
            fqn_to_index_mapping={"a.weight": 1, "b.weight": 2},
            storage_config=storage,
        )

    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    manager = CheckpointManager.Config(
        items={"model": ItemSpec(resharder=DefaultResharder(), layout=layout)},
        save=SyncCheckpointSaverConfig(),
        storage_config=storage,
        pre_finalize_callback=export,
    ).build()
    model = {"a.weight": torch.arange(32.0).reshape(8, 4), "b.weight": torch.ones(3)}
    manager.save(f"{told.uri}/sharded", {"model": model})
    manager.close()
    dist.destroy_process_group()
    tell(saved=True)


if __name__ == "__main__":
    main()
