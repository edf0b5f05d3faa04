"""Planners like torch's defaults, but faster, and with errors that name the item."""

from __future__ import annotations

import io
from collections import Counter
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

from cloudckpt.checkpoint.lazy import record_behind
from cloudckpt.checkpoint.shard import check_placements, check_shards, check_supported
from cloudckpt.checkpoint.structure import KeyNames, Structure, containers, find_collision
from cloudckpt.checkpoint.table import Entry, Table
from cloudckpt.checkpoint.torch_private import (
    ShardedTensor,
    create_chunk_list,
    flatten_sharded_tensors,
    flatten_state_dict,
    init_state_dict,
    whole_shape,
)
from cloudckpt.dcp.load_plan import (
    check_types,
    conversions,
    plan_reads,
    replaced,
    saved_types,
    table_of,
    tell_replaced,
)
from cloudckpt.dcp.missing import advice
from cloudckpt.errors import MissingKeyError, ShapeMismatchError, UnsupportedTensorError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.transfer.memory import PLAIN

__all__ = [
    "CloudLoadPlanner",
    "CloudSavePlanner",
    "DynamicMetaLoadPlanner",
    "EverythingPlanner",
    "keep_containers",
    "lost_by_flattening",
]


_TENSORS = (torch.Tensor, ShardedTensor)


class CloudSavePlanner(DefaultSavePlanner):
    """Plans as torch does, and records the nesting that flattening the state dict loses.

    Planning many items takes about half as long as with torch's planner.

    Attributes:
        structure: The nesting that flattening has lost.
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
        """Flattens the state dict as torch's planner does.

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
        """Plans this rank's items as torch's planner does.

        Raises:
            UnsupportedTensorError: If a tensor is nested (and so has no size to plan for), has a
                partial placement, or declares invalid shards.
        """
        for name, value in self.state_dict.items():
            if isinstance(value, DTensor):
                check_placements(value, name)
            else:
                check_shards(value, name)
            # torch's ShardedTensor has no is_nested, and other classes may not either
            is_asked = type(value) is torch.Tensor or is_traceable_wrapper_subclass(value)
            if is_asked and value.is_nested:
                check_supported(value, name)
        with paused_gc():
            return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with paused_gc():
            return super().create_global_plan(all_plans)


def keep_containers(planner: DefaultSavePlanner, state_dict: Mapping[str, Any]) -> None:
    """Lets a planner that does not flatten save containers unchanged.

    torch rebuilds them: keys become strings, of two keys with the same string one is lost, and so
    are empty containers.
    """
    if planner.flatten_state_dict or not planner.flatten_sharded_tensors:
        return
    rebuilt, planner.state_dict = planner.state_dict, {}
    for key, value in state_dict.items():
        if isinstance(value, (Mapping, list)):
            planner.state_dict[key] = value
        elif str(key) in rebuilt:  # a rank may have no shard of a tensor
            planner.state_dict[str(key)] = rebuilt[str(key)]


