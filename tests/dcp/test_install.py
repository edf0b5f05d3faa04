"""``install()``: stock torch takes our URIs, and everything else stays as it was."""

import contextlib
import importlib
import inspect
import os
import pathlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    _async_process_executor,
    _storage_utils,
    staging,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt.errors import InstallError

from .places import Place
from .stock import FsspecReader, FsspecWriter
from .values import assert_same, numbered

_NAMES = [
    (_storage_utils, "_storage_setup"),
    (state_dict_saver, "_storage_setup"),
    (state_dict_loader, "_storage_setup"),
    (state_dict_saver, "_ThreadBasedAsyncCheckpointExecutor"),
    (state_dict_saver, "_ProcessBasedAsyncCheckpointExecutor"),
    (_async_process_executor._ProcessBasedAsyncCheckpointExecutor, "_execute_save_impl"),
    (FileSystem, "create_stream"),
    (FileSystem, "init_path"),
    (FileSystemReader, "__init__"),
    (FileSystemWriter, "__init__"),
    (FsspecReader, "__init__"),
    (FsspecWriter, "__init__"),
    (staging._ReplicationStager, "__init__"),
    (torch.serialization, "_open_file_like"),
]
_PATIENCE = 150.0  # seconds
_EXPERIMENTS = "torch.distributed.checkpoint._experimental"
with contextlib.suppress(ImportError):  # which install would import
    importlib.import_module(_EXPERIMENTS)


def _current() -> dict:
    """Every function, class and method of torch's checkpoint code."""
    owners = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("torch.distributed.checkpoint", "torch.serialization"))
    ]
    for module in list(owners):
        owners += [value for value in vars(module).values() if inspect.isclass(value)]
    kinds = (types.FunctionType, type, classmethod, staticmethod, property)
    return {
        (owner, name): id(value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, kinds)
    }


def _now(originals: dict) -> dict:
    """The same of what was there then: other tests may have torch import more meanwhile."""
    owners = {owner for owner, _ in originals}
    return {pair: value for pair, value in _current().items() if pair[0] in owners}


@pytest.fixture
def originals() -> dict:
    """What is there while nothing is installed."""
    cloudckpt.install()  # imports what it changes
    cloudckpt.uninstall()
    return _current()


def test_stock_save_and_load_take_an_s3_uri(installed, s3):
    dcp.save({"t": numbered(10), "step": 3}, checkpoint_id=s3.uri)
    loaded = {"t": torch.zeros(10), "step": None}
    dcp.load(loaded, checkpoint_id=s3.uri)
    assert_same(loaded, {"t": numbered(10), "step": 3})
    assert cloudckpt.inspect(s3.uri).has_checksums


def test_a_torch_without_the_experimental_api_takes_an_s3_uri_as_well(s3, monkeypatch):
    for name in [_EXPERIMENTS, *sys.modules]:
        if name.startswith(_EXPERIMENTS):
            monkeypatch.setitem(sys.modules, name, None)
    cloudckpt.install(config=s3.config)
    try:
        dcp.save({"t": numbered(10)}, checkpoint_id=s3.uri)
        loaded = {"t": torch.zeros(10)}
        dcp.load(loaded, checkpoint_id=s3.uri)
    finally:
        cloudckpt.uninstall()
    assert_same(loaded["t"], numbered(10))


def test_stock_async_save_in_a_thread_takes_an_s3_uri(installed, s3):
    dcp.async_save({"t": numbered(10)}, checkpoint_id=s3.uri).result(_PATIENCE)
    loaded = {"t": torch.zeros(10)}
    cloudckpt.load(loaded, checkpoint_id=s3.uri, config=s3.config)
    assert_same(loaded["t"], numbered(10))


