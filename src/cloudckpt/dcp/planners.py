"""torch's default planners, faster and with named errors."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import (
    DynamicMetaLoadPlanner as TorchDynamicMetaLoadPlanner,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.checkpoint.inventory import Inventory
from cloudckpt.checkpoint.lazy import inventory_behind
from cloudckpt.checkpoint.shard import check_placements, check_shards, check_supported
from cloudckpt.checkpoint.structure import KeyNames, Structure, containers, find_collision
from cloudckpt.checkpoint.torch_private import (
    ShardedTensor,
    create_chunk_list,
    flatten_sharded_tensors,
    flatten_state_dict,
    init_state_dict,
    traverse_state_dict,
    whole_shape,
)
from cloudckpt.dcp.load_plan import (
    check_types,
    plan_reads,
    saved_types,
    tell_replaced,
)
from cloudckpt.dcp.missing import advice
from cloudckpt.errors import MissingKeyError, ShapeMismatchError, UnsupportedTensorError
from cloudckpt.gc_pause import paused_gc

__all__ = [
    "CloudLoadPlanner",
    "CloudSavePlanner",
    "DynamicMetaLoadPlanner",
    "EverythingPlanner",
    "KeepingKeysPlanner",
    "PartialPlanner",
    "keep_containers",
    "lost_by_flattening",
]


_NO_TENSORS = ("builtins", "numpy")


class CloudSavePlanner(DefaultSavePlanner):
    """Plans as torch does, and records what flattening the state dict loses.

    Planning many items takes about half as long as with torch's planner.

    Attributes:
        structure: What flattening has lost.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.structure = Structure()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """As torch's.

        Raises:
            KeyCollisionError: If two entries of the state dict would have the same name.
            UnsupportedValueError: If a container contains itself.
        """
        containers(state_dict)
        uri = None if storage_meta is None else storage_meta.checkpoint_id
        try:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
        except ValueError:
            collision = find_collision(state_dict, None if uri is None else str(uri))
            if collision is None:
                raise
            raise collision from None
        if self.flatten_state_dict:
            with paused_gc():
                self.structure = Structure.of(state_dict, None if uri is None else str(uri))
        keep_containers(self, state_dict)

    def create_local_plan(self) -> SavePlan:
        """As torch's.

        Raises:
            UnsupportedTensorError: If a tensor is a nested one, which has no size to plan for, has
                a partial placement, or declares invalid shards.
        """
        for name, value in self.state_dict.items():
            if isinstance(value, DTensor):
                check_placements(value, name)
            else:
                check_shards(value, name)
            # torch's ShardedTensor can't be asked, and others may not be able to say either
            is_asked = type(value) is torch.Tensor or is_traceable_wrapper_subclass(value)
            if is_asked and value.is_nested:
                check_supported(value, name)
        with paused_gc():
            return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with paused_gc():
            return super().create_global_plan(all_plans)


def keep_containers(planner: DefaultSavePlanner, state_dict: Mapping[str, Any]) -> None:
    """Lets a planner that does not flatten save containers as they are.

    torch rebuilds them to flatten sharded tensors within: keys become strings, of two with the same
    string one is lost, and so is what is empty. It stays so for those with sharded tensors.
    """
    if planner.flatten_state_dict or not planner.flatten_sharded_tensors:
        return
    rebuilt, planner.state_dict = planner.state_dict, {}
    for key, value in state_dict.items():
        is_container = isinstance(value, (Mapping, list))
        if is_container and not _has_sharded_tensors(value):
            planner.state_dict[key] = value
        elif str(key) in rebuilt:  # a rank may have no shard of a tensor
            planner.state_dict[str(key)] = rebuilt[str(key)]


def _has_sharded_tensors(container: Any) -> bool:
    found: list[bool] = []
    traverse_state_dict(
        {"": container}, lambda path, value: found.append(isinstance(value, ShardedTensor))
    )
    return any(found)


