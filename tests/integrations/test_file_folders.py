"""Folders of files that are committed by one write: what others see of them, whatever happens."""

import contextlib
import functools
import io
import itertools
import time

import pytest
import torch

from cloudckpt import Config, RetryPolicy, errors
from cloudckpt.checkpoint import baseline
from cloudckpt.checkpoint.file_folder import MANIFEST, is_content_name
from cloudckpt.integrations.torch_checkpointing import manifest
from cloudckpt.integrations.torch_checkpointing.folders import FileFolders, is_tensor_memory
from cloudckpt.runs.sweeping import find_leftovers, sweep
from cloudckpt.uri import CheckpointURI
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

JOB, OTHER = "a" * 16, "b" * 16
CONFIG = Config(
    part_size=5 * 2**20,
    connections=2,
    retry=RetryPolicy(attempts=2, base=0.0, cap=0.0, deadline=5.0),
)
_numbers = itertools.count()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(f"file-folders-{next(_numbers)}")


def folders(store, job=JOB, **options) -> FileFolders:
    return FileFolders(store, CONFIG, job=job, temporary="tmp_", **options)


@functools.cache
def contents(step: int) -> dict[str, bytes]:
    """Files of two ranks: one of several parts and blocks, small ones, one in a folder."""
    large = bytes(range(256)) * 4096 + bytes([step]) * (4 * 2**20 + 77)
    return {
        "model_0.pt": large,
        "rank_1/model.pt": large[: 2**20 + 9],
        "metadata.pkl": b"metadata of step %d" % step,
        "nothing.txt": b"",
    }


def write(files: FileFolders, folder: str, step: int) -> None:
    for name, data in contents(step).items():
        with files.written(f"{folder}/{name}", is_immutable=lambda view: True) as file:
            file.write(data)


def save(files: FileFolders, path: str, step: int) -> None:
    """As torch_checkpointing does it."""
    above, _, name = path.rpartition("/")
    write(files, f"{above}/tmp_{name}", step)
    files.rename_folder(f"{above}/tmp_{name}", path)


def state_of(store, path: str, job: str = OTHER) -> int | None:
    """The step that lies there, None if nothing does; fails if it is anything in between."""
    files = folders(store, job)
    if not files.exists(path):
        assert not files.is_folder(path)
        with contextlib.suppress(FileNotFoundError):
            assert path.rpartition("/")[2] not in files.names("run")
        return None
    assert files.is_folder(path)
    step = int(files.read(f"{path}/metadata.pkl").rpartition(b" ")[2])
    assert files.names(path) == ["metadata.pkl", "model_0.pt", "nothing.txt", "rank_1"]
    for name, data in contents(step).items():
        assert files.existing(f"{path}/{name}").size == len(data)
        assert files.read(f"{path}/{name}") == data
    return step


@pytest.mark.parametrize("of_run", ["step-7/.metadata", ".cloudckpt-job.json", None])
def test_the_folder_of_a_run_is_never_committed_as_one_of_files(store, of_run) -> None:
    save(folders(store), "jobs/run/step-8", 8)
    if of_run is not None:
        store.put(f"jobs/run/{of_run}", [memoryview(b"{}")], checksum=0)
    with pytest.raises(FileExistsError):
        save(folders(store), "jobs/run", 9)
    assert f"jobs/run/{MANIFEST}" not in [info.key for info in store.list("jobs/")]
    assert state_of(store, "jobs/run/step-8") == 8


def test_a_folder_is_there_when_it_is_renamed_and_not_before(store) -> None:
    writer = folders(store)
    write(writer, "run/tmp_step-7", 7)
    assert writer.exists("run/tmp_step-7")
    assert writer.read("run/tmp_step-7/metadata.pkl") == b"metadata of step 7"
    assert state_of(store, "run/step-7") is None
    assert not folders(store, OTHER).exists("run/tmp_step-7")

    writer.rename_folder("run/tmp_step-7", "run/step-7")
    assert state_of(store, "run/step-7") == 7
    assert writer.names("run") == ["step-7"]
    assert writer.names("run/step-7/rank_1") == ["model.pt"]
    assert writer.is_folder("run/step-7/rank_1")
    assert not writer.is_folder("run/step-7/model_0.pt")

    writer.remove_folder("run/step-7")
    assert not [*store.list("")]


