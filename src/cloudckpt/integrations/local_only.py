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

__all__ = ["changes"]

_MODEL = "call cloudckpt.hf.save(get_model_state_dict(model), uri) on all ranks"
_CALLBACK = (
    "give a local folder, and callbacks=[CloudCheckpointCallback(uri)] of "
    "cloudckpt.integrations.transformers to the Trainer"
)
_FILES = "write to a local folder, and send its files with cloudckpt.save_file"

_SHARDED = "take CloudModelParallelStrategy of cloudckpt.integrations.lightning, or of .fabric"

_WRITING = {
    "accelerate.accelerator": ("Accelerator.save_model", "save_directory", _MODEL),
    "lightning.fabric.strategies.deepspeed": (
        "DeepSpeedStrategy.save_checkpoint",
        "path",
        _SHARDED,
    ),
    "lightning.pytorch.strategies.deepspeed": (
        "DeepSpeedStrategy.save_checkpoint",
        "filepath",
        _SHARDED,
    ),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained", "save_directory", _MODEL),
    "transformers.tokenization_utils_base": (
        "PreTrainedTokenizerBase.save_pretrained",
        "save_directory",
        _FILES,
    ),
    "transformers.trainer": ("Trainer.save_model", "output_dir", _MODEL),
    "transformers.training_args": ("TrainingArguments.__post_init__", "output_dir", _CALLBACK),
}
"""By module: the function, its parameter or an attribute of its object, and what to write."""


def changes(module: ModuleType) -> Iterator[Change]:
    """What is changed in a module of the table.

    Raises:
        AttributeError: If it does not look as expected.
    """
    name, parameter, instead = _WRITING[module.__name__]
    kind, _, method = name.partition(".")
    owner = getattr(module, kind)
    what = kind if method == "__post_init__" else name
    yield owner, method, _refusing(getattr(owner, method), what, parameter, instead)


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
