"""Which store serves a URI."""

import dataclasses
import os
import sys
import threading
import traceback

import pytest
import torch

import cloudckpt
from cloudckpt import Config, S3Options
from cloudckpt.errors import CredentialsError, MissingDependencyError
from cloudckpt.stores import registry
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from support.memory_store import MemoryStore

MEMORY = CheckpointURI.parse("memory://registry/run")


@pytest.mark.parametrize(
    ("location", "kind"), [("memory://registry/run", MemoryStore), ("/data/run", LocalStore)]
)
def test_the_scheme_chooses_the_store(location, kind):
    assert type(open_store(CheckpointURI.parse(location), Config())) is kind


@pytest.mark.parametrize(
    ("scheme", "extra", "module"),
    [
        ("s3", "s3", "boto3"),
        ("gs", "gcs", "google.auth"),
        ("az", "azure", "azure.storage.blob"),
        ("az", "azure", "azure.identity"),
    ],
)
def test_a_store_without_its_packages_says_what_to_install(monkeypatch, scheme, extra, module):
    for name in [name for name in sys.modules if name.startswith(f"cloudckpt.stores.{extra}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'cloudckpt\[{extra}\]'"):
        open_store(CheckpointURI.parse(f"{scheme}://no-packages/run"), Config())


@pytest.mark.parametrize(
    ("location", "config"),
    [
        ("memory://registry-2/run", Config()),
        ("memory://registry/run", Config(connections=3)),
        ("memory://registry/run", Config(s3=S3Options(region="eu-west-1"))),
    ],
)
def test_another_bucket_or_other_options_have_another_store(location, config):
    assert open_store(CheckpointURI.parse(location), config) is not open_store(MEMORY, Config())


forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def in_child(work):
    """Does it in a forked child, and tells what failed there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            work()
            failed = 0
        except BaseException:  # noqa: BLE001 - told to the parent
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(failed)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert told.read() == ""
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@forks
def test_a_forked_child_opens_its_own_store():
    parents = open_store(MEMORY, Config())

    def work():
        assert open_store(MEMORY, Config()) is not parents

    in_child(work)
    assert open_store(MEMORY, Config()) is parents


class Slow:
    """A way to credentials that takes as long as the test wants, as that over a network may."""

    def __init__(self, path):
        self.begun, self.go_on = path / "begun", path / "go on"
        script = path / "process.py"
        script.write_text(
            "import json, os, pathlib, sys, time\n"
            f"pathlib.Path({str(self.begun)!r}).touch()\n"
            f"while not os.path.exists({str(self.go_on)!r}):\n"
            "    time.sleep(0.02)\n"
            "key = {'AccessKeyId': 'testing', 'SecretAccessKey': 'testing'}\n"
            "print(json.dumps({'Version': 1, **key}))\n"
        )
        self.config = path / "config"
        self.config.write_text(f"[profile slow]\ncredential_process = {sys.executable} {script}\n")

    def release(self):
        self.go_on.touch()


@pytest.fixture
def slow(tmp_path, monkeypatch):
    one = Slow(tmp_path)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(one.config))
    yield one
    one.release()


@pytest.fixture
def opening(slow, bucket, s3_url):
    """A thread that is amid the opening of a store; its options, and what it has opened."""
    options = S3Options(endpoint_url=s3_url, addressing_style="path", profile="slow")
    uri, config, opened = CheckpointURI.parse(f"s3://{bucket}/run"), Config(s3=options), []
    thread = threading.Thread(target=lambda: opened.append(open_store(uri, config)))
    thread.start()
    while not slow.begun.exists():
        assert thread.is_alive()
        thread.join(0.01)
    yield uri, config, opened
    slow.release()
    thread.join(60)
    assert len(opened) == 1


def test_a_store_that_is_being_opened_holds_up_no_other_one(opening, s3_config):
    uri, _, opened = opening
    open_store(uri, s3_config)
    open_store(MEMORY, Config(connections=7))
    assert opened == []


def test_who_wants_a_store_that_is_being_opened_gets_that_one(opening, slow):
    uri, config, opened = opening
    mine = []
    thread = threading.Thread(target=lambda: mine.append(open_store(uri, config)))
    thread.start()
    thread.join(0.05)
    slow.release()
    thread.join(60)
    while not opened:
        threading.Event().wait(0.01)
    assert mine == opened


@forks
def test_a_child_that_is_forked_while_credentials_are_fetched_can_save(opening, slow, s3_url):
    uri, config, _ = opening

    def save():
        slow.release()
        torch.set_num_threads(1)
        state = {"w": torch.arange(1000.0)}
        cloudckpt.save(state, checkpoint_id=f"{uri}/child", config=config, no_dist=True)

    in_child(save)


@forks
def test_a_fork_waits_for_an_import_that_its_child_would_wait_for(monkeypatch):
    """The child of a fork amid an import would find the module half made, and locked for good."""
    importing, may_end = threading.Event(), threading.Event()
    original = registry._OPENERS["memory"]

    def load():
        importing.set()
        assert may_end.wait(30)
        return original()

    monkeypatch.setitem(registry._OPENERS, "memory", load)
    uri = CheckpointURI.parse("memory://registry-fork/run")
    thread = threading.Thread(target=open_store, args=(uri, Config()))
    thread.start()
    assert importing.wait(30)
    ended = []
    timer = threading.Timer(0.2, lambda: (ended.append(True), may_end.set()))
    timer.start()

    def work():
        registry._OPENERS["memory"] = original
        open_store(uri, Config())
        assert ended

    in_child(work)
    thread.join(30)


def test_a_store_that_could_not_be_opened_is_tried_again(monkeypatch, bucket, s3_config):
    uri = CheckpointURI.parse(f"s3://{bucket}/run")
    config = dataclasses.replace(s3_config, connections=9)
    monkeypatch.setenv("AWS_PROFILE", "of-nobody")
    with pytest.raises(CredentialsError, match="of-nobody"):
        next(open_store(uri, config).list(""), None)
    monkeypatch.delenv("AWS_PROFILE")
    assert next(open_store(uri, config).list(""), None) is None
