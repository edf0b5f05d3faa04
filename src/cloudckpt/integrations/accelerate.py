"""Hugging Face Accelerate: ``save_state`` and ``load_state`` of an ``Accelerator`` take URIs.

>>> import cloudckpt.integrations.accelerate  # doctest: +SKIP
>>> accelerator.save_state("s3://bucket/run/step-10")  # doctest: +SKIP
>>> accelerator.load_state(cloudckpt.latest("s3://bucket/run"))  # doctest: +SKIP

They do so once this module is imported or ``cloudckpt.install()`` is called (its options are used),
whether Accelerate is imported before or after. All ranks save their shards in one commit, and a
checkpoint loads on any number of ranks. Paths that are not URIs are handled by Accelerate.

A checkpoint holds the models as ``model_0`` and so on and the optimizers as ``optimizer_0`` and so
on, tensor by tensor, and under ``files`` the files that Accelerate and registered hooks write
(random states, schedulers, samplers, the scaler, registered objects). Tested with accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from cloudckpt import api
from cloudckpt.config import Config
from cloudckpt.dcp.install import Change, chosen_config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    MissingDependencyError,
    MissingKeyError,
)
from cloudckpt.integrations import local_only
from cloudckpt.integrations.adapting import watch
from cloudckpt.integrations.folders import files_of, room_for
from cloudckpt.integrations.parts import Parts, keep_newest, uri_of
from cloudckpt.integrations.shapes import function
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.contents import inspect as inspect_checkpoint
from cloudckpt.runs.steps import Retention

if importlib.util.find_spec("accelerate") is None:
    raise MissingDependencyError(
        "cloudckpt.integrations.accelerate needs Accelerate: pip install 'accelerate>=1.8'"
    )

__all__ = ["changes"]

_FILES = "files"
_OF_A_RANK = re.compile(r"random_states_(\d+)\.pkl")
_began_with: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By accelerator: the step of its own project that it loaded, and so does not delete."""
_OWN_FORMATS = ("DEEPSPEED", "MEGATRON_LM")