class CloudLoadPlanner(DefaultLoadPlanner):
    """Plans as torch does, reports missing and misshapen keys, and keeps keys that are not strings.

    torch stores loaded values under the strings in its paths: next to an integer key, a string key
    appears with the new value, and the integer key keeps the old value. It takes an empty dict in a
    list for a value that is missing in the checkpoint. Without ``flatten_state_dict`` it stores
    values in a copy that the caller does not get, and that lacks empty containers.

    Args:
        uri: The checkpoint, for messages.
        strict: Whether all keys must be in the checkpoint and fit; otherwise those that fit are
            loaded, and the others keep their values.
        tells: Whether to log what may not be intended, such as converted tensors.

    Attributes:
        map_location: Device of tensors that are nested in other values; None: the device that they
            were saved from.
        left_alone: The names that keep their values although the checkpoint has an entry, and why.
        converted: The names that are loaded in another form than they were saved in, and how.
        unused: The names of values that were read, and not used.
    """

    map_location: str | torch.device | None = None

    def __init__(self, uri: str, *, strict: bool = True, tells: bool = True) -> None:
        super().__init__(allow_partial_load=not strict)
        self._uri = uri
        self._strict = strict
        self.tells = tells
        # maps a loaded value's name to the missing keys that it stands for
        self._whole: dict[str, list[str]] = {}
        self.left_alone: dict[str, str] = {}
        self.converted: dict[str, str] = {}
        self.unused: set[str] = set()

    @classmethod
    def like(cls, planner: DefaultLoadPlanner, uri: str) -> CloudLoadPlanner:
        """Makes a planner with the flags of one of torch's planners."""
        made = cls(uri)
        made.flatten_state_dict = planner.flatten_state_dict
        made.flatten_sharded_tensors = planner.flatten_sharded_tensors
        made.allow_partial_load = planner.allow_partial_load
        return made

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flattens the state dict as torch's planner does.

        Raises:
            UnsupportedTensorError: If a tensor has no memory and torch can't allocate it.
            UnsupportedValueError: If a container contains itself.
        """
        containers(state_dict)
        # otherwise torch allocates meta tensors
        if not (dist.is_available() and dist.is_initialized()):
            _refuse_meta(state_dict)
        # torch's own function also replaces each value that is neither number nor string by None
        self.original_state_dict = _ready_to_load(state_dict)
        self.metadata, self.is_coordinator = metadata, is_coordinator
        if self.flatten_state_dict:
            with paused_gc():
                self._names = KeyNames(self.original_state_dict)
            # as a save does; torch's load copies all containers first, and loses empty ones
            state_dict, self.mappings = flatten_state_dict(self.original_state_dict)
        if self.flatten_sharded_tensors:
            state_dict = flatten_sharded_tensors(state_dict)
        self.state_dict = state_dict
        if not self.flatten_state_dict:
            for name, value in self.original_state_dict.items():
                if not isinstance(value, torch.Tensor):  # a rank may have no shard of a tensor
                    self.state_dict[name] = value

    def create_local_plan(self) -> LoadPlan:
        """Plans this rank's reads as torch's planner does.

        Raises:
            MissingKeyError: If the state dict has keys that the checkpoint lacks.
            ShapeMismatchError: If a tensor's shape differs from the checkpoint's, or a key is a
                tensor in the checkpoint, but not in the state dict.
            UnsupportedTensorError: If a tensor's element type can't hold the saved values, or it
                declares invalid shards.
        """
        assert self.metadata is not None
        table = table_of(self.metadata, self._uri)
        for name, value in self.state_dict.items():
            check_shards(value, name)
        self._take_lengths(table)
        left: list[str] = []
        self.left_alone, self.unused = {}, set()
        if self.flatten_state_dict:
            self.left_alone = self._empty(table)
            left = self._take_whole(table)
        missing = [name for name in self.state_dict if name not in table.names]
        tied = self._tied(missing) if missing else {}
        missing = [name for name in missing if name not in tied]
        if missing and not self.allow_partial_load:
            raise self._missing(missing)
        self._leave_unfit(table)
        with paused_gc():
            plan, moved = plan_reads(self.state_dict, table)
        logs = self.tells and self.is_coordinator
        types = conversions(self.state_dict, saved_types(self.metadata))
        check_types(types, self._uri, logs=logs)
        self.converted = dict.fromkeys(moved, "saved in other parts")
        self.converted |= {name: f"{saved} to {now}" for name, (saved, now) in types.items()}
        left += replaced(self.state_dict, self.metadata)
        self.converted |= dict.fromkeys(left, "another value, which takes the tensor's place")
        self.converted |= {
            name: f"loaded with {other}, as they are tied" for name, other in tied.items()
        }
        if logs and left:
            tell_replaced(left, self._uri)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.put(read_item, torch.load(value, map_location=self.map_location, weights_only=False))

    def put(self, read_item: ReadItem, value: Any) -> None:
        """Stores a loaded value in the state dict.

        The value was perhaps read for missing keys that a container of this name would have; then
        only a container is stored.

        Raises:
            MissingKeyError: If keys are missing because the value is not a container.
        """
        missing = self._whole.get(read_item.dest_index.fqn)
        if not missing or isinstance(value, (Mapping, list, tuple)):
            self._store(read_item.dest_index.fqn, value)
        elif not self.allow_partial_load:
            raise self._missing(missing)
        else:
            self.unused.add(read_item.dest_index.fqn)
            why = f"the checkpoint has a {type(value).__name__} in place of the container"
            self.left_alone.update(dict.fromkeys(missing, why))

    def _store(self, name: str, value: Any) -> None:
        if not self.flatten_state_dict:
            self.state_dict[name] = self.original_state_dict[name] = value
            return
        *outer, last = self._names.true(self.mappings[name])
        container: Any = self.original_state_dict
        for key in outer:
            container = container[key]
        container[last] = value

    def _empty(self, table: Table) -> dict[str, str]:
        """Returns the dicts that are empty in the state dict only, and the saved contents."""
        names = {".".join(map(str, path)) for path in self._names.empty}
        counts: Counter[str] = Counter()
        for parts in (name.split(".") for name in table.names) if names else ():
            above = {".".join(parts[:depth]) for depth in range(1, len(parts))}
            counts.update(above & names)
        filled = {name: f"{count} entries" for name, count in counts.items()}
        filled |= {name: "a tensor" for name in names if _is_tensor(table.get(name))}
        return {
            name: f"empty in the state dict, with {what} in the checkpoint"
            for name, what in filled.items()
        }

    def _take_lengths(self, table: Table) -> None:
        """Replaces ``_extra_state`` tensors of bytes by new ones of the saved length."""
        for name, value in self.state_dict.items():
            if not (isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"):
                continue
            entry = table.get(name)
            is_bytes = type(value) is torch.Tensor and value.dtype is torch.uint8
            if not is_bytes or entry is None or entry.shape is None:
                continue
            if value.dim() == len(entry.shape) == 1 and tuple(value.shape) != entry.shape:
                made = torch.empty(entry.shape, dtype=torch.uint8, device=value.device)
                self.state_dict[name] = made
                self._store(name, made)

    def _take_whole(self, table: Table) -> list[str]:
        """Plans to load dicts and lists as single values if they were saved without flattening.

        Dicts that are empty in the state dict stay empty if an empty dict was saved: another rank
        may have saved a value under that name.

        Returns:
            The names of tensors that these containers replace.
        """
        assert self.metadata is not None
        paths = self.metadata.planner_data
        stored = paths if isinstance(paths, Mapping) else {}
        record = record_behind(self.metadata)
        saved_empty = frozenset(() if record is None else record.structure.empty)
        missing = [self.mappings[name] for name in self.state_dict if name not in table.names]
        self._whole = {}
        left: list[str] = []
        own_empty = frozenset(self._names.empty)
        empty = [path for path in self._names.empty if path not in saved_empty]
        for path in (*missing, *empty):
            for depth in range(1, len(path) + 1):
                whole = ".".join(map(str, path[:depth]))
                if (
                    (entry := table.get(whole)) is not None
                    and entry.shape is None
                    and stored.get(whole, (whole,)) == path[:depth]  # a key may have dots
                    and self.mappings.get(whole, path[:depth]) == path[:depth]
                ):
                    name = ".".join(map(str, path))
                    if path not in own_empty:
                        self._whole.setdefault(whole, []).append(name)
                        if isinstance(self.state_dict.pop(name), torch.Tensor):
                            left.append(name)
                    self.state_dict[whole], self.mappings[whole] = None, path[:depth]
                    break
        return left

    def _leave_unfit(self, table: Table) -> None:
        """Excludes values that can't take the saved tensor from the load; raises if strict.

        Raises:
            ShapeMismatchError: If the planner is strict. It does not check element types here.
        """
        for name, value in [*self.state_dict.items()]:
            entry = table.get(name)
            if entry is None or entry.shape is None:
                continue
            if why := _why_not(value, entry):
                if self._strict:
                    text = (
                        f"{name} is {why}; with strict=False, or leave_misfits=True of a "
                        "Checkpointer, it keeps its value"
                    )
                    raise ShapeMismatchError(text, uri=self._uri, item=name)
            elif not self._strict:
                why = _why_not_held(value, entry.form.dtype)
            if why:
                self.left_alone[name] = why
                del self.state_dict[name]

    def _tied(self, missing: Sequence[str]) -> dict[str, str]:
        """Returns the missing tensors that share memory with a loaded one, and that one's name."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        loaded = {
            memory: name
            for name, value in self.state_dict.items()
            if name in stored and (memory := _memory_of(value)) is not None
        }
        return {
            name: loaded[memory]
            for name in missing
            if (memory := _memory_of(self.state_dict[name])) in loaded
        }

    def _missing(self, names: Sequence[str]) -> MissingKeyError:
        assert self.metadata is not None
        count = "1 key is" if len(names) == 1 else f"{len(names)} keys are"
        return MissingKeyError(
            f"{count} not in the checkpoint, the first: {list(names[:5])}"
            f"{advice(names[0], self.metadata.state_dict_metadata)}",
            uri=self._uri,
            item=names[0],
        )


