"""fsspec over our stores: what frameworks list, look at and delete by it."""

import dataclasses
import importlib.util

import fsspec
import pytest
import torch
from fsspec.registry import _registry, known_implementations

import cloudckpt
from cloudckpt import Config, RetryPolicy, S3Options
from cloudckpt.dcp.install import chosen_config
from cloudckpt.integrations.fsspec import S3FileSystem
from cloudckpt.stores.registry import open_store
from dcp.values import numbered


@pytest.fixture
def files(s3):
    return S3FileSystem(config=s3.config, skip_instance_cache=True)


@pytest.fixture
def run(s3, files):
    """Two checkpoints, a file beside them, and a file in another folder that is named alike."""
    for step in (1, 2):
        cloudckpt.save({"w": numbered()}, checkpoint_id=f"{s3.uri}/step-{step}", config=s3.config)
    files.pipe_file(f"{s3.uri}/notes.txt", b"hello")
    files.pipe_file(f"{s3.uri}-of-another/step-3/x", b"")
    return s3.uri


@pytest.fixture
def without_packages(monkeypatch):
    """No s3fs, gcsfs or adlfs, whatever is installed here."""
    find = importlib.util.find_spec
    hidden = ("s3fs", "gcsfs", "adlfs")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find(name)
    )
    for scheme, package in zip(("s3", "gs", "az"), hidden, strict=True):
        monkeypatch.delitem(_registry, scheme, raising=False)
        monkeypatch.setitem(known_implementations, scheme, {"class": f"{package}.FileSystem"})
    yield
    cloudckpt.uninstall()


def test_a_run_is_listed_by_folders_and_files(files, run, s3):
    base = run.removeprefix("s3://")
    assert files.ls(run, detail=False) == [f"{base}/{n}" for n in ("notes.txt", "step-1", "step-2")]
    assert [entry["type"] for entry in files.ls(run)] == ["file", "directory", "directory"]
    assert files.ls(f"{run}/notes.txt", detail=False) == [f"{base}/notes.txt"]
    with pytest.raises(FileNotFoundError):
        files.ls(f"{run}/step-3")
    cloudckpt.save({"w": numbered()}, checkpoint_id=f"{run}/step-3", config=s3.config)
    assert len(files.ls(run)) == 4


def test_folders_files_and_nothing_are_told_apart(files, run):
    looks = (files.exists, files.isdir, files.isfile)
    assert [look(run) for look in looks] == [True, True, False]
    assert [look(f"{run}/step-1/.metadata") for look in looks] == [True, False, True]
    assert not any(look(f"{run}/step") for look in looks)
    assert files.isdir(run.rpartition("/")[0].rpartition("/")[0])  # the bucket


def test_a_file_is_copied_and_moved_as_torchs_writer_through_fsspec_does(files, run):
    files.cp(f"{run}/notes.txt", f"{run}/copy.txt")
    files.mv(f"{run}/notes.txt", f"{run}/moved.txt")
    files.touch(f"{run}/moved.txt", truncate=False)
    assert not files.exists(f"{run}/notes.txt")
    assert [files.cat(f"{run}/{name}.txt") for name in ("copy", "moved")] == [b"hello"] * 2


def test_what_is_denied_in_no_bucket_or_not_reached_is_not_passed_over(files, run, s3, monkeypatch):
    for look in (files.exists, files.glob, files.find, lambda path: list(files.walk(path))):
        with pytest.raises(cloudckpt.errors.BucketNotFoundError):
            look("s3://no-such-bucket-at-all/run/*")

    def refuse(prefix, retry):
        raise cloudckpt.errors.AccessDeniedError("no", uri=prefix, certain=True)

    store = open_store(cloudckpt.uri.CheckpointURI.parse(run), s3.config)
    monkeypatch.setattr(store, "list_level", refuse)
    for look in (files.isdir, files.glob, lambda path: list(files.walk(path))):
        with pytest.raises(cloudckpt.errors.AccessDeniedError):
            look(f"{run}/*")
    assert list(files.walk(run, on_error="omit")) == []
    nobody = Config(retry=RetryPolicy(attempts=1), s3=S3Options(endpoint_url="http://127.0.0.1:1"))
    files = S3FileSystem(config=nobody, skip_instance_cache=True)
    for look in (files.exists, files.isdir, files.isfile, files.ls):
        with pytest.raises(cloudckpt.errors.StoreError):
            look("s3://bucket/run")


def test_a_folder_is_removed_and_its_commit_first(files, run, s3, monkeypatch):
    location = cloudckpt.uri.CheckpointURI.parse(run)
    store = open_store(location, s3.config)
    delete, deleted = store.delete, []

    def noted(key, **kwargs):
        deleted.append(key)
        return delete(key, **kwargs)

    monkeypatch.setattr(store, "delete", noted)
    files.rm(f"{run}/step-1", recursive=True)

    assert deleted[0] == f"{location.prefix}/step-1/.metadata"
    assert len(deleted) > 1
    assert not files.exists(f"{run}/step-1")
    assert cloudckpt.exists(f"{run}/step-2", config=s3.config)
    with pytest.raises(FileNotFoundError):
        files.rm(f"{run}/step-1", recursive=True)
    files.rm(run, recursive=True, maxdepth=1)
    assert [path.rpartition("/")[2] for path in files.ls(run, detail=False)] == ["step-2"]


