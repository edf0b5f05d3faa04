"""Single objects: whole or not at all, verified, on conditions that the store decides."""

import dataclasses
import io
import random
import uuid
from collections.abc import Callable

import pytest

from cloudckpt import Config, errors
from cloudckpt.config import MIB
from cloudckpt.files import load_file, save_file
from support.memory_store import MemoryStore

from .conftest import RETRY, on

LARGE = random.Random(7).randbytes(12 * MIB + 5)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00\xff{}", memoryview(b"view"), LARGE],
    ids=["empty", "bytes", "view", "large"],
)
def test_what_was_saved_is_loaded(place, data) -> None:
    uri = f"{place.uri}/tokenizer dir/tokenizer.json"
    config = dataclasses.replace(place.config, part_size=5 * MIB)
    version = save_file(uri, data, config=config)
    found = load_file(uri, config=config)
    assert found == data
    assert found.version == version


def test_only_one_of_two_writers_creates_a_file(place) -> None:
    uri, config = f"{place.uri}/lock.json", place.config
    first = save_file(uri, b"first", if_absent=True, config=config)
    with pytest.raises(errors.PreconditionFailedError):
        save_file(uri, b"second", if_absent=True, config=config)
    with pytest.raises(errors.CheckpointExistsError):
        save_file(uri, b"third", config=dataclasses.replace(config, overwrite=False))
    found = load_file(uri, config=config)
    assert found == b"first"
    assert found.version == first


def test_what_was_read_is_replaced_only_if_nobody_else_has_done_so(place) -> None:
    uri, config = f"{place.uri}/config.json", place.config
    save_file(uri, b"1", config=config)
    ours, theirs = load_file(uri, config=config), load_file(uri, config=config)
    newer = save_file(uri, theirs + b"2", if_version=theirs.version, config=config)
    with pytest.raises(errors.PreconditionFailedError):
        save_file(uri, ours + b"3", if_version=ours.version, config=config)
    assert load_file(uri, if_version=newer, config=config) == b"12"
    with pytest.raises(errors.PreconditionFailedError):
        load_file(uri, if_version=ours.version, config=config)


@on["local"]
def test_files_and_streams_are_sent(place, tmp_path) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(LARGE)
    for name, data in (("path", source), ("stream", io.BytesIO(LARGE))):
        save_file(f"{place.uri}/{name}", data, config=place.config)
        assert load_file(f"{place.uri}/{name}", config=place.config) == LARGE
    save_file(f"{place.uri}/new", source, if_absent=True, config=place.config)
    assert load_file(f"{place.uri}/new", config=place.config) == LARGE


@on["memory"]
def test_what_can_be_no_file_is_refused(place, tmp_path) -> None:
    uri, config = f"{place.uri}/x", place.config
    off = dataclasses.replace(config, conditional_writes="off")
    for error, where, data, options in [
        (TypeError, uri, {}, {}),
        (TypeError, uri, "text, or a path", {}),
        (TypeError, uri, "text, or a path", {"if_absent": True}),
        (TypeError, uri, io.StringIO("text"), {}),
        (errors.InvalidURIError, "memory://bucket", b"", {}),
        (errors.InvalidURIError, tmp_path, b"", {}),  # a folder
        (errors.ConfigError, uri, b"", {"if_absent": True, "if_version": "1"}),
        (errors.ConfigError, uri, b"", {"if_absent": True, "config": off}),
    ]:
        with pytest.raises(error):
            save_file(where, data, **{"config": config, **options})
    for error, where in [
        (errors.InvalidURIError, "memory://bucket"),
        (errors.ObjectNotFoundError, uri),
    ]:
        with pytest.raises(error):
            load_file(where, config=config)


# with faults

URI = "memory://faulty/run/file"
CONFIG = Config(retry=RETRY)


class Restless(MemoryStore):
    """Something happens to what was read, so many times."""

    def __init__(self, happening: Callable[[str, memoryview, int], None]) -> None:
        super().__init__(uuid.uuid4().hex)
        self.happening, self.times = happening, 0

    def get_range(self, key, start, into, **options):
        found = super().get_range(key, start, into, **options)
        if self.times > 0:
            self.happening(key, into[0], self.times)
            self.times -= 1
        return found


def test_damaged_bytes_are_fetched_again_and_then_refused(serve, caplog) -> None:
    def rot(key: str, read: memoryview, times: int) -> None:
        read[0] ^= times

    rotten = serve(Restless(rot))
    save_file(URI, b"content", config=CONFIG)
    rotten.times = 1
    assert load_file(URI, config=CONFIG) == b"content"
    assert "read again" in caplog.text
    rotten.times = 255
    with pytest.raises(errors.CheckpointCorruptError, match="checksum"):
        load_file(URI, config=CONFIG)
    unverified = dataclasses.replace(CONFIG, verify=False)
    assert load_file(URI, config=unverified) != b"content"


def test_a_file_that_is_replaced_while_it_is_read_is_of_one_version(serve) -> None:
    def replace(key: str, read: memoryview, times: int) -> None:
        store.put(key, [memoryview(b"newer%d" % times)], checksum=0)

    store = serve(Restless(replace))
    save_file(URI, b"first", config=CONFIG)
    store.times = 1
    assert load_file(URI, config=CONFIG) == b"newer1"
    store.times = 1 << 30
    with pytest.raises(errors.CheckpointReplacedError):
        load_file(URI, config=CONFIG)