def _memory_of(value: Any) -> tuple[Any, ...] | None:
    """Returns a key for a plain tensor's memory, equal for tied tensors; else None."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    if type(local) not in PLAIN or not local.numel() or local.is_meta:
        return None
    return local.data_ptr(), local.dtype, local.shape, local.stride(), type(value) is DTensor


def _ready_to_load(value: Any) -> Any:
    """Returns a state dict in which meta tensors have memory, and lists are copies, as in torch.

    Dicts are changed in place. All other values are kept, even if no loaded value replaces them.
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
        UnsupportedTensorError: With the name of the first meta tensor.
    """
    for name, value in flatten_state_dict(state_dict)[0].items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise UnsupportedTensorError(
                f"{name} is a meta tensor in the state dict, without memory to load into: call "
                "model.to_empty(device=...) before you take the model's state dict",
                item=name,
            )


_META = torch.device("meta")


def _is_tensor(entry: Entry | None) -> bool:
    return entry is not None and entry.shape is not None


def _why_not(value: Any, entry: Entry) -> str:
    """Returns why a saved tensor can't be loaded into a value; empty if it can."""
    if not (isinstance(value, _TENSORS) or hasattr(value, "__create_chunk_list__")):
        shape = entry.shape
        return (
            f"a tensor of shape {shape} in the checkpoint, but not in the state dict: put a "
            "tensor there to load it"
        )
    if hasattr(value, "size") and (shape := whole_shape(value)) != entry.shape:
        return f"of shape {entry.shape} in the checkpoint, but {shape} in the state dict"
    return ""


