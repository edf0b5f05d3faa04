"""After ``install()`` no road of torch's checkpoint code ends in a local folder named ``s3:``."""

import os
import pathlib
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
    state_dict_saver,
)
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.staging import _ReplicationStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import CloudStorageReader, CloudStorageWriter
from cloudckpt.errors import CheckpointExistsError, ConfigError, InstallError, InvalidURIError
from cloudckpt.uri import CheckpointURI

from .stock import FsspecReader, FsspecWriter, experiments
from .values import assert_same, numbered

_PATIENCE = 150.0  # seconds
_CLASSES = [FileSystemWriter, FileSystemReader, FsspecWriter, FsspecReader]
_FOR_FILES = [
    HuggingFaceStorageWriter,
    HuggingFaceStorageReader,
    QuantizedHuggingFaceStorageReader,
]
_WHOLE = [
    "s3://bucket/run",
    "gs://bucket/run",
    "az://container/run",
    "abfss://container@account.dfs.core.windows.net/run",
    "abfs://container/run",
    "https://account.blob.core.windows.net/container/run",
]


def _folded(uri: str) -> list:
    """What ``pathlib`` and ``os.path`` make of a URI."""
    return [
        Path(uri),
        str(Path(uri)),
        os.path.join(".", str(Path(uri))),
        Path(uri).absolute(),
        Path(uri).resolve(),
        os.path.abspath(uri),
        os.path.join("runs", uri),
        Path("runs") / uri,
        Path(uri).absolute().as_uri(),
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
@pytest.mark.parametrize("form", range(9))
def test_a_folded_location_is_refused_wherever_torch_takes_one(uri, form, bare):
    for call in (
        lambda location: dcp.save(_state(), checkpoint_id=location),
        lambda location: dcp.load(_empty(), checkpoint_id=location),
        lambda location: dcp.async_save(_state(), checkpoint_id=location),
        lambda location: cloudckpt.save(_state(), checkpoint_id=location),
        *_CLASSES,
        *_FOR_FILES,
    ):
        location = _folded(uri)[form]
        with pytest.raises(InvalidURIError, match=r"pass the string") as caught:
            call(location)
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


@pytest.mark.parametrize("writer", [FileSystemWriter, FsspecWriter])
def test_overwrite_of_torchs_writer_is_heeded(writer, installed, s3):
    dcp.save(_state(), storage_writer=writer(s3.uri, overwrite=False))
    dcp.save(_state(), storage_writer=writer(s3.uri))
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_state(), storage_writer=writer(s3.uri, overwrite=False))
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)


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


def test_options_that_say_what_holds_anyway_are_accepted(bare):
    FileSystemWriter(
        "s3://bucket/run",
        True,
        True,
        4,
        _extensions=[],
        serialization_format=SerializationFormat.TORCH_SAVE,
        cache_staged_state_dict=True,
    )


def test_arguments_that_torch_does_not_take_are_told_as_torch_does(bare):
    with pytest.raises(TypeError, match="path"):
        FileSystemWriter()
    with pytest.raises(TypeError, match="nonsense"):
        FileSystemWriter("s3://bucket/run", nonsense=1)


class _Derived(FileSystemWriter):
    def __init__(self, where):
        super().__init__(path=where, thread_count=2)
        self.more = 1


class _DerivedReader(FileSystemReader):
    pass


class _DerivedFsspec(FsspecWriter):
    pass


@pytest.mark.parametrize(
    "kind", [QuantizedHuggingFaceStorageReader, _Derived, _DerivedReader, _DerivedFsspec]
)
@pytest.mark.parametrize("uri", _WHOLE)
def test_what_is_derived_from_torchs_classes_is_refused_for_a_store(uri, kind, bare):
    with pytest.raises(InstallError, match="local folder"):
        kind(uri)


def test_what_is_derived_from_torchs_classes_goes_on_with_files(bare, tmp_path):
    dcp.save(_state(), storage_writer=_Derived(tmp_path / "run"))
    loaded = _empty()
    dcp.load(loaded, storage_reader=_DerivedReader(tmp_path / "run"))
    assert_same(loaded, _state())
    assert HuggingFaceStorageWriter(str(tmp_path)).path == tmp_path
    assert HuggingFaceStorageWriter("hf://me/model").path == Path("hf:/me/model")  # as without us


