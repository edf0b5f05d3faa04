"""The local store: what the contract does not say of a file system."""

import errno
import fcntl
import itertools
import os
import stat
from pathlib import Path

import pytest

from cloudckpt import RetryPolicy, errors
from cloudckpt.checksum import CRC32C
from cloudckpt.stores import local, posix
from cloudckpt.stores.local import LocalStore
from cloudckpt.transfer.retry import Retrier


@pytest.fixture
def store():
    return LocalStore()


def put(store, key, data, **conditions):
    return store.put(str(key), [memoryview(data)], checksum=CRC32C.of(data), **conditions)


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


UNKNOWN = (errno.ENOSYS, errno.EOPNOTSUPP)


def fail_with(number):
    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("deletions", [1, 1_000])
def test_a_folder_that_is_deleted_just_then_is_made_again_but_not_forever(
    store, tmp_path, monkeypatch, deletions
):
    begin, begun = os.open, []

    def deleted(path, flags, *mode):
        if flags & os.O_CREAT:
            begun.append(path)
            if len(begun) <= deletions:
                os.rmdir(tmp_path / "run")
        return begin(path, flags, *mode)

    monkeypatch.setattr(os, "open", deleted)
    if deletions == 1:
        put(store, tmp_path / "run" / "object", b"data")
        assert files_below(tmp_path) == ["run/object"]
    else:
        with pytest.raises(errors.InvalidRequestError, match="deletes this file") as caught:
            put(store, tmp_path / "run" / "object", b"data")
        assert caught.value.uri == (tmp_path / "run" / "object").as_uri()
        assert len(begun) < deletions


def stop(count):
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", [{"if_version": ""}, {"if_version": "other"}, {"progress": stop}])
def test_an_object_that_is_refused_or_stopped_leaves_nothing_behind(store, tmp_path, how):
    put(store, tmp_path / "object", b"old")
    with pytest.raises(KeyboardInterrupt if "progress" in how else errors.StoreError):
        put(store, tmp_path / "object", b"new", **how)
    assert files_below(tmp_path) == ["object"]
    assert (tmp_path / "object").read_bytes() == b"old"


@pytest.mark.parametrize("version", ["", None])
def test_bytes_and_entry_are_on_the_disk_before_it_is_said(store, tmp_path, monkeypatch, version):
    key, synced = tmp_path / "object", []
    fsync = os.fsync

    def note(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append((kind, "visible" if key.exists() else "invisible"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    put(store, key, b"data", if_version=version)
    assert synced[0] == ("file", "invisible")
    assert synced[-1] == ("folder", "visible")


@pytest.mark.parametrize("version", ["", None])
def test_a_file_that_may_not_stay_is_not_called_missing(store, tmp_path, monkeypatch, version):
    """The entry is there, and the disk fails to make it last."""
    key = tmp_path / "object"
    fsync = os.fsync

    def fail(descriptor):
        if key.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(errors.CommitUnknownError, match="not confirm that it is on") as caught:
        put(store, key, b"data", if_version=version)
    assert caught.value.uri == key.as_uri()
    assert key.read_bytes() == b"data"


@pytest.mark.parametrize(
    ("step", "number"),
    [
        *itertools.product(["link", "replace"], [errno.EIO, errno.ESTALE, errno.ENOENT]),
        ("link", errno.EEXIST),
        ("unlink", errno.ENOENT),
    ],
)
def test_a_step_that_was_taken_though_it_failed_is_recognized(
    store, tmp_path, monkeypatch, step, number
):
    """NFS: the answer to the first try was lost, and the second one finds what it has made."""
    take, key = getattr(os, step), tmp_path / "object"

    def fail(*arguments, **options):
        take(*arguments, **options)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, fail)
    info = put(store, key, b"data", if_version=None if step == "replace" else "")
    assert (key.read_bytes(), store.head(str(key))) == (b"data", info)
    assert files_below(tmp_path) == ["object"]


@pytest.mark.parametrize("step", ["link", "replace"])
@pytest.mark.parametrize(
    ("number", "certain"),
    [
        (errno.EIO, False),
        (errno.ESTALE, False),
        (errno.ETIMEDOUT, False),
        (errno.ENOENT, False),
        (errno.ENOSPC, True),
        (errno.EACCES, True),
        (errno.EROFS, True),
        (errno.ENAMETOOLONG, True),
    ],
)
def test_a_step_that_may_have_been_taken_has_not_failed_for_certain(
    store, tmp_path, monkeypatch, step, number, certain
):
    monkeypatch.setattr(os, step, fail_with(number))
    with pytest.raises(errors.StoreError) as caught:
        put(store, tmp_path / "object", b"data", if_version="" if step == "link" else None)
    assert caught.value.certain is certain


@pytest.mark.parametrize(
    ("module", "call", "number", "told"),
    [
        *((os, "link", number, r"no hard links.*conditional_writes") for number in UNKNOWN),
        (os, "link", errno.EPERM, r"no hard links.*conditional_writes"),
        *((fcntl, "flock", number, r"no locks.*mount it with them") for number in UNKNOWN),
        (fcntl, "flock", errno.ENOLCK, r"no locks.*mount it with them"),
    ],
)
def test_a_file_system_is_told_what_it_lacks(
    store, tmp_path, monkeypatch, module, call, number, told
):
    monkeypatch.setattr(module, call, fail_with(number))
    with pytest.raises(errors.InvalidRequestError, match=told) as caught:
        put(store, tmp_path / "object", b"data", if_version="")
    assert caught.value.certain
    assert files_below(tmp_path) == []
    if call == "link":
        assert caught.value.uri == (tmp_path / "object").as_uri()
        put(store, tmp_path / "object", b"data")


def test_a_folder_is_made_in_one_that_may_be_written_to_but_not_listed(
    store, tmp_path, monkeypatch
):
    refuse(monkeypatch, "open", tmp_path, errno.EACCES)  # root may list all
    put(store, tmp_path / "run" / "step-1" / "object", b"data")
    assert files_below(tmp_path) == ["run/step-1/object"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, errors.StorageFullError),
        (errno.EDQUOT, errors.StorageFullError),
        (errno.EACCES, errors.AccessDeniedError),
        (errno.EPERM, errors.AccessDeniedError),
        (errno.EAGAIN, errors.InvalidRequestError),
        (errno.EIO, errors.InvalidRequestError),
        (errno.EROFS, errors.AccessDeniedError),
    ],
)
def test_the_errors_of_the_file_system_have_names(store, tmp_path, monkeypatch, number, expected):
    monkeypatch.setattr(os, "pwritev", fail_with(number))
    with pytest.raises(expected) as caught:
        put(store, tmp_path / "an object", b"data")
    assert type(caught.value) is expected
    assert caught.value.uri == (tmp_path / "an object").as_uri()
    assert os.strerror(number) in str(caught.value).partition(f" | at {tmp_path}/an object | ")[2]
    assert "another writer" not in str(caught.value)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("version", ["", None])
