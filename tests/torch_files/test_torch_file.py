"""Files of torch.save in unusual surroundings, with interrupts, and what is told of them."""

import os
import signal
import threading

import pytest
import torch
from torch.utils.serialization import config as torch_config

from cloudckpt import Config, events
from cloudckpt.config import MIB
from cloudckpt.errors import CheckpointCorruptError, CheckpointError, ConnectionLostError
from cloudckpt.stores.registry import open_store
from cloudckpt.torch_files import object_file
from cloudckpt.torch_files.object_file import ObjectFile
from cloudckpt.torch_files.torch_file import load_torch_file, write_torch_file
from cloudckpt.torch_files.written_file import WrittenFile
from cloudckpt.transfer import stats as stats_module
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI
from support.faulty_store import FaultyStore


@pytest.fixture
def uri(tmp_path) -> CheckpointURI:
    return CheckpointURI.parse(tmp_path / "model.pt")


def load(uri: CheckpointURI, map_location="cpu", rank: int = 0):
    stats = TransferStats(str(uri), rank)
    return load_torch_file(uri, Config(), stats, map_location=map_location)


def same(one: dict, other: dict) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


STATE = {"t": torch.arange(300.0), "s": torch.arange(12.0).view(3, 4).t()}


# ---- surroundings


@pytest.mark.parametrize("map_location", ["cpu", None])
def test_a_process_that_maps_its_files_by_default_reads_ours(map_location, uri):
    torch.save(STATE, uri.prefix)
    with torch_config.patch("load.mmap", True):
        assert same(load(uri, map_location), STATE)


def test_the_default_device_is_no_matter(uri):
    with torch.device("meta"):  # stands for "cuda"
        write_torch_file(STATE, uri, Config())
        loaded = load(uri)
    assert same(loaded, STATE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there_does_not_make_the_file_corrupt(uri):
    torch.save(STATE, uri.prefix)
    with pytest.raises(CheckpointError, match="map_location") as caught:
        load(uri, "cuda")
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert "CUDA" in str(caught.value)


@pytest.mark.parametrize("map_location", ["cpu", None])
def test_a_damaged_pickle_is_corrupt_wherever_it_is_loaded_to(map_location, uri):
    torch.save(STATE, uri.prefix)
    with open(uri.prefix, "r+b") as file:
        data = file.read()
        file.seek(data.index(b"data.pkl") + 80)
        file.write(b"\xff" * 40)
    with pytest.raises(CheckpointError, match=r"can't be loaded|can't read"):
        load(uri, map_location)


@pytest.mark.parametrize("error", [UserWarning, MemoryError, torch.OutOfMemoryError])
def test_a_lack_of_memory_is_no_damage(error, uri, monkeypatch):
    torch.save(STATE, uri.prefix)

    def fail(*args, **options):
        raise error("no memory")

    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(error):
        load(uri)
    with pytest.raises(error):
        write_torch_file(STATE, uri, Config())


# ---- interrupts


def interrupt(*args, **options):
    """As Ctrl-C does it: in the main thread, within the call."""
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(5)
    raise AssertionError("no interrupt came")


@pytest.fixture
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_a_save_stays_one_and_leaves_the_old_file(uri, monkeypatch, tmp_path):
    write_torch_file({"old": torch.ones(3)}, uri, Config())
    monkeypatch.setattr(WrittenFile, "_send_slab", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_torch_file({"t": torch.zeros(8 * MIB)}, uri, Config())
    monkeypatch.undo()
    assert same(torch.load(uri.prefix), {"old": torch.ones(3)})
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("map_location", ["cpu", None])
def test_an_interrupt_of_a_load_stays_one(map_location, uri, monkeypatch):
    torch.save({"t": torch.zeros(8 * MIB), "u": torch.zeros(9 * MIB)}, uri.prefix)
    fill, calls = ObjectFile._fill, []

    def third(self, view):
        calls.append(1)
        return interrupt() if len(calls) == 3 else fill(self, view)

    monkeypatch.setattr(ObjectFile, "_fill", third)
    with pytest.raises(KeyboardInterrupt):
        load(uri, map_location)


# ---- events


@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setattr(stats_module, "_BETWEEN_EVENTS", 0.0)
    found: list[events.Event] = []
    unsubscribe = events.subscribe(found.append)
    yield found
    unsubscribe()


def test_all_events_of_a_file_say_which_and_of_whom(uri, heard, monkeypatch):
    real = open_store(uri, Config())
    store = FaultyStore(real)
    store.fail("put", ConnectionLostError, calls=[1])
    store.fail("head", ConnectionLostError, calls=[1])
    store.fail("get_range", ConnectionLostError, calls=[1])
    monkeypatch.setattr(object_file, "open_store", lambda uri, config: store)
    sent = write_torch_file(STATE, uri, Config(), rank=3)
    load(uri, rank=3)
    assert {(event.uri, event.rank) for event in heard} == {(str(uri), 3)}
    phases = [event.phase for event in heard]
    assert phases.count("retry") == 3
    assert {"progress", "upload"} <= set(phases)
    (upload,) = (event for event in heard if event.phase == "upload")
    assert upload.nbytes == sent.nbytes
    assert upload.seconds > 0
    assert max(event.total for event in heard) >= 300 * 4


def test_a_file_that_cant_be_written_is_a_failed_upload(uri, heard):
    with pytest.raises(CheckpointError):
        write_torch_file({"f": lambda: 0}, uri, Config())
    upload = heard[-1]
    assert (upload.phase, upload.failed, upload.detail) == ("upload", True, "CheckpointError")
