"""Stock DCP over a pair of storage classes, over local files, and over nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from benchmarks.places import Place, local_root


class StockDcp:
    """A pair of DCP storage classes under stock `dcp.save`, `dcp.load` and `dcp.async_save`."""

    def __init__(
        self, writer: Callable[[str], Any], reader: Callable[[str], Any], place: Place
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._place = place

    def save(self, state_dict: dict[str, Any], name: str) -> None:
        """Saves through `torch.distributed.checkpoint.save`."""
        save(state_dict, storage_writer=self._writer(self._place.uri(name)))

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Loads through `torch.distributed.checkpoint.load`."""
        load(state_dict, storage_reader=self._reader(self._place.uri(name)))

    def async_save(self, state_dict: dict[str, Any], name: str) -> Any:
        """Starts a save in the background and returns what torch returns for it."""
        return async_save(state_dict, storage_writer=self._writer(self._place.uri(name)))


class Local:
    """Torch's own writer and reader on a folder in memory: no network at all."""

    def __init__(self, place: Place) -> None:
        self._root = local_root(place.port) / place.bucket

    def save(self, state_dict: dict[str, Any], name: str) -> None:
        """Saves with `FileSystemWriter`'s defaults."""
        save(state_dict, storage_writer=FileSystemWriter(self._root / name))

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Loads with `FileSystemReader`."""
        load(state_dict, storage_reader=FileSystemReader(self._root / name))


class PlanOnly(StorageWriter):
    """Writes nothing: what is left is DCP's own planning."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Takes the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Takes the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Claims at once to be done."""
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits nothing."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any name will do."""
        return True


def no_reader(uri: str) -> Any:
    """Refuses to load."""
    raise NotImplementedError("the plan-only yardstick saves nothing that could be loaded")
