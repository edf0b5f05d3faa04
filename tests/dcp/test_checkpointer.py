"""``SyncCheckpointer`` and ``AsyncCheckpointer``: one object for a job."""

import logging

import pytest
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import hf
from cloudckpt.checkpointer import (
    CheckpointerConfig,
    CommitHook,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from cloudckpt.errors import ClosedError, CloudCheckpointError, ConfigError

from .places import Place
from .values import assert_same, numbered

WAYS = {
    "save": lambda place: make_sync_checkpointer(config_of(place)).save(place.uri, state()),
    "load": lambda place: make_sync_checkpointer(config_of(place)).load(place.uri, state()),
    "save a model": lambda place: hf.save({"step": 1}, place.uri, config=place.config),
    "load a model": lambda place: hf.load(state()["model"], place.uri),
}


def config_of(place: Place, **options) -> CheckpointerConfig:
    return CheckpointerConfig(config=place.config, **options)


def state(first: int = 0) -> dict:
    return {
        "model": {"weight": numbered(200, first=first), "bias": numbered(7, first=first + 500)},
        "history": [numbered(3, first=first), {"loss": 0.5 + first}],
        "step": first,
    }


class Noting(CommitHook):
    """Logs what it is told."""

    def before_commit(self, uri, metadata):
        logging.getLogger("hook").warning("before %s", uri)

    def after_commit(self, uri, metadata):
        logging.getLogger("hook").warning("after %s: %d places", uri, len(metadata.storage_data))


class Failing(CommitHook):
    def after_commit(self, uri, metadata):
        raise ArithmeticError("too late")


@pytest.mark.parametrize(
    "options", [{"strict": True}, {"state_dict": {}, "default_map_location": "cpu"}]
)
def test_options_of_a_load_that_do_not_fit_together_are_refused(local, options):
    with make_sync_checkpointer(config_of(local)) as checkpointer, pytest.raises(ConfigError):
        checkpointer.load(local.uri, **options)


@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_hooks_are_called_around_the_commit(local, kind, caplog):
    config = config_of(local, kind=kind, commit_hook=Noting())
    with make_async_checkpointer(config) as checkpointer:
        checkpointer.save(local.uri, state())
    told = [record.getMessage() for record in caplog.records if record.name == "hook"]
    assert told == [f"before {local.uri}", f"after {local.uri}: 5 places"]


def test_a_hook_after_the_commit_undoes_nothing(local, caplog):
    with make_sync_checkpointer(config_of(local, commit_hook=Failing())) as checkpointer:
        checkpointer.save(local.uri, state(2))
        assert_same(checkpointer.load(local.uri), state(2))
    assert "the checkpoint is committed" in caplog.text


@pytest.mark.parametrize("make", [make_sync_checkpointer, make_async_checkpointer])
def test_a_closed_checkpointer_says_so(local, make):
    checkpointer = make(config_of(local))
    checkpointer.close()
    with pytest.raises(ClosedError):
        checkpointer.save(local.uri, state())
    with pytest.raises(ClosedError):
        checkpointer.load(local.uri)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_says_what_failed_and_where(local, way):
    place = local.having(overwrite=False)
    if way == "save":
        place.save(state())
    with pytest.raises(CloudCheckpointError) as caught:
        WAYS[way](place)
    action = "save to" if way.startswith("save") else "load from"
    assert caught.value.action == f"{action} {place.uri}"