def test_a_folder_in_the_place_of_a_file_is_said(store, tmp_path, version):
    (tmp_path / "a").mkdir()
    with pytest.raises(errors.InvalidRequestError, match="a folder has this name"):
        put(store, tmp_path / "a", b"x", if_version=version)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("key", ["a/x", "a/b/x", "link/x"])
def test_a_file_in_the_place_of_a_folder_is_said(store, tmp_path, key):
    (tmp_path / "a").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(errors.InvalidRequestError, match="has the name of this folder") as caught:
        put(store, tmp_path / key, b"x")
    assert caught.value.uri == (tmp_path / key.partition("/")[0]).as_uri()
    for version in (None, "1-2-3"):
        store.delete(str(tmp_path / key), if_version=version)  # what is not there is deleted
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_what_can_not_be_read_has_a_name(store, tmp_path, monkeypatch):
    put(store, tmp_path / "object", b"data")
    monkeypatch.setattr(os, "preadv", fail_with(errno.EACCES))
    with pytest.raises(errors.AccessDeniedError):
        store.get(str(tmp_path / "object"))


def test_a_file_that_shrinks_while_it_is_read_tells_how_much_came(store, tmp_path):
    key = tmp_path / "object"
    put(store, key, bytes(10_000))
    memory = memoryview(bytearray(10_000))
    views = [memory[at : at + 10] for at in range(0, 10_000, 10)]  # too many for one system call

    def shrink(count):
        os.truncate(key, 0)

    with pytest.raises(errors.ConnectionLostError) as caught:
        store.get_range(str(key), 0, views, progress=shrink)
    assert 0 < caught.value.received < 10_000


def test_a_file_that_another_machine_replaces_while_it_is_read_is_read_again(
    store, tmp_path, monkeypatch
):
    """NFS: the server does not know the open file any more."""
    key, read, stale = tmp_path / "object", os.preadv, [True]
    info = put(store, key, b"data")

    def read_what_is_there(*arguments):
        if stale:
            stale.clear()
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", read_what_is_there)
    memory = memoryview(bytearray(4))
    retrier = Retrier(RetryPolicy(base=0.0, cap=0.01))
    assert retrier.call(lambda: store.get_range(str(key), 0, [memory])) == info
    assert (bytes(memory), stale) == (b"data", [])


