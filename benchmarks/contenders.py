"""The ways to save and load that are compared, each behind the same two calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any, Protocol

import torch

from benchmarks.clients import Boto3InThreads, Obstore
from benchmarks.models import FilesByBoto3, OurModel, RunaiStreamer
from benchmarks.ours import CloudCkpt
from benchmarks.places import REGION, Place
from benchmarks.stock import Local, StockDcp


class Contender(Protocol):
    """Something that saves and loads a state dict under a name."""

    def save(self, state_dict: dict[str, Any], name: str) -> None:
        """Saves; returns when the checkpoint is complete."""

    def load(self, state_dict: dict[str, Any], name: str) -> None:
        """Loads into the tensors of `state_dict`."""


@dataclass(frozen=True)
class Entry:
    """A contender's row in the list: what it is called and what it needs."""

    title: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    build: Callable[[Place], Contender]
    by_default: bool = True
    """Whether it takes part unless it is named."""
    only_async: bool = False
    """Whether it differs from another only in how it saves in the background."""
    is_model: bool = False
    """Whether it writes models in safetensors files, which only `safetensors` measures."""

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


def _reference(place: Place) -> Contender:
    from benchmarks.reference import Reference

    return Reference(place)


CONTENDERS: Mapping[str, Entry] = {
    "reference": Entry("reference", ("awscrt",), ("awscrt",), _reference),
    "cloudckpt": Entry("cloudckpt", ("cloudckpt",), ("cloudckpt", "urllib3"), CloudCkpt),
    "cloudckpt-process": Entry(
        "cloudckpt, saving process",
        ("cloudckpt",),
        ("cloudckpt", "urllib3"),
        lambda place: CloudCkpt(place, process=True),
        only_async=True,
    ),
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
    "boto3-threads": Entry(
        "boto3 put_object, get_object in threads", ("boto3",), ("boto3",), Boto3InThreads
    ),
    "obstore": Entry("obstore put, get in threads", ("obstore",), ("obstore",), Obstore),
    "cloudckpt-safetensors": Entry(
        "cloudckpt.hf",
        ("cloudckpt",),
        ("cloudckpt",),
        OurModel,
        is_model=True,
    ),
    "safetensors-boto3": Entry(
        "safetensors and boto3",
        ("safetensors", "boto3"),
        ("safetensors", "boto3"),
        FilesByBoto3,
        is_model=True,
    ),
    "runai-streamer": Entry(
        "runai-model-streamer, loads only",
        ("runai_model_streamer", "runai_model_streamer_s3"),
        ("runai-model-streamer", "runai-model-streamer-s3"),
        RunaiStreamer,
        is_model=True,
    ),
    "filesystem": Entry("torch FileSystemWriter to tmpfs", (), ("torch",), Local),
}
"""Every contender by its short name, the reference first. Peers run with their own defaults."""


def limit_threads() -> None:
    """Keeps torch's own thread pool out of the CPU numbers."""
    torch.set_num_threads(1)
