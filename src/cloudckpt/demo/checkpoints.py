"""Which checkpoints of a run there are, and how its traces are removed."""

from __future__ import annotations

from functools import partial

from cloudckpt.checkpoint.objects import METADATA
from cloudckpt.config import Config
from cloudckpt.transfer.deleting import delete_each
from cloudckpt.transfer.opening import open_store
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI

__all__ = ["abort_uploads", "committed", "delete_objects"]


def committed(run: CheckpointURI) -> list[CheckpointURI]:
    """The checkpoints beneath ``run``, oldest first.

    A checkpoint exists if and only if its ``.metadata`` does; what an interrupted save has left
    behind is none.
    """
    config = Config()
    store, retrier = open_store(run, config), Retrier(config.retry)
    below = run.key("")
    found = retrier.call(lambda: list(store.list(below)))
    names = [info.key.removeprefix(below).split("/") for info in found]
    return [run.join(name[0]) for name in sorted(names) if len(name) == 2 and name[1] == METADATA]


def abort_uploads(run: CheckpointURI) -> None:
    """Discards the uploads that killed ranks did not finish; a store bills them until then."""
    config = Config()
    store, retrier = open_store(run, config), Retrier(config.retry)
    for upload in retrier.call(lambda: list(store.list_uploads(run.key("")))):
        retrier.call(partial(store.abort_upload, upload))


def delete_objects(run: CheckpointURI) -> None:
    """Deletes all objects beneath ``run``."""
    config = Config()
    store, retrier = open_store(run, config), Retrier(config.retry)
    below = run.key("")
    keys = [info.key for info in retrier.call(lambda: list(store.list(below)))]
    if left := delete_each(store, keys, config.retry, threads=config.connections):
        raise next(iter(left.values()))