def test_a_version_is_that_of_the_file_as_it_is_opened(store, tmp_path, monkeypatch):
    """NFS: what a machine remembers of a file that it does not open may be a minute old."""
    key, ask = tmp_path / "object", os.stat
    old = put(store, key, b"old")
    remembered = os.stat(key)
    put(store, key, b"of another machine")
    monkeypatch.setattr(
        os, "stat", lambda path, **more: remembered if path == str(key) else ask(path, **more)
    )
    with pytest.raises(errors.PreconditionFailedError):
        put(store, key, b"new", if_version=old.version)
    with pytest.raises(errors.PreconditionFailedError):
        store.delete(str(key), if_version=old.version)
    assert key.read_bytes() == b"of another machine"


@pytest.mark.parametrize("new", [b"new", b"new and longer"])
def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(store, tmp_path, monkeypatch, new):
    key, info_of, replace = tmp_path / "object", local._info, [new]
    written = put(store, key, b"old data")

    def replaced_meanwhile(*arguments):
        info = info_of(*arguments)
        if replace:
            (tmp_path / "new").write_bytes(replace.pop())
            (tmp_path / "new").replace(key)
        return info

    monkeypatch.setattr(local, "_info", replaced_meanwhile)
    assert store.get(str(key)) == (b"old data", written)
    assert store.get(str(key))[0] == new


def test_a_lock_that_is_never_released_is_an_error(store, tmp_path, monkeypatch):
    monkeypatch.setattr(posix, "_LOCK_PATIENCE", 0.02)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(errors.InvalidRequestError, match="another writer") as caught:
            put(store, tmp_path / "object", b"data")
        assert (caught.value.uri, caught.value.certain) == (tmp_path.as_uri(), True)
        assert files_below(tmp_path) == []
    finally:
        os.close(held)
    put(store, tmp_path / "object", b"data")


def test_a_process_that_is_forked_while_the_lock_is_held_does_not_keep_it(
    store, tmp_path, monkeypatch
):
    """As the workers of a data loader are, while another thread saves: they have its files."""
    monkeypatch.setattr(posix, "_LOCK_PATIENCE", 0.02)
    sync, of_workers = os.fsync, []

    def sync_and_fork(descriptor):
        sync(descriptor)
        of_workers.append(os.dup(descriptor))

    monkeypatch.setattr(os, "fsync", sync_and_fork)
    try:
        info = put(store, tmp_path / "object", b"data", if_version="")
        info = put(store, tmp_path / "object", b"other", if_version=info.version)
        store.delete(str(tmp_path / "object"), if_version=info.version)
    finally:
        for descriptor in of_workers:
            os.close(descriptor)
    assert files_below(tmp_path) == []


def swap(upload, how, victim):
    """As somebody may who may write to the folder, too."""
    unfinished = Path(upload.id)
    unfinished.unlink()
    if how == "link":
        unfinished.symlink_to(victim)
    elif how == "hard link":
        os.link(victim, unfinished)
    elif how == "pipe":
        os.mkfifo(unfinished)
    elif how == "folder":
        unfinished.mkdir()


@pytest.mark.parametrize("how", ["link", "hard link", "pipe", "folder", "deletion"])
@pytest.mark.parametrize("verb", ["put_part", "complete_upload"])
def test_an_unfinished_file_that_was_swapped_is_not_written_to(store, tmp_path, how, verb):
    victim, key = tmp_path / "victim", tmp_path / "run" / "object"
    victim.write_bytes(b"of somebody else")
    upload = store.create_upload(str(key), 4)
    part = store.put_part(upload, 1, [memoryview(b"data")], checksum=CRC32C.of(b"data"))
    swap(upload, how, victim)
    calls = {
        "put_part": lambda: store.put_part(upload, 2, [memoryview(b"more")], checksum=0),
        "complete_upload": lambda: store.complete_upload(upload, [part], if_version=""),
    }
    with pytest.raises(
        errors.StoreError, match=r"unfinished file( was deleted|, or made)"
    ) as caught:
        calls[verb]()
    assert caught.value.uri == key.as_uri()
    assert victim.read_bytes() == b"of somebody else"
    assert not key.exists()


@pytest.mark.parametrize("version", ["", "another"])
def test_an_upload_replaces_only_the_version_that_it_is_given(store, tmp_path, version):
    old = put(store, tmp_path / "object", b"old")
    upload = store.create_upload(str(tmp_path / "object"), 4)
    with pytest.raises(errors.PreconditionFailedError):
        store.complete_upload(upload, [], if_version=version)
    assert (tmp_path / "object").read_bytes() == b"old"
    assert store.complete_upload(upload, [], if_version=old.version).size == 0