@pytest.mark.parametrize("verb", ["put", "copy", "mv"])
def test_a_copy_of_a_checkpoint_appears_with_its_last_file(
    files, run, s3, tmp_path, monkeypatch, verb
):
    files.get(f"{run}/step-1", f"{tmp_path}/step-1", recursive=True)
    source = f"{tmp_path}/step-1" if verb == "put" else f"{run}/step-1"
    name, seen = "put_file" if verb == "put" else "cp_file", []
    one = getattr(S3FileSystem, name)

    def noted(self, *args, **kwargs):
        seen.append(cloudckpt.exists(f"{run}/copy", config=s3.config))
        return one(self, *args, **kwargs)

    monkeypatch.setattr(S3FileSystem, name, noted)
    getattr(files, verb)(source, f"{run}/copy", recursive=True)
    assert len(seen) > 1
    assert not any(seen)
    cloudckpt.verify(f"{run}/copy", config=s3.config)


@pytest.mark.parametrize("is_whole_run", [False, True])
def test_a_folder_that_others_refer_to_keeps_what_they_need_until_the_last_goes(
    files, s3, is_whole_run
):
    config = dataclasses.replace(s3.config, incremental=True)
    for step in (1, 2, 3):
        state = {"frozen": numbered(), "step": torch.tensor([step])}
        cloudckpt.save(state, checkpoint_id=f"{s3.uri}/step-{step}", config=config)
    if is_whole_run:
        files.rm(s3.uri, recursive=True)
        assert not s3.names()
        return
    files.rm(f"{s3.uri}/step-1", recursive=True)
    files.rm(f"{s3.uri}/step-1", recursive=True)  # what is left is no checkpoint, and stays
    assert not cloudckpt.exists(f"{s3.uri}/step-1", config=s3.config)
    files.rm(f"{s3.uri}/step-2", recursive=True)
    assert not s3.at("step-2").names()
    cloudckpt.verify(f"{s3.uri}/step-3", config=s3.config)

    files.rm(f"{s3.uri}/step-3", recursive=True)
    assert not s3.names()


def test_a_file_appears_when_it_is_closed(files, run):
    path = f"{run}/config.json"
    with files.open(path, "w") as file:
        file.write("{}\n")
        assert not files.exists(path)
    with files.open(path) as file:
        assert file.read() == b"{}\n"
    with pytest.raises(FileExistsError):
        files.pipe_file(path, b"other", mode="create")
    assert files.cat(path) == b"{}\n"


def test_slices_of_a_file_are_those_of_its_bytes(files, run):
    path, content = f"{run}/digits", b"0123456789"
    files.pipe_file(path, content)
    for start, end in ((2, 5), (None, 3), (7, None), (-3, None), (2, -2), (5, 100), (5, 5), (6, 2)):
        assert files.cat_file(path, start=start, end=end) == content[start:end]


def test_files_and_folders_tell_when_they_were_written(files, run):
    before = files.modified(run)
    files.pipe_file(f"{run}/late", b"")
    assert files.modified(f"{run}/late") == files.modified(run) >= before
    assert files.modified(f"{run}/notes.txt") <= before
    with pytest.raises(FileNotFoundError):
        files.modified(f"{run}/nothing")


def test_modes_that_no_store_has_are_refused(files, run):
    with pytest.raises(NotImplementedError, match="ab"):
        files.open(f"{run}/notes.txt", "ab")
    with files.transaction, pytest.raises(NotImplementedError, match="transaction"):
        files.open(f"{run}/notes.txt", "wb")


def test_what_somebody_else_serves_is_left_to_them(without_packages, monkeypatch):
    class Theirs(fsspec.AbstractFileSystem):
        protocol = "s3"

    monkeypatch.setitem(_registry, "s3", Theirs)
    cloudckpt.install()

    assert fsspec.get_filesystem_class("s3") is Theirs
    assert fsspec.get_filesystem_class("gs").__module__.startswith("cloudckpt")


def test_options_of_install_hold_until_uninstall_for_all_file_systems(without_packages, run, s3):
    nobody = dataclasses.replace(
        s3.config,
        retry=RetryPolicy(attempts=1),
        s3=S3Options(endpoint_url="http://127.0.0.1:1"),
    )
    cloudckpt.install(nobody)
    found, path = fsspec.core.url_to_fs(run)
    with pytest.raises(cloudckpt.errors.StoreError):
        found.exists(path)
    cloudckpt.install(s3.config)
    assert len(found.ls(path)) == 3
    cloudckpt.uninstall()
    assert (found._config, chosen_config()) == (Config(), None)