def test_a_file_takes_two_writes_and_to_rename_one_more_which_copies_nothing(store) -> None:
    faulty = FaultyStore(store)
    writer = folders(faulty)
    with writer.written("run/tmp_step-7/x") as file:
        file.write(b"x")
    assert faulty.calls == {"put": 2}
    write(writer, "run/tmp_step-7", 7)
    before = {info.key for info in store.list("") if is_content_name(info.key)}
    faulty.calls.clear()
    writer.rename_folder("run/tmp_step-7", "run/step-7")
    assert faulty.calls["put"] == 1
    assert not {"copy", "copy_part", "put_part", "create_upload"} & faulty.calls.keys()
    assert {info.key for info in store.list("")} == before | {f"run/step-7/{MANIFEST}"}
    assert store.head(f"run/step-7/{MANIFEST}").size < 4096


def test_what_is_in_the_way_stays_and_so_does_what_was_to_be_renamed(store) -> None:
    writer = folders(store)
    save(writer, "run/step-7", 7)
    write(writer, "run/tmp_step-7", 8)
    with pytest.raises(FileExistsError):
        writer.rename_folder("run/tmp_step-7", "run/step-7")
    assert state_of(store, "run/step-7") == 7
    assert writer.read("run/tmp_step-7/metadata.pkl") == b"metadata of step 8"
    with pytest.raises(errors.ConfigError, match="temporary folder"):
        writer.written("run/step-7/model_0.pt")
    with pytest.raises(FileExistsError, match="committed folder"):
        writer.delete("run/step-7/model_0.pt")
    with pytest.raises(FileNotFoundError):
        writer.rename_folder("run/tmp_nothing", "run/nothing")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_deletion_spares_what_others_have_written(store, is_damaged) -> None:
    """A folder of another job, committed as soon as the manifest is gone, and a plain file."""

    class Store(FaultyStore):
        def delete(self, key, **options):
            super().delete(key, **options)
            if key.endswith(MANIFEST) and options:
                save(folders(store, OTHER), "run/step-7", 8)

    save(folders(store), "run/step-7", 7)
    if is_damaged:
        store.put(f"run/step-7/{MANIFEST}", [memoryview(b"damaged")], checksum=0)
    folders(Store(store)).remove_folder("run/step-7")
    assert state_of(store, "run/step-7") == 8
    plain, writer = "run/tmp_step-9/metadata.pkl", folders(store)
    store.put(plain, [memoryview(b"plain")], checksum=0)
    write(writer, "run/tmp_step-9", 9)
    writer.delete(plain)
    assert writer.read(plain) == b"plain"
    writer.delete(plain)
    assert not writer.exists(plain)


# ---- kills


class Killed(BaseException):
    pass


class DyingStore(FaultyStore):
    """Of a writer that is killed: from one request on, none reaches the store."""

    def __init__(self, inner, fatal: int) -> None:
        super().__init__(inner)
        self._fatal, self._requests = fatal, itertools.count(1)

    def _struck(self, verb, key):
        if next(self._requests) >= self._fatal:
            raise Killed
        return super()._struck(verb, key)


@pytest.mark.parametrize("path", ["run/step-1", "run/step-2"])
def test_a_kill_at_any_request_leaves_the_old_folder_none_or_the_new_one(path) -> None:
    """Of a save to a new location, or to that of a folder, which it removes first."""
    seen = []
    while 2 not in seen:
        store = MemoryStore(f"killed-{next(_numbers)}")
        save(folders(store), "run/step-1", 1)
        writer = folders(DyingStore(store, len(seen) + 1))
        with contextlib.suppress(Killed):
            if path == "run/step-1":
                writer.remove_folder(path)
            save(writer, path, 2)
        seen.append(state_of(store, path))
        assert path == "run/step-1" or state_of(store, "run/step-1") == 1
        if len(seen) % 5 == 0:  # what comes behind it, of another job
            files = folders(store, "c" * 16)
            if seen[-1] is not None:
                files.remove_folder(path)
            save(files, path, 5)
            assert state_of(store, path) == 5
    assert len(seen) > 25
    old = seen.index(None)
    assert seen == [1] * old + [None] * (len(seen) - old - 1) + [2]


