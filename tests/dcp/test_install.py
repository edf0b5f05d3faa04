"""``install()``: stock torch takes our URIs as locations, and all else stays as it was."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageWriter,
    _storage_utils,
    filesystem,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat

import cloudckpt
from cloudckpt import CloudStorageReader, CloudStorageWriter
from cloudckpt.errors import ConfigError, InstallError, InvalidURIError
from cloudckpt.uri import CheckpointURI
from support.identities import identities

from .stock import FsspecReader, FsspecWriter
from .values import assert_same, numbered

_PATIENCE = 150.0  # seconds
_CHOOSING = [_storage_utils, state_dict_saver, state_dict_loader]
_CLASSES = [FileSystemReader, FileSystemWriter, FsspecReader, FsspecWriter]
_REPLACED = {
    *((module.__name__, "_storage_setup") for module in _CHOOSING),
    *((f"{kind.__module__}.{kind.__name__}", "__init__") for kind in _CLASSES),
}
"""One function, in the three modules that have its name, and four constructors."""
_WHOLE = [
    "s3://bucket/run",
    "gs://bucket/run",
    "abfss://container@account.dfs.core.windows.net/run",
    "https://account.blob.core.windows.net/container/run",
]


@pytest.fixture(autouse=True)
def nothing_local(tmp_path, monkeypatch):
    """A working directory, which has no file in a folder named after a scheme at the end."""
    monkeypatch.chdir(tmp_path)
    yield
    assert [path for path in tmp_path.rglob("*:/**/*") if path.is_file()] == []


@pytest.fixture
def bare():
    """Installed, without a store."""
    cloudckpt.install()
    yield
    cloudckpt.uninstall()


@pytest.fixture
def before() -> dict:
    """Torch as it is while nothing is installed."""
    cloudckpt.install()  # imports what it changes
    cloudckpt.uninstall()
    return identities("torch")


def _changed(before: dict) -> set:
    now = identities("torch")
    return {pair for pair, value in before.items() if now.get(pair) is not value}


def _state() -> dict:
    return {"t": numbered(10), "step": 3}


def _check(**where) -> None:
    """Whether torch loads the state."""
    loaded = {"t": torch.zeros(10), "step": None}
    dcp.load(loaded, **where)
    assert_same(loaded, _state())


# ---- what is changed in torch


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


# ---- locations


class Caching:
    """As ``cloudpathlib.S3Path``: its text is the URI, its path that of a local copy."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        return "cached/run"


@pytest.mark.parametrize("uri", _WHOLE)
def test_a_folded_location_is_refused_wherever_torch_takes_one(uri, bare):
    for call in (
        lambda location: dcp.save(_state(), checkpoint_id=location),
        lambda location: dcp.load(_state(), checkpoint_id=location),
        lambda location: cloudckpt.save(_state(), checkpoint_id=location),
        *_CLASSES,
    ):
        with pytest.raises(InvalidURIError) as caught:
            call(Path(uri))
        assert f'"{uri}"' in str(caught.value)


@pytest.mark.parametrize("kind", [Caching, CheckpointURI.parse])
def test_an_object_whose_text_is_a_uri_is_taken_as_that(kind, installed, s3):
    location = kind(s3.uri)
    dcp.save(_state(), checkpoint_id=location)
    _check(checkpoint_id=location)
    dcp.async_save(_state(), checkpoint_id=location).result(_PATIENCE)
    dcp.save(
        _state(), storage_writer=CloudStorageWriter("s3://elsewhere/x"), checkpoint_id=location
    )
    assert cloudckpt.inspect(s3.uri).has_checksums


@pytest.mark.parametrize("as_path", [str, Path])
def test_local_paths_still_go_to_torch(as_path, installed, local):
    dcp.save(_state(), checkpoint_id=as_path(local.path))
    assert local.names() == [".metadata", "__0_0.distcp"]
    _check(checkpoint_id=as_path(local.path))


@pytest.mark.parametrize("location", ["https://example.com/run", "hdfs://namenode/run"])
def test_a_location_that_is_no_store_of_ours_still_goes_to_torch(location, installed, monkeypatch):
    asked = []
    monkeypatch.setattr(FsspecWriter, "validate_checkpoint_id", lambda uri: asked.append(uri))
    with pytest.raises(RuntimeError, match="Cannot detect"):
        state_dict_saver._storage_setup(None, location)
    assert asked == [location]


