"""Plans what a rank reads: which items of the checkpoint, and which parts of saved chunks.

torch's planner makes objects of all chunks of all ranks and sorts them, for each tensor. Here they
are columns of numbers, and the overlaps of a tensor's chunks are computed at once.
"""

from __future__ import annotations

import functools
import io
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.columns import column_of
from cloudckpt.checkpoint.from_torch import NotInColumnsError, table_of_metadata
from cloudckpt.checkpoint.lazy import record_behind, table_behind
from cloudckpt.checkpoint.shard import check_placements, check_shards, travels_as_bytes
from cloudckpt.checkpoint.structure import Flat, Structure, check_nesting
from cloudckpt.checkpoint.table import Entry, Table
from cloudckpt.checkpoint.torch_private import (
    create_chunk_list,
    flatten_sharded_tensors,
    init_state_dict,
    whole_shape,
)
from cloudckpt.dcp.missing import advice
from cloudckpt.dcp.shared_memory import in_memory
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    MissingKeyError,
    ShapeMismatchError,
    UnsupportedTensorError,
)
from cloudckpt.gc_pause import paused_gc
from cloudckpt.transfer.memory import PLAIN, sharing_memory

__all__ = [
    "CloudLoadPlanner",
    "EverythingPlanner",
    "check_types",
    "conversions",
    "parts_of",
    "saved_type",
    "table_of",
]

logger = logging.getLogger("cloudckpt")

_META = torch.device("meta")
_FEW = 16
"""Up to this many chunks, comparing one by one is faster than all at once."""
_NOTHING = torch.Size([0])
_REPLACED = "a value that takes the tensor's place"


