"""Which store serves a URI."""

import sys
import threading
import uuid

import pytest
import torch

import cloudckpt
from cloudckpt import Config, S3Options
from cloudckpt.errors import CredentialsError, MissingDependencyError
from cloudckpt.stores import registry
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from dcp.children import in_a_child
from support.memory_store import MemoryStore

MEMORY = CheckpointURI.parse("memory://registry/run")


@pytest.mark.parametrize(
    ("scheme", "extra", "module"),
    [
        ("s3", "s3", "boto3"),
        ("s3", "s3", "botocore"),
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


def test_a_forked_child_opens_its_own_store():
    parents = open_store(MEMORY, Config())

    def work():
        assert open_store(MEMORY, Config()) is not parents

    in_a_child("fork", work)
    assert open_store(MEMORY, Config()) is parents


@pytest.fixture
def opening(monkeypatch):
    """A thread that is amid the opening of a store, as long as a service of credentials is slow;
    its options, what it has opened, and the event that ends it."""
    begun, go_on, opened, config = threading.Event(), threading.Event(), [], Config(connections=5)
    usual = registry._OPENERS["memory"]()

    def slow(uri, given):
        if given == config:
            begun.set()
            assert go_on.wait(30)
        return usual(uri, given)

    monkeypatch.setitem(registry._OPENERS, "memory", lambda: slow)
    uri = CheckpointURI.parse(f"memory://{uuid.uuid4().hex}/run")
    thread = threading.Thread(target=lambda: opened.append(open_store(uri, config)))
    thread.start()
    assert begun.wait(30)
    yield uri, config, opened, go_on
    go_on.set()
    thread.join(60)
    assert len(opened) == 1


def test_a_store_that_is_being_opened_holds_up_no_other_one(opening):
    uri, _, opened, _ = opening
    open_store(uri, Config(connections=7))
    open_store(MEMORY, Config(connections=7))
    assert opened == []


def test_who_wants_a_store_that_is_being_opened_gets_that_one(opening):
    uri, config, opened, go_on = opening
    threading.Timer(0.05, go_on.set).start()
    mine = open_store(uri, config)
    while not opened:
        threading.Event().wait(0.01)
    assert opened == [mine]


def test_a_child_that_is_forked_while_a_store_is_opened_can_save(opening):
    uri, config, _, go_on = opening

    def save():
        go_on.set()
        state = {"w": torch.arange(1000.0)}
        cloudckpt.save(state, checkpoint_id=f"{uri}/child", config=config, no_dist=True)

    in_a_child("fork", save)


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

    in_a_child("fork", work)
    thread.join(30)


def test_a_store_that_could_not_be_opened_is_tried_again(monkeypatch):
    usual, failures = registry._OPENERS["memory"](), [CredentialsError("of nobody")]

    def fail_once(uri, config):
        if failures:
            raise failures.pop()
        return usual(uri, config)

    monkeypatch.setitem(registry._OPENERS, "memory", lambda: fail_once)
    with pytest.raises(CredentialsError):
        open_store(MEMORY, Config(connections=9))
    assert type(open_store(MEMORY, Config(connections=9))) is MemoryStore