def _in_a_process(place: Place) -> None:
    variables = {
        "CLOUDCKPT_S3_ENDPOINT_URL": place.config.s3.endpoint_url,
        "CLOUDCKPT_S3_ADDRESSING_STYLE": "path",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ.update(variables)
    cloudckpt.install()
    try:
        for step in (1, 2):
            state = {"t": numbered(10, first=step), f"rank {dist.get_rank()}": step}
            dcp.async_save(
                state,
                checkpoint_id=place.uri,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result(_PATIENCE)
            loaded = {"t": torch.zeros(10), f"rank {dist.get_rank()}": None}
            dcp.load(loaded, checkpoint_id=place.uri)
            assert_same(loaded, state)
    finally:
        cloudckpt.uninstall()
        for name in variables:
            del os.environ[name]
        _async_process_executor._CHECKPOINT_PROCESS = None  # which ends it


def test_stock_async_save_in_a_process_takes_an_s3_uri(s3, ranks):
    ranks(1, _in_a_process, s3)


@pytest.mark.parametrize("as_path", [str, pathlib.Path])
def test_local_paths_still_go_to_torch(as_path, installed, local):
    dcp.save({"t": numbered(10)}, checkpoint_id=as_path(local.path))
    assert local.names() == [".metadata", "__0_0.distcp"]
    loaded = {"t": torch.zeros(10)}
    dcp.load(loaded, checkpoint_id=as_path(local.path))
    assert_same(loaded["t"], numbered(10))


def test_other_schemes_still_go_to_torch(installed, local):
    dcp.save({"t": numbered(10)}, checkpoint_id=local.uri)
    assert local.names() == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize(
    "location",
    [
        "gs://bucket/run",
        "az://container/run",
        "abfss://container@account.dfs.core.windows.net/run",
        "https://account.blob.core.windows.net/container/run",
    ],
)
def test_locations_of_the_other_clouds_are_ours_too(location, installed):
    assert type(state_dict_saver._storage_setup(None, location)) is cloudckpt.CloudStorageWriter


@pytest.mark.parametrize("location", ["https://example.com/run", "hdfs://namenode/run"])
def test_a_location_that_is_no_store_of_ours_still_goes_to_torch(location, installed):
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FsspecWriter, "validate_checkpoint_id", lambda uri: asked.append(uri))
        with pytest.raises(RuntimeError, match="Cannot detect"):
            state_dict_saver._storage_setup(None, location)
    assert asked == [location]


def test_a_writer_that_is_named_is_used_whatever_the_uri(installed, local, s3):
    writer = local.writer()
    dcp.save({"t": numbered(10)}, storage_writer=writer, checkpoint_id=s3.uri.replace("run", "x"))
    assert writer.checkpoint_id.startswith("s3://")
    stock = FileSystemWriter(local.path)
    dcp.save({"t": numbered(10)}, storage_writer=stock)
    assert local.names() == [".metadata", "__0_0.distcp"]


def test_without_install_stock_torch_does_not_use_us(s3):
    try:
        found = state_dict_saver._storage_setup(None, s3.uri)
    except ImportError as error:
        found = error  # torch has turned to fsspec, which wants s3fs
    assert not isinstance(found, cloudckpt.CloudStorageWriter)


def test_installing_twice_is_installing_once(originals):
    cloudckpt.install()
    try:
        once = _current()
        cloudckpt.install()
        assert _current() == once
        where = [(owner, name) for owner, name in _NAMES if name != "_execute_save_impl"]
        assert all(once[pair] != originals[pair] for pair in where)
    finally:
        cloudckpt.uninstall()
    assert _now(originals) == originals


def test_uninstalling_restores_torch_and_may_be_repeated(originals):
    for _ in range(2):
        cloudckpt.install()
        cloudckpt.uninstall()
        cloudckpt.uninstall()
        assert _now(originals) == originals


@pytest.mark.parametrize(("module", "name"), _NAMES, ids=lambda x: getattr(x, "__name__", x))
def test_a_torch_without_a_private_name_is_refused_and_left_alone(
    module, name, originals, monkeypatch
):
    monkeypatch.delattr(module, name)
    with pytest.raises(InstallError, match=name):
        cloudckpt.install()
    now = _now(originals)
    assert now.get((module, name)) is None
    assert {**now, (module, name): originals[module, name]} == originals


def test_a_torch_with_another_signature_is_refused_and_left_alone(monkeypatch):
    def changed(storage, checkpoint_id, *, reader=False, more=None):
        raise AssertionError("not called")

    monkeypatch.setattr(_storage_utils, "_storage_setup", changed)
    before = _current()
    with pytest.raises(InstallError, match="newer"):
        cloudckpt.install()
    assert _current() == before


def test_a_torch_whose_writer_takes_another_path_is_refused_and_left_alone(monkeypatch):
    monkeypatch.setattr(FileSystemWriter, "__init__", lambda self, where, path: None)
    before = _current()
    with pytest.raises(InstallError, match="newer"):
        cloudckpt.install()
    assert _current() == before


def test_a_torch_that_opens_something_else_is_refused_and_left_alone(monkeypatch):
    monkeypatch.setattr(torch.serialization, "_open_file_like", lambda buffer, mode: None)
    before = _current()
    with pytest.raises(InstallError, match=r"torch\.load"):
        cloudckpt.install()
    assert _current() == before


def test_after_a_refusal_installing_works_once_the_name_is_back(originals):
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(state_dict_saver, "_storage_setup")
        with pytest.raises(InstallError):
            cloudckpt.install()
    cloudckpt.install()
    cloudckpt.uninstall()
    assert _now(originals) == originals
