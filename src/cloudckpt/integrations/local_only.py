"""What of frameworks writes to local disks only: after ``install`` it refuses URIs.

It would make a folder named ``s3:`` of one, report success, and be lost with the machine.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from cloudckpt.dcp.install import Change
from cloudckpt.errors import InstallError
from cloudckpt.integrations.parts import uri_of
from cloudckpt.integrations.shapes import function

__all__ = ["changes"]

_MODEL = "call cloudckpt.hf.save(get_model_state_dict(model), uri) on all ranks"
_CALLBACK = (
    "give a local folder, and callbacks=[CloudCheckpointCallback(uri)] of "
    "cloudckpt.integrations.transformers to the Trainer"
)
_FILES = "write to a local folder, and send its files with cloudckpt.files.save_file"
_LOGS = "give ProjectConfiguration a local logging_dir besides the URI"
_SHARDED = "take ModelParallelStrategy, of which every rank saves its shards to a URI"

_WRITING = {
    "accelerate.accelerator": ("Accelerator.save_model", "save_directory", _MODEL),
    "accelerate.tracking": ("TensorBoardTracker.__init__", "logging_dir", _LOGS),
    "fabric.strategies.deepspeed": ("DeepSpeedStrategy.save_checkpoint", "path", _SHARDED),
    "fabric.strategies.xla_fsdp": ("XLAFSDPStrategy.save_checkpoint", "path", _SHARDED),
    "pytorch.strategies.deepspeed": ("DeepSpeedStrategy.save_checkpoint", "filepath", _SHARDED),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained", "save_directory", _MODEL),
    "transformers.trainer": ("Trainer.save_model", "output_dir", _MODEL),
    "transformers.training_args": ("TrainingArguments.__post_init__", "output_dir", _CALLBACK),
    **{
        f"transformers.{module}": (f"{kind}.save_pretrained", "save_directory", _FILES)
        for module, kind in (
            ("configuration_utils", "PreTrainedConfig"),
            ("feature_extraction_utils", "FeatureExtractionMixin"),
            ("generation.configuration_utils", "GenerationConfig"),
            ("image_processing_base", "ImageProcessingMixin"),
            ("pipelines.base", "Pipeline"),
            ("processing_utils", "ProcessorMixin"),
            ("tokenization_mistral_common", "MistralCommonBackend"),
            ("tokenization_utils_base", "PreTrainedTokenizerBase"),
            ("video_processing_utils", "BaseVideoProcessor"),
        )
    },
}
"""By module: the function, its parameter or an attribute of its object, and what to write."""


def changes(module: ModuleType) -> Iterator[Change]:
    """What is changed in a module of the table.

    Raises:
        UnknownShapeError: If it does not look as expected.
    """
    name, parameter, instead = _WRITING[_without_lightning(module.__name__)]
    kind, _, method = name.partition(".")
    is_of_options = method == "__post_init__"
    original = function(module, name, *(() if is_of_options else (parameter,)))
    if is_of_options:
        function(module, f"{kind}.__init__", parameter)
    what = name.removesuffix(".__post_init__").removesuffix(".__init__")
    yield getattr(module, kind), method, _refusing(original, what, parameter, instead)


def _without_lightning(module: str) -> str:
    """The name of a module that two packages of Lightning have."""
    return (
        module.replace("pytorch_lightning.", "pytorch.")
        .replace("lightning_fabric.", "fabric.")
        .removeprefix("lightning.")
    )


def _refusing(
    original: Callable[..., Any], what: str, parameter: str, instead: str
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        path = given.get(parameter, getattr(self, parameter, None))
        uri = None if path is None else uri_of(path)
        if uri is not None:
            raise InstallError(f"{what} would make a local folder of it: {instead}", uri=uri)
        return original(self, *args, **kwargs)

    return method