class CloudLoadPlanner(DefaultLoadPlanner):
    """Plans loads like torch's planner, but keeps keys of other types than strings.

    It also reports the names that are missing, or whose values do not fit.

    torch stores loaded values under the strings in its paths: next to an integer key, a string key
    appears with the new value, and the integer key keeps the old one. torch's planner also reports
    an empty dict in a list as missing. This planner always flattens the state dict; a container
    that was saved as one value is loaded as one.

    Args:
        uri: The checkpoint, for messages.
        strict: Whether entries must fit those of the checkpoint; otherwise those that fit are
            loaded, and the others keep their values.
        partial: Whether the checkpoint may lack entries, which then keep their values; None: it may
            if ``strict`` is False.
        logs: Whether to log conversions, replaced tensors, and the report of the load.

    Attributes:
        map_location: Device of tensors that are nested in other values; None: the device that they
            were saved from.
        left_alone: The names that keep their values although the checkpoint has an entry, and why.
        converted: The names that are not loaded exactly as they were saved, and how; see
            :class:`~cloudckpt.dcp.report.LoadReport`.
        unused: The names of values that were read, but are not stored in the state dict.
    """

    map_location: str | torch.device | None = None

    def __init__(
        self, uri: str, *, strict: bool = True, partial: bool | None = None, logs: bool = True
    ) -> None:
        super().__init__(allow_partial_load=not strict if partial is None else partial)
        self._uri = uri
        self._strict = strict
        self.logs = logs
        # maps a loaded value's name to the missing keys that it stands for
        self._whole: dict[str, list[str]] = {}
        self.left_alone: dict[str, str] = {}
        self.converted: dict[str, str] = {}
        self.unused: set[str] = set()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flattens the state dict as torch's planner does.

        Raises:
            UnsupportedTensorError: If a tensor is on the meta device and torch.distributed is not
                initialized: torch gives it memory on the device of the default group.
            KeyCollisionError: If two entries of the state dict would have the same name.
            UnsupportedValueError: If a container contains itself, or is nested too deeply.
        """
        check_nesting(state_dict)
        # torch gives meta tensors memory on the device of the default group
        allocates = dist.is_available() and dist.is_initialized()
        # torch's own function also replaces each value that is neither number nor string by None
        self.original_state_dict = _ready_to_load(state_dict, (), allocates)
        self.metadata, self.is_coordinator = metadata, is_coordinator
        # as a save does; torch's load copies all containers first, and loses empty ones
        with paused_gc():
            self._flat = Flat(self.original_state_dict, self._uri)
        self.state_dict = flatten_sharded_tensors(self._flat.values)
        self.mappings = self._flat.paths

    def create_local_plan(self) -> LoadPlan:
        """Plans this rank's reads as torch's planner does.

        Raises:
            MissingKeyError: If the checkpoint lacks keys of the state dict, unless ``partial``.
            ShapeMismatchError: If ``strict``, and a tensor's shape differs from the checkpoint's,
                or a key is a tensor in the checkpoint, but not in the state dict.
            UnsupportedTensorError: If ``strict``, and a tensor's element type is of a lesser kind
                than the saved type (see :func:`check_types`); or if a tensor has a partial
                placement or declares invalid shards.
            CheckpointError: If the metadata has classes or values that torch's does not have.
            CheckpointCorruptError: If the metadata lacks a part of a tensor.
        """
        assert self.metadata is not None
        table = table_of(self.metadata, self._uri)
        for name, value in self.state_dict.items():
            check_shards(value, name)
        self._take_lengths(table)
        self.left_alone, self.converted, self._whole = self._empty(table), {}, {}
        self.unused = set()
        self._take_whole(table)
        self._take_tied(table)
        missing = [
            name
            for name in self.state_dict
            if name not in table.names and name not in self.converted
        ]
        if missing and not self.allow_partial_load:
            raise self._missing(missing)
        given = {**self.state_dict}
        for name, value in given.items():
            entry = table.get(name)
            if entry is not None and entry.shape is not None:
                self._leave_unfit(name, value, entry)
            elif entry is not None and isinstance(value, torch.Tensor):
                self.converted[name] = _REPLACED
        if given.keys() != self.state_dict.keys():
            self._find_overwritten(given, {*missing, *self.left_alone})
        with paused_gc():
            plan, moved = plan_reads(self.state_dict, table, self._uri)
        types = conversions(self.state_dict, functools.partial(saved_type, table))
        logs = self.logs and self.is_coordinator
        check_types(types, self._uri, logs=logs)
        replaced = [name for name, how in self.converted.items() if how == _REPLACED]
        self.converted.update(dict.fromkeys(moved, "saved in other parts"))
        self.converted.update((name, f"{saved} to {now}") for name, (saved, now) in types.items())
        if replaced and logs:
            logger.warning(
                "%s: for %d of the tensors in the state dict, such as %s, the checkpoint has "
                "values that are no tensors. They replace the tensors in the dict; the tensors "
                "themselves are not changed, so pass the loaded state dict to load_state_dict",
                self._uri, len(replaced), replaced[0],
            )  # fmt: skip
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.put(read_item, torch.load(value, map_location=self.map_location, weights_only=False))

    def put(self, read_item: ReadItem, value: Any) -> None:
        """Stores a loaded value in the state dict.

        A value that was read in place of the entries of a dict or list is stored only if it is a
        container itself; otherwise these entries are missing.

        Raises:
            MissingKeyError: If entries are missing, and ``partial`` is False.
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
        *outer, last = self._flat.true(self.mappings[name])
        container: Any = self.original_state_dict
        for key in outer:
            container = container[key]
        self.state_dict[name] = container[last] = value

    def _empty(self, table: Table) -> dict[str, str]:
        """Returns the names of empty dicts that are not loaded, each with the reason.

        It is that in the checkpoint the dict has entries, or a tensor has this name.
        """
        names = {".".join(map(str, path)) for path in self._flat.empty}
        counts: Counter[str] = Counter()
        for parts in (name.split(".") for name in table.names) if names else ():
            above = {".".join(parts[:depth]) for depth in range(1, len(parts))}
            counts.update(above & names)
        filled = {name: f"{count} entries" for name, count in counts.items()}
        filled |= {name: "a tensor" for name in names if saved_type(table, name) is not None}
        return {
            name: f"empty in the state dict, with {content} in the checkpoint"
            for name, content in filled.items()
        }

    def _take_lengths(self, table: Table) -> None:
        """Replaces ``_extra_state`` tensors of bytes by new ones if the saved length differs."""
        for name, value in self.state_dict.items():
            entry = table.get(name) if name.rpartition(".")[2] == "_extra_state" else None
            is_bytes = type(value) is torch.Tensor and value.dtype is torch.uint8
            if entry is None or entry.shape is None or not is_bytes:
                continue
            if value.dim() == len(entry.shape) == 1 and tuple(value.shape) != entry.shape:
                self._store(name, torch.empty(entry.shape, dtype=torch.uint8, device=value.device))

    def _take_whole(self, table: Table) -> None:
        """Plans to load dicts and lists as single values if they were saved without flattening.

        An empty dict of the state dict is left out if some rank saved an empty dict under its name.
        """
        assert self.metadata is not None
        paths = self.metadata.planner_data
        stored = paths if isinstance(paths, Mapping) else {}
        record = record_behind(self.metadata)
        saved_empty = frozenset(() if record is None else record.structure.empty)
        missing = [self.mappings[name] for name in self.state_dict if name not in table.names]
        own_empty = frozenset(self._flat.empty)
        empty = [path for path in self._flat.empty if path not in saved_empty]
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
                            self.converted[name] = _REPLACED
                    self.state_dict[whole], self.mappings[whole] = None, path[:depth]
                    break

    def _leave_unfit(self, name: str, value: Any, entry: Entry) -> None:
        """Leaves a value out of the load if it can't take the saved tensor.

        Raises:
            ShapeMismatchError: If the planner is strict, and the value is not a tensor or has
                another shape; a strict planner checks element types later.
        """
        why = _why_not(value, entry)
        if why and self._strict:
            text = (
                f"{name} is {why}; to leave its value unchanged, pass strict=False, or "
                "leave_misfits=True to the load() of a Checkpointer"
            )
            raise ShapeMismatchError(text, uri=self._uri, item=name)
        dtype = getattr(value, "dtype", None)
        if not (why or self._strict) and isinstance(dtype, torch.dtype):
            saved = entry.form.dtype
            if not torch.can_cast(saved, dtype):
                why = f"{saved} in the checkpoint, which {dtype} can't hold"
        if why:
            self.left_alone[name] = why
            del self.state_dict[name]

    def _take_tied(self, table: Table) -> None:
        """Adds missing tensors that share the memory of a loaded tensor to :attr:`converted`."""
        missing = [name for name in self.state_dict if name not in table.names]
        if not missing:
            return
        loaded = {
            memory: name
            for name, value in self.state_dict.items()
            if name in table.names and (memory := _memory_of(value)) is not None
        }
        for name in missing:
            if (memory := _memory_of(self.state_dict[name])) in loaded:
                self.converted[name] = f"loaded with {loaded[memory]}, as they are tied"

    def _find_overwritten(self, given: Mapping[str, Any], kept: set[str]) -> None:
        """Adds a remark to tensors in :attr:`left_alone` that share memory with loaded tensors.

        Args:
            given: The state dict, by flat names.
            kept: The names that are not loaded.
        """
        replaced = {name for name, how in self.converted.items() if how == _REPLACED}
        tensors = [(name, parts_of(one)) for name, one in given.items() if name not in replaced]
        sharing = [tensors[number] for number in sharing_memory(tensors)]
        loaded = [one for one in sharing if one[0] not in kept]
        for mine in (one for one in sharing if one[0] in self.left_alone):
            others = (name for name, parts in loaded if sharing_memory([mine, (name, parts)]))
            if (other := next(others, None)) is not None:
                self.left_alone[mine[0]] += f"; it may have changed with {other}: they share memory"

    def _missing(self, names: Sequence[str]) -> MissingKeyError:
        assert self.metadata is not None
        count = "1 key is" if len(names) == 1 else f"{len(names)} keys are"
        first = ", the first" if len(names) > 5 else ""
        return MissingKeyError(
            f"{count} not in the checkpoint{first}: {list(names[:5])}"
            f"{advice(names[0], self.metadata.state_dict_metadata)}",
            uri=self._uri,
            item=names[0],
        )


