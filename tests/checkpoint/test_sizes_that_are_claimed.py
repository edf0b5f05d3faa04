"""What is in the place of metadata may be of any size: it is refused before memory is taken."""

import json
import os
import tracemalloc

import pytest
import torch

import cloudckpt
from cloudckpt import Config
from cloudckpt.checkpoint.file_folder import MANIFEST
from cloudckpt.checkpoint.objects import keep_name
from cloudckpt.checkpoint.references import protected
from cloudckpt.checksum import CRC32C, Blocks
from cloudckpt.errors import CheckpointCorruptError, ObjectTooLargeError
from cloudckpt.integrations.torch_checkpointing.manifest import (
    StoredFile,
    read_record,
    record_bytes,
)
from cloudckpt.integrations.torch_checkpointing.visible import VisibleFiles
from cloudckpt.stores.local import LocalStore
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI

PLACES = {
    ".metadata": 1 << 34,
    "model.safetensors": 1 << 40,  # its header claims as much
    "model.safetensors.index.json": 1 << 30,
}


@pytest.fixture
def large(tmp_path):
    """Makes a file that has its size by name only."""

    def make(name, size):
        with open(tmp_path / name, "wb") as file:
            file.write(b"\xff\xff\xff\xff\x00\x00\x00\x00")
            os.truncate(file.fileno(), size)
        return str(tmp_path / name)

    tracemalloc.start()
    yield make
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 * 1024**2


@pytest.mark.parametrize("name", PLACES)
def test_a_load_is_refused(large, tmp_path, name):
    large(name, PLACES[name])
    with pytest.raises((ObjectTooLargeError, CheckpointCorruptError)) as caught:
        cloudckpt.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path)
    assert caught.value.uri.endswith(name)


def test_a_manifest_of_files_is_refused(large, tmp_path):
    large(MANIFEST, 1 << 30)
    config = Config()
    files = VisibleFiles(LocalStore(), "0" * 16, Retrier(config.retry))
    with pytest.raises(ObjectTooLargeError):
        files.manifest(str(tmp_path))


@pytest.mark.parametrize("content", [None, b"[" * 50_000])
def test_a_mark_counts_as_that_of_an_uncommitted_save(large, tmp_path, content):
    uri = CheckpointURI.parse(tmp_path)
    path = large(keep_name("0" * 16), 1 << 30)
    if content is not None:
        with open(path, "wb") as file:
            file.write(content)
    keys = {str(tmp_path / "object")}
    assert protected(LocalStore(), uri, {uri.folder: keys}, Config()) == keys


DEEP = b"[" * 100_000  # valid JSON so far, and deeper than Python parses


def sealed(line: bytes) -> bytes:
    return line + f"{CRC32C.of(line):08x}\n".encode()


@pytest.mark.parametrize(
    "changes",
    [
        *({"size": 1 << 62}, {"size": float("inf")}, {"size": -4}, {"block_size": 0}),
        *({"blocks": "?!"}, {"checksum": "1"}, {"version": 2}, {"object": "../b"}, None),
    ],
    ids=str,
)
def test_a_record_of_a_file_that_makes_no_sense_is_refused(changes):
    good = record_bytes(StoredFile(key="a", size=0, blocks=Blocks(CRC32C, 4, ())))
    assert read_record(good, "file:///x").size == 0
    described = json.loads(good[:-9])
    line = DEEP if changes is None else json.dumps(described | changes).encode()
    with pytest.raises(CheckpointCorruptError):
        read_record(sealed(line + b"\n"), "file:///x")
