"""Hugging Face Accelerate: saves the state of an ``Accelerator`` to a URI, and loads it.

>>> from cloudckpt.integrations.accelerate import load_state, save_state  # doctest: +SKIP
>>> save_state(accelerator, "s3://bucket/run/step-10")  # doctest: +SKIP
>>> load_state(accelerator, cloudckpt.latest("s3://bucket/run"))  # doctest: +SKIP

Both functions cover the same state as the accelerator's own ``save_state`` and ``load_state``. A
checkpoint contains the models as ``model_0`` and so on and the optimizers as ``optimizer_0`` and so
on, tensor by tensor, each rank its shards, and under ``files`` the small files that Accelerate and
registered hooks write (random states, schedulers, samplers, the scaler, registered objects): those
of the first rank, and for each other rank the files that differ, such as random states and the
positions of dataloaders. Nothing in Accelerate is patched: prepared objects are read from the
accelerator, and the small files are written and read by the functions of
``accelerate.checkpointing``. Tested with accelerate 1.14 and 1.15.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import weakref
from typing import Any

import torch

from cloudckpt.config import Config
from cloudckpt.dcp.content import PerRank, per_rank
from cloudckpt.dcp.install import chosen_config
from cloudckpt.dcp.meeting import LOADING, Meeting, collective
from cloudckpt.errors import ConfigError, MissingDependencyError, MissingKeyError
from cloudckpt.integrations.saves import Saves
from cloudckpt.integrations.state import (
    OF_RANKS,
    Parts,
    map_files_of_ranks,
    map_new_file,
    pickle_values,
    unpickle_values,
)
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.contents import inspect as inspect_checkpoint
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention, StepNames
from cloudckpt.uri import CheckpointURI, URILike

try:
    from accelerate.checkpointing import (
        load_accelerator_state,
        load_custom_state,
        save_accelerator_state,
    )
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.accelerate needs Accelerate: pip install 'accelerate>=1.8'"
    ) from exc

__all__ = ["load_state", "save_state"]

logger = logging.getLogger("cloudckpt")

_FILES = "files"
_OBJECT = re.compile(r"custom_checkpoint_(\d+)\.pkl")
_OWN_FORMATS = ("DEEPSPEED", "MEGATRON_LM")
_saves: weakref.WeakKeyDictionary[Any, Saves] = weakref.WeakKeyDictionary()
"""The :class:`Saves` of each accelerator."""


@collective("save_state")
def save_state(
    accelerator: Any,
    uri: URILike,
    *,
    max_to_keep: int | None = None,
    config: Config | None = None,
) -> None:
    """Saves all prepared and registered objects of an accelerator in one commit.

    All ranks must call it. Hooks of ``register_save_state_pre_hook`` are called with a local
    folder, whose files are saved, too. If a hook removes a model's weights from the list, that
    model is not saved: the hook has to save it.

    Args:
        accelerator: The ``Accelerator``.
        uri: The location of the checkpoint, such as ``s3://bucket/run/step-10``.
        max_to_keep: How many of the newest checkpoints named ``step-<step>`` in the same folder are
            kept, including the new one; None keeps all. The checkpoint that this job loaded also
            stays, and so do steps of other trainings.
        config: Options; None uses those given to ``install``, or else the environment.

    Raises:
        ConfigError: If DeepSpeed or Megatron-LM, which write files of their own, hold the state; if
            an optimizer has parameters of models that were not prepared; or if ``max_to_keep`` is
            invalid, or given although ``uri`` does not end in a folder named ``step-<step>``.
        CloudCheckpointError: The errors of :func:`cloudckpt.save`.
    """
    location, config = CheckpointURI.parse(uri), config or chosen_config() or Config()
    retention = Retention(max_to_keep=max_to_keep)
    step = StepNames(DEFAULT_PATTERN).step(location.folder)
    if max_to_keep is not None and step is None:
        raise ConfigError(
            "max_to_keep= needs a location whose last part names a step, such as step-10",
            uri=str(location),
        )
    meeting, saves = Meeting.of(None, False), _saves_of(accelerator, config)
    with contextlib.ExitStack() as stack:

        def collect() -> tuple[dict[str, Any], str]:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cloudckpt-"))
            state = _parts(accelerator, str(location)).state_dicts()
            taken = _call_hooks(accelerator, state, folder)
            _write_small_files(accelerator, folder)
            return {name: value for name, value in state.items() if name not in taken}, folder

        state, folder = meeting.begin(collect)
        files, own = map_files_of_ranks(folder, meeting)
        mine = per_rank(pickle_values(own, OF_RANKS, str(location), config))
        state |= {OF_RANKS: mine} | ({_FILES: files} if files else {})
        saves.save(state, str(location))
    if meeting.rank == 0 and step is not None:
        saves.prune_run(Run(location.parent, config=config), retention)


@collective("load_state")
def load_state(accelerator: Any, uri: URILike, *, config: Config | None = None) -> None:
    """Loads all prepared and registered objects of an accelerator, on any number of ranks.

    All ranks must call it. Hooks of ``register_load_state_pre_hook`` are called with a local folder
    that has the saved files. A rank that did not exist at the save keeps its random states, and
    gets the first rank's files; a warning is logged.

    Args:
        accelerator: The ``Accelerator``, with models and optimizers prepared as at the save.
        uri: The location of the checkpoint.
        config: Options; None uses those given to ``install``, or else the environment.

    Raises:
        MissingKeyError: If the checkpoint lacks a prepared or registered object.
        ConfigError: If DeepSpeed or Megatron-LM hold the state, or if an optimizer has parameters
            of models that were not prepared.
        CloudCheckpointError: The errors of :func:`cloudckpt.load`.
    """
    location, config = str(CheckpointURI.parse(uri)), config or chosen_config() or Config()
    meeting = Meeting.of(None, False)
    sizes = meeting.broadcast_from_first(
        lambda: {one.name: one.nbytes for one in inspect_checkpoint(location, config=config).items}
    )
    hooks = list(accelerator._load_model_state_pre_hook.values())
    saved_names = {name.partition(".")[0] for name in sizes}
    below = f"{_FILES}."
    with contextlib.ExitStack() as stack:

        def prepare() -> tuple[Parts, dict[str, torch.Tensor], str]:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cloudckpt-"))
            rooms = {
                (name := item.removeprefix(below)): map_new_file(folder, name, nbytes, location)
                for item, nbytes in sizes.items()
                if item.startswith(below)
            }
            # with hooks, models that are not in the checkpoint are loaded by the hooks
            return _parts(accelerator, location, saved_names if hooks else None), rooms, folder

        parts, rooms, folder = meeting.begin(prepare)
        own: PerRank[Any] = per_rank(None)
        parts.load(location, config, others={_FILES: rooms, OF_RANKS: own})

        def load_files() -> int:
            _write_files_of_rank(own, folder, location, meeting.rank)
            left = [] if _is_fsdp(accelerator) else list(accelerator._models)
            for hook in hooks:
                hook(left, folder)
            for index, model in enumerate(accelerator._models):
                if f"model_{index}" not in saved_names and any(other is model for other in left):
                    raise MissingKeyError(
                        f"model_{index} is not in the checkpoint, and no hook loaded it: "
                        "prepare the models that were saved",
                        uri=location,
                        item=f"model_{index}",
                    )
            _read_small_files(accelerator, folder, location)
            return int(accelerator.step)

        steps = meeting.gathered(load_files, during=LOADING)
    accelerator.step = steps[0]  # a rank that did not exist at the save has no file with the step
    _saves_of(accelerator, config).resumed(location)


def _saves_of(accelerator: Any, config: Config) -> Saves:
    """Returns the :class:`Saves` of an accelerator, and makes it use ``config``."""
    saves = _saves.setdefault(accelerator, Saves(config))
    saves.configure(config)
    return saves


def _call_hooks(accelerator: Any, state: dict[str, Any], folder: str) -> set[str]:
    """Calls the hooks of a save; returns the names of the models that hooks save themselves."""
    models = {name: value for name, value in state.items() if name.startswith("model_")}
    models = {} if _is_fsdp(accelerator) else models
    left = list(models.values())
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, left, folder)
    remaining = {id(weights) for weights in left}
    return {name for name, weights in models.items() if id(weights) not in remaining}


def _write_small_files(accelerator: Any, folder: str) -> None:
    """Writes all state but models and optimizers into a folder, as Accelerate does.

    Other than in Accelerate, each rank writes its own registered objects.
    """
    on_each_node = accelerator.project_configuration.save_on_each_node
    save_accelerator_state(
        folder,
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        accelerator.step,
        accelerator.scaler,
        save_on_each_node=on_each_node,
    )
    # Accelerate writes registered objects on the first rank only; here each rank writes its own
    for index, value in enumerate(accelerator._custom_objects):
        torch.save(value.state_dict(), os.path.join(folder, f"custom_checkpoint_{index}.pkl"))


def _read_small_files(accelerator: Any, folder: str, uri: str) -> None:
    """Restores all state but models and optimizers from the files in a folder.

    Raises:
        MissingKeyError: If the number of registered objects differs from that at the save.
    """
    objects = accelerator._custom_objects
    saved = sum(_OBJECT.fullmatch(name) is not None for name in os.listdir(folder))
    if saved != len(objects):
        raise MissingKeyError(
            f"registered objects: {saved} when the checkpoint was saved, but {len(objects)} now: "
            "register the same objects in the same order (register_for_checkpointing)",
            uri=uri,
        )
    loaded = load_accelerator_state(
        folder,
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        accelerator.scaler,
        "cpu",
    )
    accelerator.step = loaded.get("step", accelerator.step)
    for index, value in enumerate(objects):
        load_custom_state(value, folder, index)


def _parts(accelerator: Any, uri: str, only: set[str] | None = None) -> Parts:
    """Returns the accelerator's optimizers, and its models or, if ``only`` is given, those named.

    Raises:
        ConfigError: If DeepSpeed or Megatron-LM hold the models, or an optimizer has parameters of
            a model that was not prepared.
    """
    if accelerator.distributed_type.value in _OWN_FORMATS:
        raise ConfigError(
            f"cloudckpt can't save or load the models of {accelerator.distributed_type.value}: use "
            "the accelerator's own save_state and load_state with a local folder",
            uri=uri,
        )
    models = accelerator._models
    named = {f"model_{index}": model for index, model in enumerate(models)}
    optimizers = {}
    for index, prepared in enumerate(accelerator._optimizers):
        own = {id(one) for group in prepared.param_groups for one in group["params"]}
        parameters = [(model, {id(one) for one in model.parameters()}) for model in models]
        whole = [model for model, there in parameters if own <= there]
        of = whole[:1] or [model for model, there in parameters if own & there]
        if not own <= set().union(*(there for _, there in parameters)):
            raise ConfigError(
                f"optimizer {index} has parameters of a model that was not prepared: prepare the "
                "models with their optimizers",
                uri=uri,
            )
        module = of[0] if len(of) == 1 else torch.nn.ModuleList(of)
        optimizers[f"optimizer_{index}"] = (module, prepared.optimizer)
    return Parts(
        {name: model for name, model in named.items() if only is None or name in only}, optimizers
    )


def _write_files_of_rank(own: PerRank[Any], folder: str, uri: str, rank: int) -> None:
    """Writes the files that were saved for this rank into a folder; warns if there are none."""
    if not own.is_loaded:
        logger.warning(
            "%s was saved by fewer ranks, and has no files of rank %d, which keeps its random "
            "states, and loads the first rank's other files",
            uri,
            rank,
        )
        return
    for name, content in unpickle_values(own.value, OF_RANKS, uri).items():
        map_new_file(folder, name, content.nbytes, uri).copy_(content)


def _is_fsdp(accelerator: Any) -> bool:
    """Returns whether the accelerator uses FSDP; hooks then get no weights and no models."""
    return bool(accelerator.distributed_type.value == "FSDP")
