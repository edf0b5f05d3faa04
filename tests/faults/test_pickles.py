"""Checkpoints of somebody who wants his code to run here."""

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import cloudckpt
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError
from support.commit_objects import framed


class Exploit:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path) -> Path:
    """A file that is there once foreign code has run."""
    return tmp_path / "pwned"


def metadata_of(item: str, entry, length: int, **more) -> Metadata:
    index = MetadataIndex(item) if isinstance(entry, BytesStorageMetadata) else None
    index = index or MetadataIndex(item, torch.Size([0]))
    places = {index: StorageInfo("__0_0.distcp", 0, length)}
    return Metadata({item: entry}, None, places, StorageMeta(), **more)


def tensor_entry() -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), [chunk])


def saved_bytes(thing) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


@pytest.fixture
def plant(store):
    """Writes a checkpoint of one item by hand; returns its URI."""

    def plant(metadata, item: bytes) -> str:
        uri = store.uri("run/foreign")
        folder = store.key_of(uri)
        store.put(f"{folder}/__0_0.distcp", item)
        data = metadata if isinstance(metadata, bytes) else framed(metadata)
        store.put(f"{folder}/.metadata", data)
        return uri

    return plant


def hostile_metadata(place: str, mark: Path) -> bytes:
    """Metadata with an exploit in one of its places."""
    exploit = Exploit(mark)
    honest = metadata_of("w", tensor_entry(), len(saved_bytes(torch.ones(4))))
    if place == "instead":
        return pickle.dumps(exploit)
    if place == "appended":
        return pickle.dumps(exploit, protocol=2)[:-1] + b"0" + pickle.dumps(honest, protocol=2)[2:]
    if place == "entry":
        honest.state_dict_metadata["x"] = exploit
    elif place == "planner data":
        honest.planner_data = exploit
    elif place == "storage data":
        honest.storage_data["x"] = exploit
    elif place == "save id":
        honest.storage_meta.save_id = exploit
    return pickle.dumps(honest)


class TestMetadata:
    @pytest.mark.parametrize(
        "place", ["instead", "entry", "planner data", "storage data", "save id"]
    )
    def test_code_in_the_metadata_does_not_run(self, plant, direct, mark, place):
        uri = plant(hostile_metadata(place, mark), saved_bytes(torch.ones(4)))
        with pytest.raises(UntrustedPickleError, match="trust_pickle=True") as caught:
            cloudckpt.load({"w": torch.zeros(4)}, checkpoint_id=uri, config=direct)
        assert not mark.exists()
        assert caught.value.uri == f"{uri}/.metadata"
        assert "touch" in str(caught.value) or "getattr" in str(caught.value)

    def test_the_exploit_is_alive_for_whoever_trusts_it(self, plant, direct, mark):
        uri = plant(hostile_metadata("planner data", mark), saved_bytes(torch.ones(4)))
        state = {"w": torch.zeros(4)}
        cloudckpt.load(state, checkpoint_id=uri, config=direct, trust_pickle=True)
        assert mark.exists()
        assert torch.equal(state["w"], torch.ones(4))

    @pytest.mark.parametrize(
        "name", ["../other/__0_0.distcp", "/etc/passwd", "a/../../b", "./x", "a//b", "a\nb", ""]
    )
    def test_metadata_that_leads_out_of_the_checkpoint_is_refused(self, plant, direct, name):
        metadata = metadata_of("w", tensor_entry(), 10)
        metadata.storage_data = {index: StorageInfo(name, 0, 10) for index in metadata.storage_data}
        uri = plant(metadata, saved_bytes(torch.ones(4)))
        with pytest.raises(CheckpointCorruptError, match="outside of the checkpoint"):
            cloudckpt.load({"w": torch.zeros(4)}, checkpoint_id=uri, config=direct)

    def test_a_save_over_it_runs_no_code_and_deletes_nothing_elsewhere(
        self, plant, store, direct, mark
    ):
        """A save reads the metadata that it replaces, to delete that checkpoint's objects."""
        outside = store.key_of(store.uri("run/other/precious"))
        store.put(outside, b"precious")
        metadata = metadata_of("w", tensor_entry(), 10)
        metadata.storage_data = {
            index: StorageInfo("../other/precious", 0, 10) for index in metadata.storage_data
        }
        metadata.planner_data = Exploit(mark)
        uri = plant(metadata, b"x")
        cloudckpt.save({"w": torch.ones(4)}, checkpoint_id=uri, config=direct)
        assert not mark.exists()
        assert store.get(outside) == b"precious"
        state = {"w": torch.zeros(4)}
        cloudckpt.load(state, checkpoint_id=uri, config=direct)
        assert torch.equal(state["w"], torch.ones(4))

    @pytest.mark.parametrize(
        "names", [[".metadata"], ["__0.metadata"], ["deeper/.metadata", "deeper/__0_0.distcp"]]
    )
    def test_a_save_over_it_deletes_nothing_but_data(self, plant, store, direct, names):
        """Else the metadata that is replaced could name its successor as data of its own."""
        metadata = metadata_of("w", tensor_entry(), 10)
        metadata.storage_data = {
            MetadataIndex("w", torch.Size([n])): StorageInfo(name, 0, 10)
            for n, name in enumerate(names)
        }
        uri = plant(metadata, b"x")
        others = [f"{store.key_of(uri)}/{name}" for name in names if name != ".metadata"]
        for key in others:
            store.put(key, b"precious")
        cloudckpt.save({"w": torch.ones(4)}, checkpoint_id=uri, config=direct)
        assert [store.get(key) for key in others] == [b"precious"] * len(others)
        state = {"w": torch.zeros(4)}
        cloudckpt.load(state, checkpoint_id=uri, config=direct)
        assert torch.equal(state["w"], torch.ones(4))


class TestItems:
    def test_code_in_an_item_does_not_run(self, store, direct, mark):
        uri = store.uri("run/items")
        cloudckpt.save({"x": Exploit(mark)}, checkpoint_id=uri, config=direct)
        with pytest.raises(UntrustedPickleError, match="trust_pickle=True") as caught:
            cloudckpt.load({"x": None}, checkpoint_id=uri, config=direct)
        assert not mark.exists()
        assert caught.value.item == "x"
        cloudckpt.load({"x": None}, checkpoint_id=uri, config=direct, trust_pickle=True)
        assert mark.exists(), "the exploit must be a real one"