@pytest.mark.filterwarnings("ignore:fsync not supported")  # of torch 2.15
def test_what_fsspec_knows_and_we_do_not_still_goes_to_fsspec(bare):
    for call in (
        lambda uri: dcp.save(_state(), storage_writer=FsspecWriter(uri)),
        lambda uri: dcp.save(_state(), checkpoint_id=uri),
    ):
        with pytest.raises(ImportError):  # its libraries, which are not there
            call("oci://bucket/run")
    for scheme in ("s3a", "gcs", "wasbs"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(_registry, scheme, MemoryFileSystem)
            dcp.save(_state(), checkpoint_id=f"{scheme}://host/run")
            loaded = _empty()
            dcp.load(loaded, storage_reader=FsspecReader(f"{scheme}://host/run"))
        assert_same(loaded, _state())


class _OfAStore(FileSystemWriter):
    """As the writers of the stores' own libraries: with a file system of its own."""

    class Remote(FileSystem):
        made: list = []  # noqa: RUF012 - all of the class

        def init_path(self, path):
            return path

        def concat_path(self, path, suffix):
            return f"{path}/{suffix}"

        def mkdir(self, path):
            self.made.append(path)

        def exists(self, path):
            return False

    def __init__(self, region, path):
        super().__init__(path)
        self.fs = self.Remote()
        self.path = self.fs.init_path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return str(checkpoint_id).startswith("s3://")


def test_a_writer_that_brings_its_own_file_system_is_left_alone(bare):
    writer = _OfAStore("here", "s3://bucket/run")
    writer.reset("s3://bucket/other")
    writer.prepare_local_plan(None)
    assert writer.fs.made == ["s3://bucket/other"]
    with pytest.raises(InvalidURIError):
        _OfAStore("here", Path("s3://bucket/run"))


class _Mistaken(FileSystemWriter):
    """Says that it takes stores, and has nothing but torch's file system for them."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


def test_a_writer_that_only_says_so_is_refused_before_it_writes(bare):
    writer = _Mistaken("s3://bucket/run")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_state(), storage_writer=writer)
    assert isinstance(caught.value.failures[0][0], InvalidURIError)
    assert not os.path.exists("s3:")


@pytest.mark.parametrize("uri", _WHOLE)
def test_torchs_writer_of_a_local_path_is_not_led_to_a_store(uri, bare, tmp_path):
    for whole, error in ((uri, InstallError), (Path(uri), InvalidURIError)):
        for writer in (FileSystemWriter(tmp_path / "run"), FsspecWriter(f"file://{tmp_path}/run")):
            with pytest.raises(error):
                writer.reset(whole)
            with pytest.raises(error):
                dcp.save(_state(), storage_writer=writer, checkpoint_id=whole)
            for kind in AsyncCheckpointerType:
                with pytest.raises(error):
                    dcp.async_save(
                        _state(),
                        storage_writer=writer,
                        checkpoint_id=whole,
                        async_checkpointer_type=kind,
                    )
        for reader in (FileSystemReader(tmp_path / "run"), FsspecReader(f"file://{tmp_path}/run")):
            with pytest.raises(error):
                dcp.load(_empty(), storage_reader=reader, checkpoint_id=whole)


@pytest.mark.parametrize("location", [Path("s3://bucket/run"), os.path.abspath("s3:/bucket/run")])
def test_the_daemon_of_torch_is_not_sent_to_a_folded_location(location, bare):
    with pytest.raises(InvalidURIError):
        dcp.async_save(
            _state(),
            checkpoint_id=location,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )


@pytest.mark.parametrize(
    "use",
    [
        lambda files, path: files.create_stream(path, "wb").__enter__(),
        lambda files, path: files.create_stream(path, "rb").__enter__(),
        lambda files, path: files.init_path(path),
        lambda files, path: files.mkdir(path),
        lambda files, path: files.rename(path, "x"),
        lambda files, path: files.rename("x", path),
        lambda files, path: files.rename("x", new_path=path),
        lambda files, path: files.exists(path),
        lambda files, path: files.rm_file(path),
        lambda files, path: files.ls(path),
        lambda files, path: files.concat_path(path, "x"),
    ],
)
def test_torchs_file_system_refuses_every_path_that_was_a_uri(use, bare):
    for uri in [*_WHOLE, "s3a://bucket/run", "gcs://bucket/run", "wasbs://c@host/run"]:
        for path in (uri, *_folded(uri)):
            with pytest.raises((InstallError, InvalidURIError)):
                use(FileSystem(), path)
    assert os.listdir() == []


def test_a_path_beneath_a_folder_that_was_a_uri_is_refused_too(bare, tmp_path, monkeypatch):
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "s3:" / "bucket")
    with pytest.raises(InvalidURIError, match='"s3://bucket/run"'):
        dcp.save(_state(), checkpoint_id="run")


def test_a_whole_path_may_be_used_from_within_such_a_folder(bare, tmp_path, monkeypatch):
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "s3:" / "bucket")
    dcp.save(_state(), checkpoint_id=tmp_path / "run")
    torch.save(_state(), tmp_path / "model.pt")
    assert_same(torch.load(tmp_path / "model.pt", map_location="cpu"), _state())


def test_a_path_that_was_set_later_is_refused_when_it_is_used(bare, tmp_path):
    writer = FileSystemWriter(tmp_path / "run")
    writer.path = Path("s3://bucket/run")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_state(), storage_writer=writer)
    assert isinstance(caught.value.failures[0][0], InvalidURIError)


def test_names_that_only_resemble_a_uri_are_folders(bare, tmp_path):
    for name in ("s3", "s3:run", "xs3:", "runs:/a", "a/s3:b", "C:/x"):
        dcp.save(_state(), checkpoint_id=tmp_path / "ok" / name)
        loaded = _empty()
        dcp.load(loaded, checkpoint_id=tmp_path / "ok" / name)
        assert_same(loaded, _state())
        for part in os.listdir(tmp_path / "ok"):
            if part.endswith(":"):  # which the check at the end takes for a lost checkpoint
                os.rename(tmp_path / "ok" / part, tmp_path / "ok" / part.strip(":"))


def test_files_of_torch_save_are_converted_to_and_from_the_store(installed, s3, tmp_path):
    torch.save(_state(), tmp_path / "model.pt")
    torch_save_to_dcp(tmp_path / "model.pt", s3.uri)
    dcp_to_torch_save(s3.uri, tmp_path / "again.pt")
    assert_same(torch.load(tmp_path / "again.pt"), _state())


@pytest.mark.parametrize("location", ["s3://bucket/model.pt", Path("s3://bucket/model.pt")])
def test_torchs_own_files_are_neither_written_nor_read_there(location, bare, tmp_path):
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)  # as a framework does before it saves
    dcp.save(_state(), checkpoint_id=tmp_path / "run")
    for call in (
        lambda: dcp_to_torch_save(tmp_path / "run", location),
        lambda: torch_save_to_dcp(location, tmp_path / "run"),
        lambda: torch.save(_state(), location),
        lambda: torch.save(_state(), location, _use_new_zipfile_serialization=False),
        lambda: torch.load(location),
        lambda: torch.load(location, mmap=True),
    ):
        with pytest.raises((InstallError, InvalidURIError)):
            call()


@pytest.mark.parametrize("location", ["s3://bucket/run", Path("s3://bucket/run")])
def test_safetensors_are_not_consolidated_there(location, bare, tmp_path):
    (tmp_path / "s3:" / "bucket" / "run").mkdir(parents=True)
    for call in (consolidate_safetensors_files, consolidate_safetensors_files_on_every_rank):
        for folders in ((tmp_path, location), (location, tmp_path)):
            with pytest.raises((InstallError, InvalidURIError)):
                call(*map(str, folders), {"t": 1})


@pytest.mark.parametrize("location", ["s3://bucket/run", Path("s3://bucket/run")])
def test_replicas_are_not_kept_there(location, bare):
    with pytest.raises((InstallError, InvalidURIError)):
        _ReplicationStager(None, storage_dir=location)


@pytest.mark.parametrize("location", ["s3://bucket/run", Path("s3://bucket/run")])
def test_torchs_experimental_checkpointer_is_refused(location, bare):
    checkpointer = experiments().make_sync_checkpointer()
    for call in (checkpointer.save, checkpointer.load):
        with pytest.raises((InstallError, InvalidURIError)):
            call(location, _state())
    assert os.listdir() == []


def test_torchs_experimental_saving_process_refuses_too(bare):
    home = experiments()
    config = home.CheckpointerConfig(
        staging_config=home.CheckpointStagerConfig(
            use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    config.process_config.subprocess_init_timeout_secs = 250
    checkpointer = home.make_async_checkpointer(config, home.RankInfo(0, 1))
    try:
        _, written = checkpointer.save("s3://bucket/run", _state())
        with pytest.raises(RuntimeError, match="InstallError"):
            written.result(_PATIENCE)
    finally:
        checkpointer.close()
    assert os.listdir() == []


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


@pytest.mark.parametrize("as_passed", [str, Path])
def test_what_lightning_does(as_passed, installed, s3):
    """``ModelParallelStrategy.save_checkpoint`` and ``load_checkpoint``."""
    path = Path(as_passed(s3.uri))
    path.mkdir(parents=True, exist_ok=True)
    with pytest.raises(InvalidURIError):
        dcp.save(_state(), checkpoint_id=path)
    with pytest.raises(InvalidURIError):
        torch.save({"step": 3}, path / "meta.pt")
    with pytest.raises(InvalidURIError):
        dcp.load(_empty(), storage_reader=FileSystemReader(path=path))


def test_what_accelerate_and_the_trainer_do(installed, s3):
    """``save_fsdp_model`` joins strings, so the shards land in the store; the rest is refused."""
    folder = os.path.join(s3.uri, "checkpoint-1", "pytorch_model_fsdp_0")
    os.makedirs(folder, exist_ok=True)
    dcp.save(_state(), storage_writer=FileSystemWriter(folder), planner=dcp.DefaultSavePlanner())
    loaded = _empty()
    dcp.load(loaded, storage_reader=FileSystemReader(folder), planner=dcp.DefaultLoadPlanner())
    assert_same(loaded, _state())
    with pytest.raises(InstallError):
        torch.save({"lr": 1.0}, os.path.join(s3.uri, "checkpoint-1", "scheduler.pt"))