def test_a_writer_that_is_named_is_used_whatever_the_uri(installed, local, s3):
    writer = local.writer()
    dcp.save(_state(), storage_writer=writer, checkpoint_id=s3.uri)
    assert writer.checkpoint_id.startswith("s3://")
    dcp.save(_state(), storage_writer=FileSystemWriter(local.path))
    assert local.names() == [".metadata", "__0_0.distcp"]


# ---- torch's classes for files


@pytest.mark.parametrize("kind", _CLASSES)
@pytest.mark.parametrize("uri", _WHOLE)
def test_torchs_own_class_becomes_ours_for_a_store(uri, kind, bare):
    ours = CloudStorageReader if kind.__name__.endswith("Reader") else CloudStorageWriter
    for made in (kind(uri), kind(path=uri), kind(CheckpointURI.parse(uri)), kind(Caching(uri))):
        assert type(made) is ours
        assert made.uri == CheckpointURI.parse(uri)
        assert type(pickle.loads(pickle.dumps(made))) is ours


@pytest.mark.parametrize(
    ("writer", "reader"), [(FileSystemWriter, FileSystemReader), (FsspecWriter, FsspecReader)]
)
def test_a_framework_that_makes_torchs_writer_saves_to_the_store(writer, reader, installed, s3):
    dcp.save(_state(), storage_writer=writer(s3.uri, thread_count=2, sync_files=False))
    _check(storage_reader=reader(s3.uri))
    dcp.async_save(_state(), storage_writer=writer(s3.uri)).result(_PATIENCE)
    assert reader(s3.uri).read_metadata().state_dict_metadata.keys() == {"t", "step"}
    assert cloudckpt.inspect(s3.uri).has_checksums


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FileSystemWriter, {"_extensions": ["zstd"]}),
        (FileSystemWriter, {"serialization_format": SerializationFormat.SAFETENSORS}),
        (FileSystemReader, {"_extension_registry": object()}),
        (FsspecWriter, {"endpoint_url": "http://x", "secret": "hidden"}),
        (FsspecReader, {"anon": True}),
    ],
)
def test_an_option_that_means_nothing_here_is_refused(kind, options, bare):
    with pytest.raises(ConfigError, match=", ".join(options)) as caught:
        kind("s3://bucket/run", **options)
    assert "hidden" not in str(caught.value)


class _Derived(FileSystemWriter):
    def __init__(self, where):
        super().__init__(path=where, thread_count=2)
        self.more = 1


class _DerivedReader(FileSystemReader):
    pass


def test_what_is_derived_from_torchs_classes_goes_on_with_files_only(bare, tmp_path):
    for kind in (_Derived, _DerivedReader):
        for uri in _WHOLE:
            with pytest.raises(InstallError):
                kind(uri)
    dcp.save(_state(), storage_writer=_Derived(tmp_path / "run"))
    _check(storage_reader=_DerivedReader(tmp_path / "run"))
    assert HuggingFaceStorageWriter(str(tmp_path)).path == tmp_path
    assert HuggingFaceStorageWriter("hf://me/model").path == Path("hf:/me/model")  # as without us


class Unknown:
    """What no allow-list has."""


def test_given_options_are_those_of_what_is_made(s3):
    other = s3.at("p").uri
    cloudckpt.install(config=s3.config)
    try:
        dcp.save(_state(), checkpoint_id=s3.uri)
        dcp.save({"p": Unknown()}, storage_writer=FileSystemWriter(other))
        with pytest.raises(dcp.CheckpointException, match="UntrustedPickleError"):
            dcp.load({"p": None}, checkpoint_id=other)
        never = s3.having(overwrite=False).config
        cloudckpt.install(never, trust_pickle=True)
        for call in (
            lambda: dcp.save(_state(), checkpoint_id=s3.uri),
            lambda: dcp.save(_state(), storage_writer=FileSystemWriter(s3.uri)),
            lambda: dcp.async_save(_state(), checkpoint_id=s3.uri).result(_PATIENCE),
        ):
            with pytest.raises(dcp.CheckpointException, match="CheckpointExistsError"):
                call()
        dcp.save(_state(), storage_writer=FileSystemWriter(s3.uri, overwrite=True))
        for reader in (None, FileSystemReader(other)):
            loaded = {"p": None}
            dcp.load(loaded, storage_reader=reader, checkpoint_id=other)
            assert isinstance(loaded["p"], Unknown)
        assert state_dict_saver._storage_setup(None, s3.uri).config == never
    finally:
        cloudckpt.uninstall()