# ---- faults


def test_a_commit_of_which_nobody_knows_is_an_error_that_loses_nothing(store) -> None:
    faulty = FaultyStore(store)
    manifest = lambda key: key.endswith(MANIFEST)  # noqa: E731
    writer = folders(faulty)
    write(writer, "run/tmp_step-7", 7)
    faulty.fail("put", errors.ConnectionLostError, when="before", where=manifest)
    with pytest.raises(errors.CommitUnknownError):
        writer.rename_folder("run/tmp_step-7", "run/step-7")
    faulty.heal()
    writer.rename_folder("run/tmp_step-7", "run/step-7")
    assert state_of(store, "run/step-7") == 7


def test_behind_an_error_no_file_is_there(store) -> None:
    writer = folders(store)
    with contextlib.suppress(ZeroDivisionError), writer.written("run/tmp_a/x") as file:
        file.write(b"x" * 10)
        1 / 0  # noqa: B018
    assert not [*store.list("")]


# ---- damage


def _damages(data: bytes) -> list[bytes]:
    """Bits that are flipped, an end that is missing, and two parts that are swapped."""
    size = len(data)
    places = [0, 1, size // 7, size // 3, size // 2, size - 2, size - 1]
    flipped = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in places]
    cut = [data[:at] for at in places]
    return [*flipped, *cut, data[size // 3 :] + data[: size // 3]]


@pytest.mark.parametrize("name", ["model_0.pt", "metadata.pkl", MANIFEST])
def test_no_damage_is_silent(store, name) -> None:
    save(folders(store), "run/step-7", 7)
    key = next(
        info.key for info in store.list("run/step-7/") if info.key.startswith(f"run/step-7/{name}")
    )
    data = bytes(store.get(key, limit=1 << 24)[0])
    path = "run/step-7/metadata.pkl" if name == MANIFEST else f"run/step-7/{name}"
    for damage in _damages(data):
        assert damage != data
        put(store, key, damage)
        with pytest.raises(errors.CheckpointCorruptError):
            folders(store).read(path)
        with pytest.raises(errors.CheckpointCorruptError):
            read_in_slices(store, path)
    put(store, key, data)
    assert state_of(store, "run/step-7") == 7
    store.delete(key)
    if name != MANIFEST:
        with pytest.raises(errors.CheckpointCorruptError, match="no longer exists"):
            folders(store).read(path)


def read_in_slices(store, path: str) -> None:
    file = folders(store).opened(path)
    while file.read(100_000):
        pass


def put(store, key: str, data: bytes) -> None:
    store.put(key, [memoryview(data)], checksum=store.capabilities.checksum.of(data))


@pytest.mark.parametrize("most", [1024, 3, 2])
def test_slices_are_those_of_the_file(store, monkeypatch, most) -> None:
    """Also of one that has so many blocks that they are joined."""
    monkeypatch.setattr(manifest, "_MOST_BLOCKS", most)
    save(folders(store), "run/step-7", 7)
    data = contents(7)["model_0.pt"]
    blocks = folders(store).existing("run/step-7/model_0.pt").blocks.checksums
    assert len(blocks) == {1024: 6, 3: 3, 2: 2}[most]
    file = folders(store).opened("run/step-7/model_0.pt")
    assert isinstance(file, io.RawIOBase)
    for start, size in ((0, 1), (2**20 - 1, 2), (2_000_000, 1_000_000), (len(data) - 3, 10)):
        assert file.seek(start) == start
        assert file.read(size) == data[start : start + size]


# ---- elsewhere


def test_what_could_not_be_committed_is_refused(store) -> None:
    files = folders(store)
    with pytest.raises(errors.ConfigError, match="temp_dir_prefix"):
        files.written("scratch/a/model.pt")
    write(files, "run/tmp_a", 7)
    with pytest.raises(errors.ConfigError, match="temp_dir_prefix"):
        files.rename_folder("run/tmp_a", "run/step-7")
    with pytest.raises(FileNotFoundError):
        files.rename_folder("run/tmp_a/metadata.pkl", "run/tmp_a/other.pkl")
    assert not [key.key for key in store.list("run/step-7")]


def lose(store, monkeypatch) -> None:
    store.delete(next(info.key for info in store.list("run/step-7/rank_1/")))


def wait(store, monkeypatch) -> None:
    later = time.time() + baseline.LONGEST_SAVE + 60
    monkeypatch.setattr(time, "time", lambda: later)


def put_beside(store, monkeypatch) -> None:
    put(store, "run/tmp_step-7/notes.txt", b"by hand")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lose, errors.CheckpointCorruptError),  # as what a rank has written elsewhere
        (wait, errors.IncompleteSaveError),
        (put_beside, FileExistsError),
    ],
)
def test_a_folder_that_is_not_as_it_was_written_is_not_committed(
    store, monkeypatch, spoil, error
) -> None:
    writer = folders(store)
    write(writer, "run/tmp_step-7", 7)
    spoil(store, monkeypatch)
    with pytest.raises(error):
        writer.rename_folder("run/tmp_step-7", "run/step-7")
    assert state_of(store, "run/step-7") is None


