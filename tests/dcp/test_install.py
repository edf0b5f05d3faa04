"""``install()``: stock torch takes our URIs, and everything else stays as it was."""

import pathlib
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    _storage_utils,
    filesystem,
    state_dict_loader,
    state_dict_saver,
)

import cloudckpt
from cloudckpt.errors import InstallError
from support.identities import identities

from .stock import FsspecReader, FsspecWriter
from .values import assert_same, numbered

_CHOOSING = [_storage_utils, state_dict_saver, state_dict_loader]
_CLASSES = [FileSystemReader, FileSystemWriter, FsspecReader, FsspecWriter]
_REPLACED = {
    *((module.__name__, "_storage_setup") for module in _CHOOSING),
    *((f"{kind.__module__}.{kind.__name__}", "__init__") for kind in _CLASSES),
}
"""One function, in the three modules that have its name, and four constructors."""


@pytest.fixture
def before() -> dict:
    """Torch as it is while nothing is installed."""
    cloudckpt.install()  # imports what it changes
    cloudckpt.uninstall()
    return identities("torch")


def _changed(before: dict) -> set:
    now = identities("torch")
    return {pair for pair, value in before.items() if now.get(pair) is not value}


def test_five_functions_of_torch_are_replaced_once_and_given_back(before):
    for _ in range(2):
        cloudckpt.install()
        once = identities("torch")
        cloudckpt.install()
        assert _changed(before) == _REPLACED
        assert not _changed(once)
        cloudckpt.uninstall()
        cloudckpt.uninstall()
        assert not _changed(before)


@pytest.mark.parametrize("as_path", [str, pathlib.Path])
def test_local_paths_still_go_to_torch(as_path, installed, local):
    dcp.save({"t": numbered(10)}, checkpoint_id=as_path(local.path))
    assert local.names() == [".metadata", "__0_0.distcp"]
    loaded = {"t": torch.zeros(10)}
    dcp.load(loaded, checkpoint_id=as_path(local.path))
    assert_same(loaded["t"], numbered(10))


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


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *((module, "_storage_setup") for module in _CHOOSING),
        (filesystem, "FileSystemReader"),
        (filesystem, "FileSystemWriter"),
        (sys.modules[FsspecReader.__module__], "FsspecReader"),
        (sys.modules[FsspecWriter.__module__], "FsspecWriter"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.parametrize("other", [None, lambda where, path: None])
def test_a_torch_that_looks_otherwise_is_refused_and_left_alone(
    module, name, other, before, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(module, name, other)
        otherwise = identities("torch")
        with pytest.raises(InstallError, match=name):
            cloudckpt.install()
        assert not _changed(otherwise)
    cloudckpt.install()
    cloudckpt.uninstall()
    assert not _changed(before)
