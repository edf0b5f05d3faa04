"""What torch's save, load, writers and readers do with a location after ``install()``."""

import os
import pathlib
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageWriter,
    state_dict_saver,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat

import cloudckpt
from cloudckpt import CloudStorageReader, CloudStorageWriter
from cloudckpt.errors import ConfigError, InstallError, InvalidURIError
from cloudckpt.uri import CheckpointURI

from .stock import FsspecReader, FsspecWriter
from .values import assert_same, numbered

_PATIENCE = 150.0  # seconds
_CLASSES = [FileSystemWriter, FileSystemReader, FsspecWriter, FsspecReader]
_WHOLE = [
    "s3://bucket/run",
    "gs://bucket/run",
    "abfss://container@account.dfs.core.windows.net/run",
    "https://account.blob.core.windows.net/container/run",
]


class Universal:
    """As ``upath.UPath``: no path of the operating system, only its text is the URI."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


class Passing(Universal):
    """A path-like object that passes the URI on."""

    def __fspath__(self) -> str:
        return self.text


class Caching(Universal):
    """As ``cloudpathlib.S3Path``: its path is that of a local copy."""

    def __fspath__(self) -> str:
        return "cached/run"


@pytest.fixture(autouse=True)
def nothing_local(tmp_path, monkeypatch):
    """A working directory, which has no file in a folder named after a scheme at the end."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    lost = [
        os.path.join(top, name)
        for top, _, names in os.walk(tmp_path)
        for name in names
        if any(part.endswith(":") for part in pathlib.PurePath(top).parts)
    ]
    assert lost == []


@pytest.fixture
def bare():
    """Installed, without a store."""
    cloudckpt.install()
    yield
    cloudckpt.uninstall()


def _state() -> dict:
    return {"t": numbered(10), "step": 3}


def _empty() -> dict:
    return {"t": torch.zeros(10), "step": None}


@pytest.mark.parametrize("uri", _WHOLE)
@pytest.mark.parametrize("fold", [Path, os.path.abspath])
def test_a_folded_location_is_refused_wherever_torch_takes_one(uri, fold, bare):
    for call in (
        lambda location: dcp.save(_state(), checkpoint_id=location),
        lambda location: dcp.load(_empty(), checkpoint_id=location),
        lambda location: cloudckpt.save(_state(), checkpoint_id=location),
        *_CLASSES,
    ):
        with pytest.raises(InvalidURIError, match=r"pass the string") as caught:
            call(fold(uri))
        assert f'"{uri}"' in str(caught.value)


@pytest.mark.parametrize("kind", [Passing, Universal, Caching, CheckpointURI.parse])
def test_an_object_whose_text_is_a_uri_is_taken_as_that(kind, installed, s3):
    location = kind(s3.uri)
    dcp.save(_state(), checkpoint_id=location)
    loaded = _empty()
    dcp.load(loaded, checkpoint_id=location)
    assert_same(loaded, _state())
    dcp.async_save(_state(), checkpoint_id=location).result(_PATIENCE)
    dcp.save(
        _state(), storage_writer=CloudStorageWriter("s3://elsewhere/x"), checkpoint_id=location
    )
    assert cloudckpt.inspect(s3.uri).has_checksums


@pytest.mark.parametrize("kind", _CLASSES)
@pytest.mark.parametrize("uri", _WHOLE)
def test_torchs_own_class_becomes_ours_for_a_store(uri, kind, bare):
    ours = CloudStorageReader if kind.__name__.endswith("Reader") else CloudStorageWriter
    for made in (kind(uri), kind(path=uri), kind(CheckpointURI.parse(uri)), kind(Passing(uri))):
        assert type(made) is ours
        assert made.uri == CheckpointURI.parse(uri)
        assert type(pickle.loads(pickle.dumps(made))) is ours


