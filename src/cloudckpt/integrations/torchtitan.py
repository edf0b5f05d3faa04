"""torchtitan on URIs: ``install()``, and ``--checkpoint.folder s3://…``.

torchtitan (0.3 and later) saves and loads with torch's functions, which ``install`` redirects, and
lists and removes through fsspec, which :mod:`cloudckpt.integrations.fsspec` serves. It removes
through that even where s3fs serves the scheme, since s3fs does not know what checkpoints share.
That leaves models in Hugging Face's format, as the last save and the initial load, which torchtitan
refuses unless they are local, since torch's writer and reader of that format know only files.
:func:`changes` lifts the refusals and writes with :func:`cloudckpt.hf.save`; torch's reader is
already replaced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from cloudckpt.dcp.install import Change, chosen_config
from cloudckpt.hf import save as save_model
from cloudckpt.integrations.fsspec import file_system
from cloudckpt.integrations.shapes import function
from cloudckpt.uri import CheckpointURI

__all__ = ["changes"]

_OPTIONS = (
    "folder",
    "initial_load_in_hf",
    "initial_load_in_hf_quantized",
    "initial_load_model_only",
    "initial_load_path",
    "last_save_in_hf",
    "last_save_model_only",
)
"""The options of its checkpoints that are used here."""


def changes(module: ModuleType) -> Iterator[Change]:
    """Makes the managers of ``torchtitan.components.checkpointer.dcp`` take URIs for models.

    Raises:
        UnknownShapeError: If they do not look as those of 0.3.
    """
    check = function(module, "BaseCheckpointManager.Config.__post_init__")
    function(module, "BaseCheckpointManager.Config.__init__", *_OPTIONS)
    save = function(module, "CheckpointManager.dcp_save", "state_dict", "checkpoint_id", "to_hf")
    remove = function(module.filesystem, "rmtree", "path")
    yield module.filesystem, "rmtree", _removing(remove)
    yield module.BaseCheckpointManager.Config, "__post_init__", _accepting(check)
    yield module.CheckpointManager, "dcp_save", _saving_models(save)


def _is_ours(folder: str) -> bool:
    return CheckpointURI.accepts(folder) and CheckpointURI.parse(folder).is_cloud


def _removing(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def rmtree(path: Any) -> None:
        if not _is_ours(str(path)):
            original(path)
            return
        scheme = CheckpointURI.parse(str(path)).scheme
        with contextlib.suppress(FileNotFoundError):
            file_system(scheme, chosen_config()).rm(str(path), recursive=True)

    return rmtree


def _accepting(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The check of the options, without its refusals of this format on URIs.

    A quantized model is still refused: torch reads it with a different reader, for files only.
    """

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:  # noqa: N807
        saved, loaded = self.last_save_in_hf, self.initial_load_in_hf
        if self.last_save_model_only and _is_ours(self.folder):
            self.last_save_in_hf = False
        is_plain = self.initial_load_model_only and not self.initial_load_in_hf_quantized
        if is_plain and _is_ours((self.initial_load_path or "").strip()):
            self.initial_load_in_hf = False
        try:
            original(self)
        finally:
            self.last_save_in_hf, self.initial_load_in_hf = saved, loaded

    return __post_init__


def _saving_models(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dcp_save(
        self: Any,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        *args: Any,
        to_hf: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not (to_hf and _is_ours(checkpoint_id)):
            return original(self, state_dict, checkpoint_id, *args, to_hf=to_hf, **kwargs)
        adapter = self.sd_adapter
        save_model(
            adapter.to_hf(state_dict),
            checkpoint_id,
            fqn_to_file=adapter.fqn_to_index_mapping or None,
            config=chosen_config(),
        )
        return None

    return dcp_save