def _why_not_held(value: Any, saved: torch.dtype) -> str:
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, torch.dtype) and not torch.can_cast(saved, dtype):
        return f"{saved} in the checkpoint, which {dtype} can't hold"
    return ""


class EverythingPlanner(CloudLoadPlanner):
    """Loads all items of a checkpoint, without a given state dict.

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
        """Returns the loaded values, nested as they were saved.

        Raises:
            CheckpointCorruptError: If the metadata contradict themselves.
        """
        assert self.metadata is not None
        with paused_gc():
            return structure.nested(self.state_dict, self.metadata.planner_data or {}, self._uri)


class DynamicMetaLoadPlanner(CloudLoadPlanner, TorchDynamicMetaLoadPlanner):
    """Plans loads from sources without metadata, like torch's class, for all values.

    The state dict alone determines what is loaded and how it is sharded.
    """

    def __init__(
        self, flatten_state_dict: bool = True, flatten_sharded_tensors: bool = True
    ) -> None:
        super().__init__("")
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors

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
    """Returns the nesting that flattening has lost of a state dict, as far as it is known.

    A ``CloudSavePlanner`` records it. For torch's planner, its paths are compared with the state
    dict. For other planners, and ones that save another state dict than they were given, this is
    empty.

    Args:
        state_dict: The state dict that is being saved.
        planner: The planner that has planned the save.
        uri: The checkpoint, for messages.

    Raises:
        KeyCollisionError: If two entries of the state dict would have the same name.
    """
    if isinstance(planner, CloudSavePlanner):
        return planner.structure
    if not isinstance(planner, DefaultSavePlanner) or not planner.flatten_state_dict:
        return Structure()
    with paused_gc():
        structure = Structure.of(state_dict, uri)
        if structure and flatten_state_dict(state_dict)[1] != planner.mappings:
            return Structure()
    return structure