class KeepingKeysPlanner(DefaultLoadPlanner):
    """Stores loaded values under the state dict's own keys.

    torch stores them under the strings in its paths: next to an integer key, a string key appears
    with the new value, and the integer key keeps the old value. It takes an empty dict in a list
    for a value that is missing in the checkpoint. Without ``flatten_state_dict`` it stores them in
    a copy, which nobody gets, and which lacks what is empty.

    Attributes:
        map_location: Device of tensors that are nested in other values; None: the one they were
            saved from.
    """

    map_location: str | torch.device | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """As torch's.

        Raises:
            UnsupportedTensorError: If a tensor has no memory and torch can't allocate it.
            UnsupportedValueError: If a container contains itself.
        """
        if dist.is_available() and dist.is_initialized():  # torch allocates meta tensors then
            containers(state_dict)
        else:
            _refuse_meta(state_dict)
        # torch's own also makes None of each value that is neither a number nor a string
        self.original_state_dict = _ready_to_load(state_dict)
        self.metadata, self.is_coordinator = metadata, is_coordinator
        if self.flatten_state_dict:
            with paused_gc():
                self._names = KeyNames(self.original_state_dict)
            # as a save does; torch's load copies all containers first, and loses what is empty
            state_dict, self.mappings = flatten_state_dict(self.original_state_dict)
        if self.flatten_sharded_tensors:
            state_dict = flatten_sharded_tensors(state_dict)
        self.state_dict = state_dict
        if not self.flatten_state_dict:
            for name, value in self.original_state_dict.items():
                if not isinstance(value, torch.Tensor):  # a rank may have no shard of a tensor
                    self.state_dict[name] = value

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.put(read_item, torch.load(value, map_location=self.map_location, weights_only=False))

    def put(self, read_item: ReadItem, value: Any) -> None:
        """Stores a value in the state dict."""
        self._store(read_item.dest_index.fqn, value)

    def _store(self, name: str, value: Any) -> None:
        if not self.flatten_state_dict:
            self.state_dict[name] = self.original_state_dict[name] = value
            return
        path, names = self.mappings[name], self._names
        container: Any = self.original_state_dict
        for depth, element in enumerate(path[:-1]):
            container = container[names.name(path[:depth], element)]
        container[names.name(path[:-1], path[-1])] = value


def _ready_to_load(value: Any) -> Any:
    """A state dict with memory for its meta tensors; its lists are copies, as torch's planner does.

    Dicts are changed in place. All other values stay, also where nothing is loaded in their place.
    """
    if isinstance(value, dict):
        for key, entry in value.items():
            if isinstance(entry, (dict, list, torch.Tensor)):
                value[key] = _ready_to_load(entry)
    elif type(value) is list:
        return list(map(_ready_to_load, value))
    elif isinstance(value, torch.Tensor) and getattr(value, "device", None) == _META:
        init_state_dict(alone := {"tensor": value})
        return alone["tensor"]
    return value


def _refuse_meta(state_dict: dict[str, Any]) -> None:
    """Refuses meta tensors, which have no memory.

    Raises:
        UnsupportedTensorError: Names the first one.
    """
    if not any(
        isinstance(value, torch.Tensor) and value.is_meta
        for container in containers(state_dict)
        for value in (container.values() if isinstance(container, Mapping) else container)
    ):
        return
    values = flatten_state_dict(state_dict)[0].items()
    name = next((name for name, value in values if getattr(value, "is_meta", False)), "a value")
    raise UnsupportedTensorError(
        f"{name} is a meta tensor in the state dict, which has no memory to load into: call "
        "model.to_empty(device=...) before you take the model's state dict",
        item=name,
    )


_META = torch.device("meta")