@pytest.mark.parametrize("conditions", [{"if_version": ""}, {}])
@pytest.mark.parametrize("moment", ["while it is written", "before it appears"])
def test_what_was_swapped_is_not_published(store, tmp_path, monkeypatch, conditions, moment):
    victim, key = tmp_path / "victim", tmp_path / "run" / "object"
    victim.write_bytes(b"of somebody else")
    step = {
        "while it is written": "fsync",
        "before it appears": "link" if conditions else "replace",
    }
    take = getattr(os, step[moment])

    def swapped(*arguments, **options):
        for unfinished in key.parent.glob(".*"):
            unfinished.unlink()
            unfinished.symlink_to(victim)
        return take(*arguments, **options)

    monkeypatch.setattr(os, step[moment], swapped)
    with pytest.raises(errors.InvalidRequestError, match="has replaced the unfinished file"):
        put(store, key, b"data", **conditions)
    assert victim.read_bytes() == b"of somebody else"


@pytest.mark.parametrize("verb", ["get", "head", "get_range"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(store, tmp_path, verb):
    key = str(tmp_path / "object")
    os.mkfifo(key)
    more = (0, [memoryview(bytearray(1))]) if verb == "get_range" else ()
    with pytest.raises(errors.InvalidRequestError, match="not a file"):
        getattr(store, verb)(key, *more)


LISTINGS = {
    "list": lambda store, folder: [info.key for info in store.list(f"{folder}/")],
    "list_level": lambda store, folder: list(store.list_level(f"{folder}/")),
    "list_uploads": lambda store, folder: list(store.list_uploads(f"{folder}/")),
}


def refuse(monkeypatch, name, folder, number):
    """Makes a function of ``os`` fail for a folder, or what is in it."""
    real = getattr(os, name)

    def refused(path, *rest, **named):
        if Path(path) == folder:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, name, refused)


@pytest.mark.parametrize("how", LISTINGS)
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EACCES, errors.AccessDeniedError),
        (errno.ESTALE, errors.InvalidRequestError),
        (errno.EIO, errors.InvalidRequestError),
    ],
)
def test_a_folder_that_can_not_be_listed_is_no_empty_one(
    store, tmp_path, monkeypatch, how, number, expected
):
    put(store, tmp_path / "run" / "step-1" / "a", b"data")
    refuse(monkeypatch, "scandir", tmp_path / "run", number)
    with pytest.raises(expected) as caught:
        LISTINGS[how](store, tmp_path / "run")
    assert caught.value.uri == f"file://{tmp_path}/run"


def test_a_folder_that_can_not_be_looked_into_may_have_files(store, tmp_path, monkeypatch):
    put(store, tmp_path / "run" / "step-1" / "a", b"data")
    refuse(monkeypatch, "scandir", tmp_path / "run" / "step-1", errno.EACCES)
    assert LISTINGS["list_level"](store, tmp_path / "run") == ["step-1"]
    for how in ("list", "list_uploads"):
        with pytest.raises(errors.AccessDeniedError):
            LISTINGS[how](store, tmp_path / "run")


@pytest.mark.parametrize("how", ["list", "list_level"])
def test_a_file_whose_size_can_not_be_told_is_an_error_of_the_store(
    store, tmp_path, monkeypatch, how
):
    put(store, tmp_path / "run" / "a", b"data")
    refuse(monkeypatch, "stat", tmp_path / "run" / "a", errno.EIO)
    with pytest.raises(errors.InvalidRequestError):
        LISTINGS[how](store, tmp_path / "run")


def test_what_a_file_system_keeps_for_itself_does_not_hide_the_rest(store, tmp_path, monkeypatch):
    put(store, tmp_path / "a", b"data")
    (tmp_path / "lost+found").mkdir()
    refuse(monkeypatch, "scandir", tmp_path / "lost+found", errno.EACCES)
    assert LISTINGS["list"](store, tmp_path) == [str(tmp_path / "a")]
    assert "lost+found" not in LISTINGS["list_level"](store, tmp_path)


def test_links_to_folders_are_left_out_of_every_listing_with_a_word(store, tmp_path, caplog):
    put(store, tmp_path / "elsewhere" / "object", b"data")
    put(store, tmp_path / "run" / "step-1" / "object", b"data")
    (tmp_path / "run" / "step-2").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "up").symlink_to("..")
    (tmp_path / "run" / "itself").symlink_to("itself")
    (tmp_path / "run" / "linked-file").symlink_to(tmp_path / "elsewhere" / "object")
    run = tmp_path / "run"
    listed = [str(Path(key).relative_to(run)) for key in LISTINGS["list"](store, run)]
    level = LISTINGS["list_level"](store, run)
    names = [entry if isinstance(entry, str) else Path(entry.key).name for entry in level]
    assert listed == ["linked-file", "step-1/object"]
    assert names == ["linked-file", "step-1"]
    assert caplog.text.count(f"{run} contains symbolic links") == 1