def changes(module: ModuleType) -> Iterator[Change]:
    """The changes to ``accelerate.accelerator``.

    Raises:
        UnknownShapeError: If the module does not look as expected.
    """
    save = function(module, "Accelerator.save_state", "output_dir")
    load = function(module, "Accelerator.load_state", "input_dir")
    yield module.Accelerator, "save_state", _saving(save)
    yield module.Accelerator, "load_state", _loading(load)
    yield from local_only.changes(module)


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        output_dir = given.arguments.get("output_dir")
        naming, place = _naming(self), None
        if naming is not None:
            place = str(naming.uri(self.save_iteration))
        elif not self.project_configuration.automatic_checkpoint_naming and output_dir is not None:
            place = uri_of(output_dir)
        if place is None:
            return original(self, *args, **kwargs)
        _save(self, place, naming, functools.partial(_instead, original, given, "output_dir"))
        return place

    return save_state


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_state(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        input_dir = given.arguments.get("input_dir")
        naming = _naming(self)
        if input_dir is not None:
            place = uri_of(input_dir)
        else:
            place = None if naming is None else _newest(naming)
        if place is None:
            original(self, *args, **kwargs)
            return
        _load(self, place, functools.partial(_instead, original, given, "input_dir"))
        run, _, name = place.rpartition("/")
        if naming is not None and run == str(naming.root):
            step = naming.names.step(name) or 0
            _began_with[self] = step
            self.project_configuration.iteration = step + 1

    return load_state


def _instead(
    original: Callable[..., Any], given: inspect.BoundArguments, parameter: str, folder: str
) -> object:
    """Calls Accelerate's method with another folder."""
    given.arguments[parameter] = folder
    return original(*given.args, **given.kwargs)


def _save(accelerator: Any, uri: str, naming: Run | None, write: Callable[[str], object]) -> None:
    """Saves on all ranks, including the files that ``write`` writes to the folder passed to it."""
    meeting, config = Meeting.of(None, False), _config()
    if naming is not None:
        meeting.broadcast_from_first(
            functools.partial(_check_newest, naming, accelerator.save_iteration)
        )
        config = dataclasses.replace(config, overwrite=False)  # as Accelerate does
    with contextlib.ExitStack() as stack:
        folder = _own_folder(meeting, stack)

        def collect() -> dict[str, Any]:
            state = _parts(accelerator, uri).state_dicts(config)
            hooks = accelerator._save_model_state_pre_hook.values()
            weights = {} if _is_fsdp(accelerator) else _models_in(state)
            left = list(weights.values())  # hooks take out what they save themselves
            for hook in hooks:
                hook(accelerator._models, left, folder)
            with _of_small_files(accelerator):
                write(folder)
            is_left = {id(one) for one in left}
            taken = [name for name, one in weights.items() if id(one) not in is_left]
            return {name: value for name, value in state.items() if name not in taken}

        state = meeting.begin(collect)
        state[_FILES] = files_of(folder, meeting)
        api.save(state, checkpoint_id=uri, config=config)
    if naming is not None and meeting.rank == 0:
        retention = Retention(max_to_keep=accelerator.project_configuration.total_limit)
        saved = naming.names.step(uri.rpartition("/")[2]) or 0
        keep_newest(naming, retention, saved, {_began_with.get(accelerator)})


def _load(accelerator: Any, uri: str, read: Callable[[str], object]) -> None:
    """Loads on all ranks, including the files that ``read`` reads from the folder passed to it."""
    meeting, config = Meeting.of(None, False), _config()
    items = meeting.broadcast_from_first(
        lambda: [(one.name, one.nbytes) for one in inspect_checkpoint(uri, config=config).items]
    )
    hooks = list(accelerator._load_model_state_pre_hook.values())
    there = {name.partition(".")[0] for name, _ in items}
    with contextlib.ExitStack() as stack:
        folder = _own_folder(meeting, stack)

        def prepare() -> tuple[Parts, dict[str, torch.Tensor]]:
            files = {
                name.partition(".")[2]: nbytes
                for name, nbytes in items
                if name.partition(".")[0] == _FILES
            }
            rooms = {
                name: room_for(folder, name, nbytes, uri)
                for name, nbytes in files.items()
                if _is_for(name, meeting.rank)
            }
            # what the checkpoint lacks is left to the hooks that saved it
            return _parts(accelerator, uri, there if hooks else None), rooms

        parts, rooms = meeting.begin(prepare)
        parts.load(uri, config, beside={_FILES: rooms} if rooms else {})

        def load_files() -> None:
            left = [] if _is_fsdp(accelerator) else list(accelerator._models)
            for hook in hooks:
                hook(left, folder)
            for index, model in enumerate(accelerator._models):
                if f"model_{index}" not in there and any(one is model for one in left):
                    raise MissingKeyError(
                        f"model_{index} is not in the checkpoint, and no hook has loaded it",
                        uri=uri,
                        item=f"model_{index}",
                    )
            with _of_small_files(accelerator):
                read(folder)

        meeting.begin(load_files)
    # a rank that did not exist at the save has no file with the step
    accelerator.step = meeting.broadcast_from_first(lambda: accelerator.step)


def _parts(accelerator: Any, uri: str, there: set[str] | None = None) -> Parts:
    """The models and optimizers; only the models in ``there``, if it is given."""
    if accelerator.distributed_type.value in _OWN_FORMATS:
        raise ConfigError(
            f"{accelerator.distributed_type} writes files of its own: save to a folder", uri=uri
        )
    models, optimizers = accelerator._models, accelerator._optimizers
    if len(optimizers) > len(models):
        raise ConfigError(
            f"there are {len(optimizers)} optimizers and {len(models)} models: prepare one "
            "model for each, in the same order",
            uri=uri,
        )
    named = {f"model_{index}": model for index, model in enumerate(models)}
    pairs = zip(models, optimizers, strict=False)
    return Parts(
        {name: model for name, model in named.items() if there is None or name in there},
        {
            f"optimizer_{index}": (model, optimizer.optimizer)
            for index, (model, optimizer) in enumerate(pairs)
        },
    )


def _own_folder(meeting: Meeting, stack: contextlib.ExitStack) -> str:
    """A folder for this rank's files, which lasts until the stack ends; a collective call."""
    return meeting.begin(
        lambda: stack.enter_context(tempfile.TemporaryDirectory(prefix="cloudckpt-"))
    )


def _models_in(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("model_")}


def _is_for(name: str, rank: int) -> bool:
    of_a_rank = _OF_A_RANK.fullmatch(name)
    return of_a_rank is None or int(of_a_rank.group(1)) == rank


def _is_fsdp(accelerator: Any) -> bool:
    """Whether Accelerate passes hooks no weights and no models to load, as it does for FSDP."""
    return bool(accelerator.distributed_type.value == "FSDP")


@contextlib.contextmanager
def _of_small_files(accelerator: Any) -> Iterator[None]:
    """Hides models, optimizers and hooks from Accelerate, and keeps it from naming folders."""
    project = accelerator.project_configuration
    hidden: Sequence[tuple[Any, str, Any]] = (
        (accelerator, "_models", []),
        (accelerator, "_optimizers", []),
        (accelerator, "_save_model_state_pre_hook", {}),
        (accelerator, "_load_model_state_pre_hook", {}),
        (project, "automatic_checkpoint_naming", False),
    )
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in hidden]
    for owner, name, value in hidden:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _config() -> Config:
    return chosen_config() or Config()


def _naming(accelerator: Any) -> Run | None:
    """The run that holds checkpoints with automatic names, if it is on a URI."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or accelerator.project_dir is None:
        return None
    root = uri_of(accelerator.project_dir)
    if root is None:
        return None
    return Run(f"{root}/checkpoints", step_name="checkpoint_{step}", config=_config())


def _newest(naming: Run) -> str:
    first = Meeting.of(None, False).broadcast_from_first(
        lambda: next(naming.committed_steps(), None)
    )
    if first is None:
        raise CheckpointNotFoundError("no checkpoint was saved yet", uri=str(naming.root))
    return str(naming.uri(first))


def _check_newest(naming: Run, iteration: int) -> None:
    """Refuses a checkpoint that would be mistaken for an old one and deleted before others.

    Raises:
        CheckpointExistsError: If there is a later checkpoint.
    """
    newest = next(naming.committed_steps(), None)
    if newest is not None and newest >= iteration:
        raise CheckpointExistsError(
            f"checkpoint_{newest} is there already, and this would be checkpoint_{iteration}: call "
            "load_state() first, set project_configuration.iteration, or give another project_dir",
            uri=str(naming.root),
        )


watch("accelerate")