class CloudLoadPlanner(KeepingKeysPlanner):
    """Plans as torch does, and says which keys are missing or misshapen.

    Args:
        uri: The checkpoint, for messages.
        tells: Whether what may not be meant is logged, such as converted tensors.

    Attributes:
        left_alone: What keeps its value though the checkpoint has something there, and why.
    """

    def __init__(self, uri: str, *, tells: bool = True) -> None:
        super().__init__()
        self._uri = uri
        self.tells = tells
        self._whole: dict[str, list[str]] = {}  # by what is loaded: the missing keys that it is for
        self.left_alone: dict[str, str] = {}

    @classmethod
    def like(cls, planner: DefaultLoadPlanner, uri: str) -> CloudLoadPlanner:
        """With the flags of a planner of torch's."""
        made = cls(uri)
        made.flatten_state_dict = planner.flatten_state_dict
        made.flatten_sharded_tensors = planner.flatten_sharded_tensors
        made.allow_partial_load = planner.allow_partial_load
        return made

    def create_local_plan(self) -> LoadPlan:
        """As torch's.

        Raises:
            MissingKeyError: If the state dict has keys that the checkpoint lacks.
            ShapeMismatchError: If a tensor's shape differs from the checkpoint's, or the checkpoint
                has a tensor where the state dict has none.
            UnsupportedTensorError: If a tensor's element type can't hold what was saved, or it
                declares invalid shards.
        """
        assert self.metadata is not None
        inventory = inventory_behind(self.metadata)
        left: list[str] = []
        for name, value in self.state_dict.items():
            check_shards(value, name)
        self.left_alone = self._empty(self.metadata) if self.flatten_state_dict else {}
        self._take_lengths()
        try:
            with paused_gc():
                if inventory is None:
                    plan = super().create_local_plan()
                else:
                    left = self._take_whole(inventory) if self.flatten_state_dict else []
                    strict = not self.allow_partial_load
                    plan = plan_reads(self.state_dict, inventory, strict=strict)
        except (RuntimeError, TypeError, ValueError) as exc:
            self._explain(exc)
            raise
        dtype_of = saved_types(self.metadata)
        logs = self.tells and self.is_coordinator
        check_types(self.state_dict, dtype_of, self._uri, logs=logs)
        if logs:
            tell_replaced(self.state_dict, self.metadata, self._uri, left)
        return plan

    def put(self, read_item: ReadItem, value: Any) -> None:
        """Stores a value; one that is no container does not stand for the missing keys of one.

        Raises:
            MissingKeyError: If keys are missing, since the checkpoint has such a value there.
        """
        missing = self._whole.get(read_item.dest_index.fqn)
        if not missing or isinstance(value, (Mapping, list, tuple)):
            super().put(read_item, value)
        elif not self.allow_partial_load:
            raise self._missing(missing)
        else:
            why = f"the checkpoint has a {type(value).__name__} in place of what it is in"
            self.left_alone.update(dict.fromkeys(missing, why))

    def _empty(self, metadata: Metadata) -> dict[str, str]:
        """Dicts that are empty in the state dict, and not in the checkpoint; and what that has."""
        names = {".".join(map(str, path)) for path in self._names.empty}
        counts = dict.fromkeys(names, 0)
        if not names:
            return {}
        for name in metadata.state_dict_metadata:
            parts = name.split(".")
            for depth in range(1, len(parts)):
                if (above := ".".join(parts[:depth])) in counts:
                    counts[above] += 1
        return {
            name: f"empty in the state dict, with {count} entries in the checkpoint"
            for name, count in counts.items()
            if count
        }

    def _take_lengths(self) -> None:
        """Makes room for what has another length each time: the bytes of an ``_extra_state``."""
        assert self.metadata is not None
        for name, value in self.state_dict.items():
            if not (isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"):
                continue
            is_bytes = type(value) is torch.Tensor and value.dtype is torch.uint8
            stored = self.metadata.state_dict_metadata.get(name)
            if not is_bytes or not isinstance(stored, TensorStorageMetadata):
                continue
            if value.dim() == len(stored.size) == 1 and value.shape != stored.size:
                made = torch.empty(stored.size, dtype=torch.uint8, device=value.device)
                self.state_dict[name] = made
                self._store(name, made)

    def _take_whole(self, inventory: Inventory) -> list[str]:
        """Asks for dicts and lists as values where they were saved as such, without flattening.

        Dicts that are empty in the state dict stay so where one was saved: another rank may have
        saved a value there.

        Returns:
            The tensors in whose place they are loaded.
        """
        assert self.metadata is not None
        stored = self.metadata.planner_data or {}
        entries, saved_empty = inventory.entries, inventory.structure.empty
        missing = [self.mappings[name] for name in self.state_dict if name not in entries]
        self._whole = {}
        left: list[str] = []
        empty = [path for path in self._names.empty if path not in saved_empty]
        for path in (*missing, *empty):
            for depth in range(1, len(path) + 1):
                whole = ".".join(map(str, path[:depth]))
                if (
                    whole in entries
                    and entries[whole].shape is None
                    and stored.get(whole, (whole,)) == path[:depth]  # a key may have dots
                    and self.mappings.get(whole, path[:depth]) == path[:depth]
                ):
                    name = ".".join(map(str, path))
                    if path not in self._names.empty:
                        self._whole.setdefault(whole, []).append(name)
                        if isinstance(self.state_dict.pop(name), torch.Tensor):
                            left.append(name)
                    self.state_dict[whole], self.mappings[whole] = None, path[:depth]
                    break
        return left

    def _explain(self, exc: Exception) -> None:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        missing = [fqn for fqn in self.state_dict if fqn not in stored]
        if missing and not self.allow_partial_load:
            raise self._missing(missing) from exc
        for fqn, value in self.state_dict.items():
            entry = stored.get(fqn)
            if not isinstance(entry, TensorStorageMetadata):
                continue
            if type(value).__module__ in _NO_TENSORS:
                raise ShapeMismatchError(
                    f"{fqn} is a tensor of shape {tuple(entry.size)} in the checkpoint, and none "
                    "in the state dict: put a tensor there",
                    uri=self._uri,
                    item=fqn,
                ) from exc
            if hasattr(value, "size"):
                wanted = whole_shape(value)
                if wanted != tuple(entry.size):
                    raise ShapeMismatchError(
                        f"{fqn} has shape {tuple(entry.size)} in the checkpoint and {wanted} in "
                        "the state dict",
                        uri=self._uri,
                        item=fqn,
                    ) from exc

    def _missing(self, names: Sequence[str]) -> MissingKeyError:
        assert self.metadata is not None
        count = "1 key is" if len(names) == 1 else f"{len(names)} keys are"
        return MissingKeyError(
            f"{count} not in the checkpoint, the first: {list(names[:5])}"
            f"{advice(names[0], self.metadata.state_dict_metadata)}",
            uri=self._uri,
            item=names[0],
        )


class PartialPlanner(CloudLoadPlanner):
    """Loads what the checkpoint has and fits; the rest keeps its values, which it records."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.allow_partial_load = True

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        unfit: dict[str, str] = {}
        self._take_lengths()
        for name, value in self.state_dict.items():
            entry = stored.get(name)
            if isinstance(entry, TensorStorageMetadata) and (why := _why_not(value, entry)):
                unfit[name] = why
        for name in unfit:
            del self.state_dict[name]
        plan = super().create_local_plan()
        self.left_alone.update(unfit)
        return plan


def _why_not(value: Any, stored: TensorStorageMetadata) -> str:
    """Why a tensor that was saved can't be loaded into a value; empty if it can."""
    if type(value).__module__ in _NO_TENSORS:
        return "a tensor in the checkpoint, and none in the state dict"
    saved, dtype = stored.properties.dtype, getattr(value, "dtype", None)
    if hasattr(value, "size") and (shape := whole_shape(value)) != tuple(stored.size):
        return f"of shape {tuple(stored.size)} in the checkpoint and {shape} in the state dict"
    if isinstance(dtype, torch.dtype) and not torch.can_cast(saved, dtype):
        return f"{saved} in the checkpoint, which {dtype} can't hold"
    return ""


class EverythingPlanner(CloudLoadPlanner):
    """Loads everything in the checkpoint.

    Args:
        uri: The checkpoint, for messages.
        device: Device of the tensors; default: the host.
    """

    def __init__(self, uri: str, device: str | torch.device | None = None) -> None:
        super().__init__(uri)
        self.map_location = device if device is not None else "cpu"  # regardless of torch's default
        self.flatten_state_dict = self.flatten_sharded_tensors = False  # it is flat, and stays so

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        flat: dict[str, Any] = {}
        for fqn, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                flat[fqn] = torch.empty(
                    entry.size, dtype=entry.properties.dtype, device=self.map_location
                )
            else:
                flat[fqn] = None
        super().set_up_planner(flat, metadata, is_coordinator)

    def content(self, structure: Structure) -> dict[Any, Any]:
        """The loaded values, nested as they were saved.

        Raises:
            CheckpointCorruptError: If the metadata contradicts itself.
        """
        assert self.metadata is not None
        with paused_gc():
            return structure.nested(self.state_dict, self.metadata.planner_data or {}, self._uri)


class DynamicMetaLoadPlanner(KeepingKeysPlanner, TorchDynamicMetaLoadPlanner):
    """torch's planner for sources without metadata, extended to values other than tensors.

    The state dict alone determines what is loaded and how it is sharded.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        entries: dict[str, Any] = {}
        for fqn, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                check_shards(value, fqn)
                properties, shape = TensorProperties(dtype=value.dtype), whole_shape(value)
                entries[fqn] = TensorStorageMetadata(
                    properties, torch.Size(shape), create_chunk_list(value)
                )
            else:
                entries[fqn] = BytesStorageMetadata()
        self.metadata = Metadata(state_dict_metadata=entries)


def lost_by_flattening(state_dict: dict[str, Any], planner: object, uri: str) -> Structure:
    """What flattening has lost of a state dict, as far as it can be determined.

    Our planner records it. For torch's, the planner's paths are compared with the state dict. A
    planner of another kind, or one that saves something other than it was given, leaves the
    structure to the strings in its paths.

    Args:
        state_dict: What is being saved.
        planner: Has planned it.
        uri: Where to, for messages.

    Raises:
        KeyCollisionError: If two entries of the state dict would have the same name.
    """
    if isinstance(planner, CloudSavePlanner):
        return planner.structure
    if not isinstance(planner, DefaultSavePlanner) or not planner.flatten_state_dict:
        return Structure()
    with paused_gc():
        structure = Structure.of(state_dict, uri)
        if structure and not _flattens(planner, state_dict):
            return Structure()
    return structure


def _flattens(planner: DefaultSavePlanner, state_dict: dict[str, Any]) -> bool:
    """Whether the planner saves this state dict itself, not one derived from it."""
    paths: list[Any] = []
    traverse_state_dict(state_dict, lambda path, value: paths.append(path))
    return len(paths) == len(planner.mappings) and all(
        planner.mappings.get(".".join(map(str, path))) == path for path in paths
    )
