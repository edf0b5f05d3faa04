"""The ways to save and load that are compared, each behind the same two calls."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

CONNECTIONS = 8
REGION = "us-east-1"


class Contender(Protocol):
    """Something that saves and loads a state dict under a name."""

    def save(self, state_dict: dict[str, Any], name: str) -> None:
        """Saves; returns when the checkpoint is complete."""

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Loads into the tensors of `state_dict`."""


@dataclass(frozen=True)
class Place:
    """Where checkpoints go: a server and one of its buckets."""

    port: int
    bucket: str
    connections: int = CONNECTIONS

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def uri(self, name: str) -> str:
        """The S3 URI of the checkpoint called `name`."""
        return f"s3://{self.bucket}/{name}"


@dataclass(frozen=True)
class Entry:
    """A contender's row in the list: what it is called and what it needs."""

    title: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    build: Callable[[Place], Contender]
    by_default: bool = True
    """Whether it takes part unless it is named."""

    @property
    def installed(self) -> bool:
        """Whether everything it imports is there."""
        try:
            return all(util.find_spec(module) is not None for module in self.modules)
        except ModuleNotFoundError:  # The parent package of a dotted name is missing.
            return False

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the distributions it stands on, where known."""
        found: dict[str, str] = {}
        for name in self.distributions:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "source tree"
        return found


def child_environment(port: int) -> dict[str, str]:
    """The environment of a measuring child: credentials that open nothing, and the endpoint."""
    return {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


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


class _CloudCkpt(StockDcp):
    """Ours: stock `dcp.save` and `dcp.load` over our classes, and our own `async_save`."""

    def __init__(self, place: Place) -> None:
        self._ours = importlib.import_module("cloudckpt")
        config = self._ours.Config(
            connections=place.connections,
            s3=self._ours.S3Options(endpoint_url=place.endpoint, addressing_style="path"),
        )
        self._config = config
        super().__init__(
            lambda uri: self._ours.CloudStorageWriter(uri, config=config),
            lambda uri: self._ours.CloudStorageReader(uri, config=config),
            place,
        )

    def async_save(self, state_dict: dict[str, Any], name: str) -> Any:
        """Starts a save with `cloudckpt.async_save`."""
        uri = self._place.uri(name)
        return self._ours.async_save(state_dict, checkpoint_id=uri, config=self._config)


def _s3torchconnector(place: Place, threads: int = 1) -> Contender:
    peer = importlib.import_module("s3torchconnector.dcp")
    options = importlib.import_module("s3torchconnector").S3ClientConfig(force_path_style=True)
    return StockDcp(
        lambda uri: peer.S3StorageWriter(
            REGION, uri, s3client_config=options, thread_count=threads
        ),
        lambda uri: peer.S3StorageReader(REGION, uri, s3client_config=options),
        place,
    )


def _fsspec(place: Place) -> Contender:
    torch_fsspec = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
    options = {"client_kwargs": {"endpoint_url": place.endpoint}}
    return StockDcp(
        lambda uri: torch_fsspec.FsspecWriter(uri, **options),
        lambda uri: torch_fsspec.FsspecReader(uri, **options),
        place,
    )


def _floor(place: Place) -> Contender:
    from benchmarks.floor import Floor

    return Floor(place.port, place.bucket, place.connections)


class _Local:
    """Torch's own writer and reader on a folder in memory: no network at all."""

    def __init__(self, place: Place) -> None:
        self._root = local_root(place.port) / place.bucket

    def save(self, state_dict: dict[str, Any], name: str) -> None:
        """Saves with `FileSystemWriter`'s defaults."""
        save(state_dict, storage_writer=FileSystemWriter(self._root / name))

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Loads with `FileSystemReader`."""
        load(state_dict, storage_reader=FileSystemReader(self._root / name))


def local_root(port: int) -> Path:
    """The folder for local checkpoints of the run whose server listens at `port`."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))
    return base / f"cloudckpt-bench-{port}"


def remove_local(port: int) -> None:
    """Deletes what local contenders wrote in this run."""
    shutil.rmtree(local_root(port), ignore_errors=True)


class _PlanOnly(StorageWriter):
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


def _no_reader(uri: str) -> Any:
    raise NotImplementedError("the plan-only yardstick saves nothing that could be loaded")


CONTENDERS: Mapping[str, Entry] = {
    "floor": Entry("floor (plain sockets)", ("awscrt",), ("awscrt",), _floor),
    "cloudckpt": Entry("cloudckpt", ("cloudckpt",), ("cloudckpt", "urllib3"), _CloudCkpt),
    "s3torchconnector": Entry(
        "s3torchconnector",
        ("s3torchconnector", "tenacity"),
        ("s3torchconnector",),
        _s3torchconnector,
    ),
    "s3torchconnector-8": Entry(
        "s3torchconnector, 8 threads",
        ("s3torchconnector", "tenacity"),
        ("s3torchconnector",),
        lambda place: _s3torchconnector(place, threads=8),
        by_default=False,
    ),
    "fsspec": Entry(
        "torch FsspecWriter + s3fs", ("s3fs",), ("s3fs", "fsspec", "aiobotocore"), _fsspec
    ),
    "filesystem": Entry("torch FileSystemWriter to tmpfs", (), ("torch",), _Local),
    "plan-only": Entry(
        "DCP planning alone",
        (),
        ("torch",),
        lambda place: StockDcp(lambda uri: _PlanOnly(), _no_reader, place),
        by_default=False,
    ),
}
"""Every contender by its short name, the floor first. Peers run with their own defaults."""


def limit_threads() -> None:
    """Keeps torch's own thread pool out of the CPU numbers."""
    torch.set_num_threads(1)
