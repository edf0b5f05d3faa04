"""What passes between regions is told, or refused, before any data are moved."""

import logging
import uuid

import pytest
import torch

import cloudckpt
from cloudckpt.config import MIB, Config
from cloudckpt.errors import ConfigError
from cloudckpt.stores import registry
from cloudckpt.stores.base import Regions
from cloudckpt.transfer.regions import check_regions
from support.memory_store import MemoryStore

GIB = 1024 * MIB


class Elsewhere(MemoryStore):
    """A stub: a bucket of which it is known where it is once it was asked for something."""

    def __init__(self, name, bucket="eu-west-3"):
        super().__init__(name)
        self._asked = False
        self._where = bucket

    def get_range(self, *args, **kwargs):
        self._asked = True
        return super().get_range(*args, **kwargs)

    def regions(self):
        return Regions("us-east-1", self._where) if self._asked else None


def elsewhere(bucket="eu-west-3"):
    store = Elsewhere(uuid.uuid4().hex, bucket)
    store._asked = True
    return store


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_large_transfer_between_regions_is_told_once(caplog):
    store = elsewhere()
    for _ in range(2):
        check_regions(store, Config(), GIB + 1)
    (told,) = warnings(caplog)
    assert all(text in told for text in ("us-east-1", "eu-west-3", store.uri(""), "AWS_REGION"))


@pytest.mark.parametrize(
    ("store", "config", "nbytes"),
    [
        (elsewhere(), Config(), GIB),
        (elsewhere(), Config(cross_region="allow"), 10 * GIB),
        (elsewhere("us-east-1"), Config(), 10 * GIB),
        (elsewhere("us-east-1"), Config(cross_region="refuse"), 10 * GIB),
        (elsewhere(), Config(cross_region="refuse"), 0),
        (MemoryStore("somewhere"), Config(cross_region="refuse"), 10 * GIB),
    ],
    ids=["little", "allowed", "at home", "at home, refused", "nothing", "nobody knows"],
)
def test_other_transfers_go_without_a_word(caplog, store, config, nbytes):
    check_regions(store, config, nbytes)
    assert warnings(caplog) == []


@pytest.fixture
def place(monkeypatch):
    """A location whose store finds out at the first look that it is elsewhere."""
    name = uuid.uuid4().hex
    store = Elsewhere(name)
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: store})
    return f"memory://{name}/run"


def test_a_save_and_a_load_are_refused_before_any_data_are_moved(place):
    refuses = Config(cross_region="refuse")
    state = {"weight": torch.arange(100_000.0)}
    with pytest.raises(ConfigError, match=r"eu-west-3.*us-east-1.*cross_region='allow'"):
        cloudckpt.save(state, checkpoint_id=place, config=refuses)
    store = registry.open_store(cloudckpt.uri.CheckpointURI.parse(place), refuses)
    assert [*store.list("")] == []

    cloudckpt.save(state, checkpoint_id=place)
    target = {"weight": torch.zeros(100_000)}
    with pytest.raises(ConfigError, match=r"eu-west-3.*us-east-1.*cross_region='allow'"):
        cloudckpt.load(target, checkpoint_id=place, config=refuses)
    assert not target["weight"].any()
