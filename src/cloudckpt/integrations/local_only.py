"""Makes framework code that writes only to local disks refuse URIs after ``install``.

It would make a local folder named ``s3:``, report success, and lose the data with the machine.
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
_LOGGER = "give it a local folder; it appends to its files, which no store can"
_STORAGE = (
    "give CheckpointManager.Config(storage_config=CloudStorageConfig()) of "
    "cloudckpt.integrations.torch_checkpointing"
)
_SHARDED = "take ModelParallelStrategy, of which every rank saves its shards to a URI"

_WRITING = {
    "accelerate.accelerator": ("Accelerator.save_model", "save_directory", _MODEL),
    "accelerate.tracking": ("TensorBoardTracker.__init__", "logging_dir", _LOGS),
    "accelerate.utils.dataclasses": ("ProfileKwargs.__init__", "output_trace_dir", _FILES),
    "fabric.loggers.csv_logs": ("CSVLogger.__init__", "root_dir", _LOGGER),
    "fabric.loggers.tensorboard": ("TensorBoardLogger.__init__", "root_dir", ""),
    "fabric.strategies.deepspeed": ("DeepSpeedStrategy.save_checkpoint", "path", _SHARDED),
    "fabric.strategies.xla_fsdp": ("XLAFSDPStrategy.save_checkpoint", "path", _SHARDED),
    "peft.config": ("PeftConfigMixin.save_pretrained", "save_directory", _FILES),
    "peft.peft_model": ("PeftModel.save_pretrained", "save_directory", _FILES),
    "pytorch.profilers.profiler": ("Profiler.__init__", "dirpath", _LOGGER),
    "pytorch.strategies.deepspeed": ("DeepSpeedStrategy.save_checkpoint", "filepath", _SHARDED),
    "ray.train._checkpoint": (
        "Checkpoint.to_directory",
        "path",
        "load it from where it is, cloudckpt.load(state, checkpoint_id=uri_of(checkpoint))",
    ),
    "torchtitan.trainer": (
        "Trainer.Config.__post_init__",
        "dump_folder",
        "logs and traces are local; give --checkpoint.folder the URI",
    ),
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
"""By module: the function, its parameter or an attribute of its object, and what to write; nothing
if it knows URIs, so that only URIs that have lost a slash are refused."""

_LOCAL_STORAGE = "torch_checkpointing.storage.filesystem"


def changes(module: ModuleType) -> Iterator[Change]:
    """The changes to a module of the table.

    Raises:
        UnknownShapeError: If the module does not look as expected.
    """
    if module.__name__ == _LOCAL_STORAGE:
        for method in ("mkdir", "stream_write", "write"):
            name = f"LocalFileSystemStorage.{method}"
            original = function(module, name, "path")
            refusing = _refusing(original, name, "path", _STORAGE)
            yield module.LocalFileSystemStorage, method, refusing
        return
    name, parameter, instead = _WRITING[_without_lightning(module.__name__)]
    kind, _, method = name.rpartition(".")
    is_of_options = method == "__post_init__"
    original = function(module, name, *(() if is_of_options else (parameter,)))
    if is_of_options:
        function(module, f"{kind}.__init__", parameter)
    what = name.removesuffix(".__post_init__").removesuffix(".__init__")
    owner = functools.reduce(getattr, kind.split("."), module)
    yield owner, method, _refusing(original, what, parameter, instead)


def _without_lightning(module: str) -> str:
    """The part of a module's name that both Lightning packages share."""
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
        if uri is not None and instead:
            raise InstallError(f"{what} would make a local folder of it: {instead}", uri=uri)
        return original(self, *args, **kwargs)

    return method
