"""torchtitan on URIs: ``install()``, and ``--checkpoint.folder s3://…``.

torchtitan (0.3 and later) saves and loads by torch's functions, which ``install`` leads here, and
lists and removes by fsspec, which :mod:`cloudckpt.integrations.fsspec` serves. What is left is the
last save in Hugging Face's format, which it refuses on what is not local, since torch's writer of
that format knows files only: :func:`changes` has :func:`cloudckpt.hf.save` write it, and takes the
refusal back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from cloudckpt.dcp.install import Change, chosen_config
from cloudckpt.hf import save as save_model
from cloudckpt.uri import CheckpointURI

__all__ = ["changes"]


def changes(module: ModuleType) -> Iterator[Change]:
    """Has the managers of ``torchtitan.components.checkpointer.dcp`` save models to URIs.

    Raises:
        AttributeError: If they do not look as those of 0.3.
    """
    manager = module.CheckpointManager
    config = module.BaseCheckpointManager.Config
    yield config, "__post_init__", _accepting(config.__post_init__)
    yield manager, "dcp_save", _saving_models(manager.dcp_save)


def _is_ours(folder: str) -> bool:
    return CheckpointURI.accepts(folder) and CheckpointURI.parse(folder).is_cloud


def _accepting(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The check of the options, which refuses the last save in this format on any URI."""

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:  # noqa: N807
        is_possible = self.last_save_model_only and _is_ours(self.folder)
        wanted = self.last_save_in_hf
        self.last_save_in_hf = wanted and not is_possible
        try:
            original(self)
        finally:
            self.last_save_in_hf = wanted

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
