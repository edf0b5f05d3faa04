"""The state that the adapters save: models, optimizers, values, files, and state of single ranks.

The states of an optimizer are saved by parameter names, which resharding does not change. To create
the states of a fresh optimizer, torch makes a step with zero gradients and a learning rate of 0.
Before a load that is right, as the load replaces the states. In a save it must not happen: the step
would be counted by the optimizer.

State that differs between ranks, such as random generators and dataloaders, is saved for each rank
(:func:`cloudckpt.per_rank`), and loaded by the same rank. A rank that did not exist at the save
keeps its random generators, and its dataloader starts at the position that the framework chooses; a
warning is logged.

Each file of a local folder is an item: a memory-mapped uint8 tensor of its bytes. Sending it reads
the file, and loading into it writes the file.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from cloudckpt.checkpoint.values import Unloadable, load_item
from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.checksum import CRC32C
from cloudckpt.config import Config
from cloudckpt.dcp.content import PerRank, per_rank
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import ConfigError, UnsupportedTensorError
from cloudckpt.runs.contents import inspect
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.uri import CheckpointURI, text_of, unfolded

__all__ = [
    "OF_RANKS",
    "Parts",
    "entries_of_rank",
    "is_sharded",
    "map_files",
    "map_files_of_ranks",
    "pickle_values",
    "set_random_state",
    "random_state",
    "map_new_file",
    "unpickle_values",
    "uri_of",
]

OF_RANKS = "of_each_rank"
"""The name of the item with the values that each rank saves for itself, pickled by ``torch.save``.
"""


def uri_of(path: str | os.PathLike[str]) -> str | None:
    """Returns the URI that a framework was given; None if it was given a local path.

    Raises:
        InvalidURIError: If it is a URI, but not a valid location, or if ``pathlib`` has collapsed
            its slashes: a save to that local path would be lost with the machine.
    """
    text = text_of(path) or ""
    if "://" in text or unfolded(text) is not None:
        return str(CheckpointURI.parse(text))
    return None


class Parts:
    """The models and optimizers of a training, saved tensor by tensor, each rank its shards."""

    def __init__(
        self, models: Mapping[str, Module], optimizers: Mapping[str, tuple[Module, Optimizer]]
    ) -> None:
        """
        Args:
            models: The models, by their names in a checkpoint.
            optimizers: The optimizers, by their names in a checkpoint, each with its model.
        """
        self._models = models
        self._optimizers = optimizers

    def state_dicts(self) -> dict[str, Any]:
        """Returns the state dicts to save, by name; a collective call that changes no optimizer."""
        states: dict[str, Any] = {
            name: get_model_state_dict(model) for name, model in self._models.items()
        }
        for name, (model, optimizer) in self._optimizers.items():
            with _without_new_states(optimizer):
                states[name] = get_optimizer_state_dict(model, optimizer)
        return states

    def load(
        self,
        uri: str,
        config: Config,
        *,
        others: Mapping[str, Any],
        strict: bool = True,
        trust_pickle: bool = False,
    ) -> dict[str, Any]:
        """Loads the models and optimizers in place, on any number of ranks; a collective call.

        Afterwards an optimizer has the states that were saved, and no others. Saved states that the
        optimizer can't take, for example because its options differ, are left out with a warning.

        Args:
            uri: The location of the checkpoint.
            config: Options.
            others: Other values to load, by name; names that the checkpoint lacks are left out.
            strict: Whether all models and optimizers must be in the checkpoint.
            trust_pickle: Whether pickles in the checkpoint may run any code.

        Returns:
            By name, the loaded values of ``others`` and the loaded state dict of each model.

        Raises:
            MissingKeyError: If ``strict``, and the checkpoint lacks a model or an optimizer.
            CloudCheckpointError: The errors of :func:`cloudckpt.load`.
        """
        saved = Meeting.of(None, False).broadcast_from_first(
            lambda: {item.name for item in inspect(uri, config=config).items}
        )
        wanted: dict[str, Any] = {
            name: get_model_state_dict(model) for name, model in self._models.items()
        }
        optimizers = {
            name: pair
            for name, pair in self._optimizers.items()
            if strict or _names_below(f"{name}.", saved)
        }
        for name, (model, optimizer) in optimizers.items():
            own = _names_below(f"{name}.state.", saved)
            wanted[name] = _optimizer_state_to_load(model, optimizer, own)
        more = {
            name: value
            for name, value in others.items()
            if name in saved or _names_below(f"{name}.", saved)
        }
        options = CheckpointerConfig(config=config, trust_pickle=trust_pickle)
        with make_sync_checkpointer(options) as checkpointer:
            loaded = checkpointer.load(uri, wanted | more, strict=strict)
        for name, model in self._models.items():
            given = dict(loaded[name])  # torch renames its entries
            set_model_state_dict(model, given, options=StateDictOptions(strict=strict))
        for name, (model, optimizer) in optimizers.items():
            loaded[name].setdefault("state", {})
            with _without_new_states(optimizer):
                some = StateDictOptions(strict=False)
                set_optimizer_state_dict(model, optimizer, loaded[name], options=some)
        return {name: loaded[name] for name in (*self._models, *more)}


def _optimizer_state_to_load(
    model: Module, optimizer: Optimizer, saved: Collection[str]
) -> dict[str, Any]:
    """Returns an optimizer's state dict to load into, without states that were not saved.

    ``saved`` has the names of saved states, such as ``weight.exp_avg``.
    """
    prepared = _with_all_states if saved else _without_new_states
    with prepared(optimizer):
        state_dict = dict(get_optimizer_state_dict(model, optimizer))
    has_state = {
        ".".join(names[:count])
        for names in (name.split(".") for name in saved)
        for count in range(1, len(names))
    }
    states: Any = state_dict["state"]
    state_dict["state"] = {name: state for name, state in states.items() if name in has_state}
    return state_dict


@contextlib.contextmanager
def _without_new_states(optimizer: Optimizer) -> Iterator[None]:
    """Keeps torch from creating states for a fresh optimizer during the block.

    torch creates states only if no parameter has a gradient, so one parameter gets a zero gradient.
    """
    parameters = _parameters(optimizer)
    if optimizer.state or not parameters or any(one.grad is not None for one in parameters):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


@contextlib.contextmanager
def _with_all_states(optimizer: Optimizer) -> Iterator[None]:
    """Lets torch create the states of all parameters during the block, if any is missing.

    If one is missing, all existing states are dropped, because torch creates states only for an
    optimizer without any. Gradients are removed until the block ends.
    """
    parameters = _parameters(optimizer)
    if any(tensor.requires_grad and tensor not in optimizer.state for tensor in parameters):
        optimizer.state.clear()
    gradients = [tensor.grad for tensor in parameters]
    for tensor in parameters:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in zip(parameters, gradients, strict=True):
            tensor.grad = gradient


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _names_below(prefix: str, names: Collection[str]) -> set[str]:
    """Returns the names that begin with a prefix, without the prefix."""
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


# ---- what differs between ranks


def random_state() -> dict[str, Any]:
    """Returns the states of this process's random generators: Python's, torch's and numpy's.

    The state of the accelerator's generator is included if the accelerator is initialized.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (device := _device()) is not None:
        state["device"] = device.get_rng_state()
    of_numpy: Any = numpy.random.get_state()
    algorithm, keys, *rest = of_numpy
    state["numpy"] = (algorithm, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets this process's random generators to states that :func:`random_state` has returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "device" in state and (device := _device()) is not None:
        device.set_rng_state(state["device"])
    if "numpy" in state:
        algorithm, keys, *rest = state["numpy"]
        numpy.random.set_state((algorithm, keys.numpy().astype("uint32"), *rest))


def entries_of_rank(state: Mapping[str, Any]) -> dict[str, PerRank[Any]]:
    """Returns the entries that each rank saves for itself, all marked by :func:`per_rank`.

    These are the entries that are marked already, and dataloaders.
    """
    own = {key: one for key, one in state.items() if isinstance(one, (PerRank, DataLoader))}
    return {key: one if isinstance(one, PerRank) else per_rank(one) for key, one in own.items()}


def is_sharded(value: object) -> bool:
    """Returns whether a value holds a DTensor, or a ShardedTensor, which has ``local_shards``."""
    leaves = torch.utils._pytree.tree_leaves(value)
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return any(isinstance(one, DTensor) or hasattr(one, "local_shards") for one in tensors)


def pickle_values(values: Mapping[str, Any], item: str, uri: str, config: Config) -> io.BytesIO:
    """Pickles values with ``torch.save`` into a buffer, as frameworks write their small files.

    Warns, or raises an error with ``Config(unloadable="refuse")``, if :func:`unpickle_values` would
    refuse them.

    Args:
        values: The values.
        item: The name of the item, for messages.
        uri: The location of the checkpoint, for messages.
        config: Options.

    Raises:
        UnsupportedTensorError: If a value is sharded: only this rank's shards would be saved.
        UnsupportedValueError: If a load would refuse a value, and ``unloadable`` is "refuse".
    """
    if (name := next((name for name, one in values.items() if is_sharded(one)), None)) is not None:
        text = f"{name} has sharded tensors, of which only the first rank's shards would be saved: "
        text += "leave it out, or save it with cloudckpt.save to a location of its own"
        raise UnsupportedTensorError(text, uri=uri, item=name)
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    check = Unloadable(uri, "refuse" if config.unloadable == "refuse" else "warn")
    check.look(buffer.getvalue(), item, dict)
    check.check()
    buffer.seek(0)
    return buffer


def unpickle_values(
    buffer: io.BytesIO, item: str, uri: str, weights_only: bool | None = None
) -> dict[str, Any]:
    """Loads values that :func:`pickle_values` has pickled, as safely as :func:`cloudckpt.load`.

    Args:
        buffer: The pickled values.
        item: The name of the item, for messages.
        uri: The location of the checkpoint, for messages.
        weights_only: If False, the pickle may run any code.

    Raises:
        UntrustedPickleError: If the values need code that is not on the allow-list.
        CheckpointCorruptError: If the pickle can't be read.
    """
    return dict(load_item(buffer.getvalue(), item, uri, trust=weights_only is False))


def _device() -> Any:
    """Returns the accelerator's module, such as ``torch.cuda``; None without an initialized one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = None if device is None else torch.get_device_module(device)
    return module if module is not None and module.is_initialized() else None


# ---- files


def map_files(folder: str, meeting: Meeting) -> dict[str, torch.Tensor]:
    """Maps the files beneath a folder that this rank has to save; a collective call.

    Ranks on one machine see the same files; each machine has its own. If files have the same name,
    one of the ranks that see the newest one saves it; older ones may be left from before the job
    went back to an earlier step.

    Args:
        folder: The folder on each rank's disk.
        meeting: Connects the ranks that save.

    Returns:
        The content of each file that this rank saves as a uint8 tensor, by path in the folder.

    Raises:
        ConfigError: If no rank has a file in the folder.
        CloudCheckpointError: If a rank can't read its folder; a process alone raises an OSError.
    """
    seen = meeting.gathered(lambda: _versions(folder), during="")
    if not any(seen):
        raise ConfigError(
            f"no rank has files in {folder}, so there is nothing to save: check that the Trainer "
            "writes its checkpoints there, and that nothing deletes them"
        )
    owners = _owners(seen)
    own = [name for name in seen[meeting.rank] if owners[name] == meeting.rank]
    return meeting.begin(lambda: _map_existing(folder, own))


def map_new_file(folder: str, name: str, nbytes: int, uri: str) -> torch.Tensor:
    """Creates or replaces a file in a folder, and returns it as a mapped uint8 tensor to fill.

    Args:
        folder: The folder.
        name: The path of the file in the folder, as it was saved.
        nbytes: The size of the file in bytes.
        uri: The location of the checkpoint, for the error message.

    Raises:
        ConfigError: If ``name`` leads out of the folder.
    """
    path = os.path.normpath(os.path.join(folder, name))
    if not path.startswith(folder + os.sep):
        text = f"the file {name!r} would be written outside of {folder}: load another checkpoint, "
        text += "or this one with cloudckpt.load, which writes no files"
        raise ConfigError(text, uri=uri, item=name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "wb").close()  # also shortens a file that is there
    return _map_file(path, nbytes)


def map_files_of_ranks(
    folder: str, meeting: Meeting
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Maps the first rank's files, and those of this rank that differ from them; a collective call.

    Args:
        folder: A folder that only this rank writes to; it may contain folders.
        meeting: Connects the ranks that save.

    Returns:
        Two results like that of :func:`map_files`: the first rank's files, which are empty on other
        ranks; and the files of this rank that the first rank lacks, or has with other content.

    Raises:
        CloudCheckpointError: If a rank can't read its folder; a process alone raises an OSError.
    """
    files = meeting.begin(lambda: _map_existing(folder, _versions(folder)))
    checksums = {name: CRC32C.of(bytes_of(content)) for name, content in files.items()}
    of_first = meeting.from_first(checksums)
    own = {name: files[name] for name in files if of_first.get(name) != checksums[name]}
    return (files if meeting.rank == 0 else {}), own


def _versions(folder: str) -> dict[str, tuple[int, int]]:
    """Returns the time of writing and the size of each file beneath a folder, by path in it.

    The time is in nanoseconds since 1970, and the size in bytes. Empty if there is no such folder.

    Raises:
        OSError: If the folder exists, but can't be listed: its files would be left out.
    """
    walk = os.walk(folder, onerror=_raise_unless_missing)
    paths = [os.path.join(parent, name) for parent, _, names in walk for name in names]
    states = {os.path.relpath(path, folder): os.stat(path) for path in paths}
    return {name: (state.st_mtime_ns, state.st_size) for name, state in states.items()}


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # another machine may have no such folder
        raise error


def _map_existing(folder: str, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Maps files into memory as uint8 tensors, given their paths in the folder."""
    return {name: _map_file(os.path.join(folder, name)) for name in names}


def _owners(seen: list[dict[str, tuple[int, int]]]) -> dict[str, int]:
    """Returns for each file a rank that sees its newest version; such ranks take turns.

    ``seen`` has the result of :func:`_versions` of each rank.
    """
    owners: dict[str, int] = {}
    for index, name in enumerate(sorted(set().union(*seen))):
        newest = max(files[name] for files in seen if name in files)
        ranks = [rank for rank, files in enumerate(seen) if files.get(name) == newest]
        owners[name] = ranks[index % len(ranks)]
    return owners


def _map_file(path: str, room: int | None = None) -> torch.Tensor:
    """Maps a file into memory as a uint8 tensor.

    Args:
        path: The file.
        room: The size in bytes of a new file, to which changes of the tensor are written; None maps
            an existing file, which stays unchanged.
    """
    size = os.path.getsize(path) if room is None else room
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=room is not None, size=size, dtype=torch.uint8)
