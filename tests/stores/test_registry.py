"""Which store serves a URI."""

import dataclasses
import os

import pytest

from cloudckpt import CheckpointURI, Config, S3Options
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.stores.registry import open_store

MEMORY = CheckpointURI.parse("memory://registry/run")


@pytest.mark.parametrize(
    ("location", "kind"), [("memory://registry/run", MemoryStore), ("/data/run", LocalStore)]
)
def test_the_scheme_chooses_the_store(location, kind):
    assert type(open_store(CheckpointURI.parse(location), Config())) is kind


def test_a_bucket_has_one_store_for_equal_options():
    one = open_store(MEMORY, Config())
    assert open_store(CheckpointURI.parse("memory://registry/other/run"), Config()) is one


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


def test_options_with_tags_open_a_store():
    options = S3Options(tags={"team": "nlp"})
    config = dataclasses.replace(Config(), s3=options)
    assert isinstance(open_store(MEMORY, config), MemoryStore)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_opens_its_own_store():
    parents = open_store(MEMORY, Config())
    child = os.fork()
    if child == 0:
        shared = True
        try:
            shared = open_store(MEMORY, Config()) is parents
        finally:
            os._exit(shared)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert open_store(MEMORY, Config()) is parents