class EverythingPlanner(CloudLoadPlanner):
    """Loads all items of a checkpoint, without a given state dict.

    Args:
        uri: The checkpoint, for messages.
        device: Device of the tensors; default: the host.
    """

    def __init__(self, uri: str, device: str | torch.device | None = None) -> None:
        super().__init__(uri)
        self.map_location = device if device is not None else "cpu"  # regardless of torch's default

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

        Args:
            structure: The original keys and the empty dicts of the saved state dict.

        Raises:
            CheckpointCorruptError: If the stored paths contradict each other.
        """
        assert self.metadata is not None
        with paused_gc():
            return structure.nested(self.state_dict, self.metadata.planner_data or {}, self._uri)


def parts_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that hold the elements of a tensor or DTensor; none for other values."""
    return in_memory(value) if type(value) in PLAIN or travels_as_bytes(value) else []


def _memory_of(value: Any) -> tuple[Any, ...] | None:
    """Returns a key that only tied tensors have in common; None for a value without memory."""
    memory = [(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in parts_of(value)]
    return (type(value) is DTensor, *memory) if memory else None


def _ready_to_load(value: Any, path: tuple[Any, ...], allocates: bool) -> Any:
    """Returns the state dict with memory for its meta tensors, and with copies of its lists.

    torch's loader does the same. Dicts are changed in place.

    Args:
        value: The state dict, or a value in it.
        path: The keys that lead to it.
        allocates: Whether to have torch allocate the memory of meta tensors.

    Raises:
        UnsupportedTensorError: If there is a meta tensor, and ``allocates`` is False.
    """
    if isinstance(value, dict):
        for key, entry in value.items():
            if isinstance(entry, (dict, list, torch.Tensor)):
                value[key] = _ready_to_load(entry, (*path, key), allocates)
    elif type(value) is list:
        return [_ready_to_load(entry, (*path, at), allocates) for at, entry in enumerate(value)]
    elif isinstance(value, torch.Tensor) and getattr(value, "device", None) == _META:
        name = ".".join(map(str, path))
        if not allocates:
            raise UnsupportedTensorError(
                f"{name} is a meta tensor in the state dict, without memory to load into: call "
                "model.to_empty(device=...) before you take the model's state dict",
                item=name,
            )
        init_state_dict(alone := {"tensor": value})
        return alone["tensor"]
    return value


def _why_not(value: Any, entry: Entry) -> str:
    """Returns why a saved tensor can't be loaded into a value; empty if it can.

    Element types are not compared.
    """
    if not (isinstance(value, torch.Tensor) or hasattr(value, "__create_chunk_list__")):
        return (
            f"a tensor of shape {entry.shape} in the checkpoint, but not in the state dict: put a "
            "tensor there to load it"
        )
    if hasattr(value, "size") and (shape := whole_shape(value)) != entry.shape:
        return f"of shape {entry.shape} in the checkpoint, but {shape} in the state dict"
    return ""


def table_of(metadata: Metadata, uri: str) -> Table:
    """Returns the table of a checkpoint's metadata; makes one if another package wrote it.

    Raises:
        CheckpointError: If the metadata has classes or values that torch's does not have.
    """
    if (table := table_behind(metadata)) is not None:
        return table
    try:
        # all other fields belong to its planner
        return table_of_metadata(Metadata(metadata.state_dict_metadata))
    except NotInColumnsError as exc:
        raise CheckpointError(
            "the metadata is damaged, or has classes or values that torch's metadata lacks: load "
            "it with the package that saved it, and save it again; or load an older checkpoint",
            uri=uri,
            cause=exc,
        ) from exc


def plan_reads(state_dict: Mapping[str, Any], table: Table, uri: str) -> tuple[LoadPlan, set[str]]:
    """Plans reads as torch's ``create_default_local_load_plan`` does, for names in the checkpoint.

    Args:
        state_dict: The state dict to load, by flat names; tensors have the checkpoint's shapes.
        table: The table of the checkpoint.
        uri: The checkpoint, for messages.

    Returns:
        The plan, and the names of tensors that were saved with other chunks.

    Raises:
        ValueError: If a name is a tensor in the checkpoint, but not in the state dict.
        UnsupportedTensorError: If a tensor has a partial placement.
        CheckpointCorruptError: If the metadata lacks a part of a tensor; torch would load the other
            parts without an error.
    """
    items: list[ReadItem] = []
    moved: set[str] = set()
    for name, value in state_dict.items():
        entry = table.get(name)
        if entry is None:
            continue
        if isinstance(value, DTensor):
            check_placements(value, name)
            if value.device_mesh.get_coordinate() is None:
                continue  # this rank has no part of it
        if entry.shape is None:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, _NOTHING, index, _NOTHING, _NOTHING))
            continue
        chunks = table.chunks.get(entry.form.dims)
        rows = slice(entry.place, entry.place + entry.count)
        for number, own in enumerate(create_chunk_list(value)):
            reads, is_as_saved = (
                ([], True)
                if chunks is None
                else _reads(name, number, own, chunks.offsets[rows], chunks.sizes[rows])
            )
            items += reads
            if not is_as_saved:
                moved.add(name)
            described, wanted = sum(read.lengths.numel() for read in reads), own.sizes.numel()
            if described < wanted:
                raise CheckpointCorruptError(
                    f"the metadata describes only {described} of the {wanted} elements of {name} "
                    "on this rank: it is damaged, or a part was not saved; load an older "
                    "checkpoint",
                    uri=uri,
                    item=name,
                )
    return LoadPlan(items), moved


