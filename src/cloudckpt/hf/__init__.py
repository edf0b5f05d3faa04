"""Models in safetensors files, as the Hugging Face libraries read and write them, on URIs.

>>> import cloudckpt.hf
>>> cloudckpt.hf.save(state_dict, "s3://bucket/model", dtype=torch.bfloat16)  # doctest: +SKIP
>>> cloudckpt.hf.load(state_dict, "s3://bucket/model")  # doctest: +SKIP
"""

from cloudckpt.hf.exporting import Exported, export_checkpoint
from cloudckpt.hf.loading import load
from cloudckpt.hf.saving import SafetensorsWriter, save

__all__ = ["Exported", "SafetensorsWriter", "export_checkpoint", "load", "save"]