@pytest.mark.parametrize(
    ("writer", "reader"), [(FileSystemWriter, FileSystemReader), (FsspecWriter, FsspecReader)]
)
def test_a_framework_that_makes_torchs_writer_saves_to_the_store(writer, reader, installed, s3):
    dcp.save(_state(), storage_writer=writer(s3.uri, thread_count=2, sync_files=False))
    loaded = _empty()
    dcp.load(loaded, storage_reader=reader(s3.uri))
    assert_same(loaded, _state())
    dcp.async_save(_state(), storage_writer=writer(s3.uri)).result(_PATIENCE)
    assert reader(s3.uri).read_metadata().state_dict_metadata.keys() == {"t", "step"}
    assert cloudckpt.inspect(s3.uri).has_checksums


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (FileSystemWriter, {"_extensions": ["zstd"]}, "_extensions"),
        (
            FileSystemWriter,
            {"serialization_format": SerializationFormat.SAFETENSORS},
            "serialization_format",
        ),
        (FileSystemReader, {"_extension_registry": object()}, "_extension_registry"),
        (FsspecWriter, {"endpoint_url": "http://x", "secret": "hidden"}, "endpoint_url, secret"),
        (FsspecReader, {"anon": True}, "anon"),
    ],
)
def test_an_option_that_means_nothing_here_is_refused(kind, options, named, bare):
    with pytest.raises(ConfigError, match=named) as caught:
        kind("s3://bucket/run", **options)
    assert "hidden" not in str(caught.value)


class _Derived(FileSystemWriter):
    def __init__(self, where):
        super().__init__(path=where, thread_count=2)
        self.more = 1


class _DerivedReader(FileSystemReader):
    pass


@pytest.mark.parametrize("kind", [_Derived, _DerivedReader])
@pytest.mark.parametrize("uri", _WHOLE)
def test_what_is_derived_from_torchs_classes_for_files_is_refused_for_a_store(uri, kind, bare):
    with pytest.raises(InstallError):
        kind(uri)


def test_what_is_derived_from_torchs_classes_goes_on_with_files(bare, tmp_path):
    dcp.save(_state(), storage_writer=_Derived(tmp_path / "run"))
    loaded = _empty()
    dcp.load(loaded, storage_reader=_DerivedReader(tmp_path / "run"))
    assert_same(loaded, _state())
    assert HuggingFaceStorageWriter(str(tmp_path)).path == tmp_path
    assert HuggingFaceStorageWriter("hf://me/model").path == Path("hf:/me/model")  # as without us


def test_given_options_are_those_of_what_is_made(s3, tmp_path):
    cloudckpt.install(config=s3.config)
    try:
        dcp.save(_state(), checkpoint_id=s3.uri)
        dcp.save({"p": Unknown()}, storage_writer=FileSystemWriter(s3.at("p").uri))
        with pytest.raises(dcp.CheckpointException, match="UntrustedPickleError"):
            dcp.load({"p": None}, checkpoint_id=s3.at("p").uri)
        never = s3.having(overwrite=False).config
        cloudckpt.install(never, trust_pickle=True)
        for call in (
            lambda: dcp.save(_state(), checkpoint_id=s3.uri),
            lambda: dcp.save(_state(), storage_writer=FileSystemWriter(s3.uri)),
            lambda: dcp.async_save(_state(), checkpoint_id=s3.uri).result(_PATIENCE),
        ):
            with pytest.raises(dcp.CheckpointException, match="overwrite is off"):
                call()
        dcp.save(_state(), storage_writer=FileSystemWriter(s3.uri, overwrite=True))
        for reader in (None, FileSystemReader(s3.at("p").uri)):
            loaded = {"p": None}
            dcp.load(loaded, storage_reader=reader, checkpoint_id=s3.at("p").uri)
            assert isinstance(loaded["p"], Unknown)
        assert state_dict_saver._storage_setup(None, s3.uri).config == never
    finally:
        cloudckpt.uninstall()


class Unknown:
    """What no allow-list has."""