def conversions(
    state_dict: Mapping[str, Any], dtype_of: Callable[[str], torch.dtype | None]
) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Returns, by name, the saved and the wanted element type of each tensor, if these differ.

    Args:
        state_dict: The state dict to load, by flat names.
        dtype_of: Returns the saved type of a name, see :func:`saved_type`.
    """
    converted: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for name, value in state_dict.items():
        wanted = getattr(value, "dtype", None)
        saved = dtype_of(name)
        if saved is not None and saved != wanted and isinstance(wanted, torch.dtype):
            converted[name] = saved, wanted
    return converted


def check_types(
    converted: Mapping[str, tuple[torch.dtype, torch.dtype]], uri: str, *, logs: bool
) -> None:
    """Refuses to load into a lesser kind of element type; logs how many others are converted.

    Args:
        converted: See :func:`conversions`.
        uri: The checkpoint.
        logs: Whether this rank logs conversions.

    Raises:
        UnsupportedTensorError: If a type is of a lesser kind than the saved one: bool for a number,
            integer for floating point, real for complex. A narrower type of the same kind is
            accepted, and integers that it can't hold wrap, as in torch.
    """
    for name, (saved, wanted) in converted.items():
        if not torch.can_cast(saved, wanted):
            raise UnsupportedTensorError(
                f"{name} is {saved} in the checkpoint, but {wanted} in the state dict, which "
                f"can't hold its values: load into a tensor of {saved}, and convert it "
                "afterwards",
                uri=uri,
                item=name,
            )
    if converted and logs:
        name, (saved, wanted) = next(iter(converted.items()))
        logger.warning(
            "%s: %s converted by this load, the first: %s, from %s to %s. To keep the saved type, "
            "load into tensors of this type, for example after model.to(%s)",
            uri,
            "1 tensor is" if len(converted) == 1 else f"{len(converted)} tensors are",
            name,
            saved,
            wanted,
            saved,
        )


def saved_type(table: Table, name: str) -> torch.dtype | None:
    """Returns the saved type of a tensor; None for other values, and for unknown names."""
    entry = table.get(name)
    return None if entry is None or entry.shape is None else entry.form.dtype


def _reads(
    name: str,
    number: int,
    own: ChunkStorageMetadata,
    offsets: torch.Tensor,
    sizes: torch.Tensor,
) -> tuple[list[ReadItem], bool]:
    """Plans the reads of a tensor for one of this rank's chunks of it.

    Args:
        name: The name of the tensor.
        number: The number of this rank's chunk among its chunks of the tensor.
        own: That chunk.
        offsets: The first element of each saved chunk in the tensor, a row per chunk.
        sizes: The size of each saved chunk, a row per chunk.

    Returns:
        The reads; and True if there are none, or one that reads a whole saved chunk.
    """
    is_as_saved = True
    rows: Sequence[int] = range(len(offsets))
    if len(rows) > _FEW:
        begin = column_of(own.offsets)
        end = begin + column_of(own.sizes)
        overlap = (torch.minimum(offsets + sizes, end) > torch.maximum(offsets, begin)).all(1)
        overlapping = overlap.nonzero().flatten()
        rows, offsets, sizes = overlapping.tolist(), offsets[overlapping], sizes[overlapping]
    size = torch.Size
    made: list[ReadItem] = []
    for row, first, shape in zip(rows, offsets.tolist(), sizes.tolist(), strict=True):
        starts = [max(*pair) for pair in zip(first, own.offsets, strict=True)]
        lengths = [
            min(a + n, b + m) - start
            for a, n, b, m, start in zip(first, shape, own.offsets, own.sizes, starts, strict=True)
        ]
        if lengths and min(lengths) <= 0:
            continue
        is_as_saved = not made and lengths == shape
        made.append(
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(name, own.offsets, number),
                size(start - at for start, at in zip(starts, own.offsets, strict=True)),
                MetadataIndex(name, size(first), row),
                size(start - at for start, at in zip(starts, first, strict=True)),
                size(lengths),
            )
        )
    return made, is_as_saved
