"""Whether the rank that commits sees what the other ranks say they have written.

Ranks may agree on a URI and mean different stores by it: another AWS_ENDPOINT_URL on one node, or a
local path on the disks of two nodes. Each upload then succeeds, and what is committed would be
nowhere whole. How the ranks reach a store proves nothing, since nodes may have gateways of their
own; but an object under a name that one rank has drawn at random, of the size that it says, is only
where that rank has written it.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Collection

from cloudckpt.checkpoint.names import rank_of
from cloudckpt.checkpoint.records import ObjectRecord
from cloudckpt.errors import (
    DifferentCheckpointsError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI

__all__ = ["look_for"]

logger = logging.getLogger("cloudckpt")

_MOST_SINGLE_LOOKS = 64
"""Of more objects a listing tells sooner, with up to 1,000 in an answer."""


def look_for(
    store: ObjectStore,
    uri: CheckpointURI,
    objects: Collection[ObjectRecord],
    group: TaskGroup,
    retrier: Retrier,
) -> None:
    """Has ``group`` look at objects; one that is not there, or has another size, fails it.

    What a listing lacks is looked at by itself before that is believed: listings may be refused,
    and those of network file systems may be old.

    Raises:
        DifferentCheckpointsError: In the task, if an object is not there as it was written.
    """
    missing = list(objects)
    if len(missing) > _MOST_SINGLE_LOOKS:
        seen = _listed(store, uri, missing, retrier)
        missing = [record for record in missing if record.name not in seen]
    for record in missing:
        group.submit(functools.partial(_look_at, store, uri, record, retrier))


def _listed(
    store: ObjectStore, uri: CheckpointURI, objects: Collection[ObjectRecord], retrier: Retrier
) -> set[str]:
    """The names of those that a listing shows as they were written."""
    names = {(uri.key(record.name), record.size): record.name for record in objects}

    def listed() -> set[str]:
        shown = (names.get((info.key, info.size)) for info in store.list(uri.key("__")))
        return set(itertools.islice(filter(None, shown), len(names)))

    try:
        return retrier.call(listed)
    except TransientStoreError:
        raise
    except StoreError as error:
        logger.warning("%d objects are looked at one by one: %s", len(objects), error)
        return set()


def _look_at(
    store: ObjectStore, uri: CheckpointURI, record: ObjectRecord, retrier: Retrier
) -> None:
    try:
        found = retrier.call(lambda: store.head(uri.key(record.name))).size
    except ObjectNotFoundError:
        seen = "is not there for"
    else:
        if found == record.size:
            return
        seen = f"has {found} bytes for"
    raise DifferentCheckpointsError(
        f"rank {rank_of(record.name)} has written {record.name} of {record.size} bytes, which "
        f"{seen} the rank that commits: they write to different stores. Compare on all ranks what "
        "leads to the store: endpoint_url of the options, AWS_ENDPOINT_URL and its like, the "
        "account; for a path, what is mounted there. Nothing was committed",
        uri=str(uri),
    )