# ---- leftovers


def test_leftovers_are_swept_and_nothing_that_is_committed(store) -> None:
    uri, files = f"{store.root}/run", folders(store)
    save(files, "run/step-1", 1)
    write(files, "run/tmp_step-2", 2)  # killed before the commit
    for name, data in contents(3).items():
        put(store, f"run/plain/{name}", data)
    for place in (uri, f"{uri}/step-1", f"{uri}/step-1/rank_1", f"{uri}/plain"):
        assert not find_leftovers(place, older_than=3600, config=CONFIG).objects
    assert not find_leftovers(f"{uri}/step-1/rank_1", older_than=0, config=CONFIG).objects
    found = sweep(uri, older_than=0, config=CONFIG)
    assert len(found.objects) == 8
    assert {CheckpointURI.parse(one).prefix.split("/")[1] for one in found.objects} == {
        "tmp_step-2",
        "step-2",
    }
    assert state_of(store, "run/step-1") == 1
    assert state_of(store, "run/plain") == 3
    assert folders(store).names("run") == ["plain", "step-1"]


def test_beneath_a_manifest_that_can_not_be_read_nothing_is_swept(store) -> None:
    uri = f"{store.root}/run"
    save(folders(store), "run/step-1", 1)
    put(store, f"run/step-1/{MANIFEST}", b"nonsense")
    found = sweep(uri, older_than=0, config=CONFIG)
    assert not found.objects
    assert f"{uri}/step-1/{MANIFEST}" in found.unread
    folders(store).remove_folder("run/step-1")
    assert not [*store.list("")]


# ---- memory


def test_memory_lasts_if_it_is_that_of_a_tensor_on_the_host() -> None:
    weight = torch.arange(100_000)
    is_memory = is_tensor_memory({"a": [weight.view(torch.uint8)], "b": "text"})
    view = memoryview(weight.numpy()).cast("B")
    assert is_memory(view)
    assert is_memory(view[:1000])
    assert not is_memory(memoryview(bytes(1000)))
    assert not is_memory(view[8:])  # where no tensor begins


def test_what_torch_saves_is_sent_from_where_it_is(store) -> None:
    state = {"w": torch.randn(1_000_000), "small": torch.arange(3)}
    sent = []

    def is_memory(view: memoryview) -> bool:
        sent.append(is_tensor_memory(state)(view))
        return sent[-1]

    files = folders(store)
    with files.written("run/tmp_a/x.pt", is_immutable=is_memory) as file:
        torch.save(state, file)
        assert not torch.serialization.get_crc32_options()
    assert torch.serialization.get_crc32_options()
    assert True in sent
    loaded = torch.load(files.opened("run/tmp_a/x.pt"))
    assert torch.equal(loaded["w"], state["w"])
    assert torch.equal(loaded["small"], state["small"])
