"""The commit: one conditional write of ``.metadata`` makes a checkpoint visible, or nothing does.

Before the first data byte the coordinator notes which version of ``.metadata`` is there, if any.
At the end it writes its own on the condition that nothing has changed: ``if_absent`` for a new
checkpoint, ``if_version`` for a replacement. Of two writers that race, one wins and the other is
told; a process that was thought dead and comes back late can't overwrite its successor.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass

from cloudckpt.config import Switch
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointExistsError,
    CommitUnknownError,
    ConfigError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.retry import Retrier

__all__ = ["Baseline", "Probe", "begin", "commit", "conditions_work"]

logger = logging.getLogger("cloudckpt")

_NO_VERSION = '"00000000000000000000000000000000"'


@dataclass(frozen=True)
class Probe:
    """An object to try conditional writes on: its key, and what it holds."""

    key: str
    content: bytes


@dataclass(frozen=True)
class Baseline:
    """What was there when the save began.

    Attributes:
        key: The commit object.
        version: Its version, or None if there was none.
    """

    key: str
    version: str | None


def begin(store: ObjectStore, key: str, *, overwrite: bool, retrier: Retrier) -> Baseline:
    """Looks for a checkpoint that is there already.

    Raises:
        CheckpointExistsError: If there is one and it must not be overwritten.
    """
    try:
        version: str | None = retrier.call(lambda: store.head(key)).version
    except ObjectNotFoundError:
        version = None
    if version is not None and not overwrite:
        raise CheckpointExistsError(
            "Checkpoint already exists and overwrite is off: choose another location, or allow it "
            "with Config(overwrite=True)",
            uri=store.uri(key),
        )
    return Baseline(key, version)


def conditions_work(store: ObjectStore, setting: Switch, probe: Probe, retrier: Retrier) -> bool:
    """Whether the commit may rely on conditional writes.

    Args:
        store: The store.
        setting: The user's word; ``auto`` believes the vendor's documentation where there is one
            and tries it out otherwise, once for a store.
        probe: An object of this save, which may be written again.
        retrier: For transient failures of the trial.

    Raises:
        ConfigError: If the store ignores conditions and the user has not accepted that.
    """
    if setting == "off":
        logger.warning(
            "%s: conditional writes are off; concurrent writers of one checkpoint are not detected",
            store.root,
        )
        return False
    if setting == "on" or store.capabilities.conditional_writes:
        return True
    if store.capabilities.conditional_writes is None:
        found = _honours_conditions(store, probe, retrier)
        store.capabilities = dataclasses.replace(store.capabilities, conditional_writes=found)
        if found:
            return True
    raise ConfigError(
        "the store ignores conditional writes (If-None-Match, If-Match), which protect a commit "
        "from concurrent writers. If only one job ever writes to a location, set "
        "Config(conditional_writes='off') or CLOUDCKPT_CONDITIONAL_WRITES=off",
        uri=store.root,
    )


def _honours_conditions(store: ObjectStore, probe: Probe, retrier: Retrier) -> bool:
    """Writes the object again: twice on conditions that do not hold, once on one that does."""
    body = [memoryview(probe.content)]
    checksum = store.capabilities.checksum.of(probe.content)

    def put(*, if_absent: bool = False, if_version: str | None = None) -> None:
        store.put(probe.key, body, checksum=checksum, if_absent=if_absent, if_version=if_version)

    try:
        for condition in ({"if_absent": True}, {"if_version": _NO_VERSION}):
            try:
                retrier.call(functools.partial(put, **condition))
            except PreconditionFailedError:
                continue
            return False
        # the version is asked for at each try: one whose answer was lost may have changed it
        retrier.call(lambda: put(if_version=store.head(probe.key).version))
    except (PreconditionFailedError, InvalidRequestError):
        return False  # the condition that holds was not recognized, or conditions are refused
    return True


def commit(
    store: ObjectStore, baseline: Baseline, data: bytes, *, conditional: bool, retrier: Retrier
) -> None:
    """Makes the checkpoint visible, in a single request.

    A try fails for certain only if the store itself says so (:class:`StoreError`). Of all others
    nobody knows: a gateway may answer 503 and have the request carried out seconds later, when the
    commit object was looked for and not found. If there was one such try, the checkpoint must be
    there, or another writer's be proof that it can't appear any more; else its data is needed.

    Raises:
        CheckpointConflictError: If another writer has committed. Nothing of this save is visible,
            nor will be.
        CommitUnknownError: If it can't be found out whether the commit took place, or will.
        StoreError: If it certainly did not, and will not.
    """
    key, body = baseline.key, [memoryview(data)]
    checksum = store.capabilities.checksum.of(data)
    absent = conditional and baseline.version is None
    version = baseline.version if conditional else None
    uncertain = False

    def put() -> None:
        nonlocal uncertain
        try:
            store.put(key, body, checksum=checksum, if_absent=absent, if_version=version)
        except StoreError as error:
            uncertain = uncertain or not error.certain
            raise

    try:
        retrier.call(put)
    except StoreError as error:
        overtaken = conditional and isinstance(error, PreconditionFailedError)
        if uncertain:
            is_ours, found = _found(store, key, data, error, retrier)
            if is_ours:
                return
            if not overtaken or found == baseline.version:
                raise _unknown(store, key, error) from error
        if not overtaken:
            raise
        raise CheckpointConflictError(
            "another writer has committed to this location since this save began; this save is "
            "discarded and theirs is kept",
            uri=store.uri(key),
            cause=error,
        ) from error


def _found(
    store: ObjectStore, key: str, data: bytes, failure: StoreError, retrier: Retrier
) -> tuple[bool, str | None]:
    """Whether the commit object holds ``data`` now, and its version; None if there is no object.

    A store that tells the checksum of an object is believed, as it says what is there now: its
    bytes may come from a cache that keeps those of the checkpoint before.

    Raises:
        CommitUnknownError: If the store does not answer.
    """
    try:
        info = retrier.call(lambda: store.head(key))
        if info.checksum is not None:
            checksum = store.capabilities.checksum.of(data)
            return (info.size, info.checksum) == (len(data), checksum), info.version
        held, info = retrier.call(lambda: store.get(key))
    except StoreError as error:
        if isinstance(error, ObjectNotFoundError) and error.certain:
            return False, None
        raise _unknown(store, key, failure) from error
    return held == data, info.version


def _unknown(store: ObjectStore, key: str, error: StoreError) -> CommitUnknownError:
    return CommitUnknownError(
        "the store itself did not say whether it carried out the commit, which may have taken "
        "place or take place yet; look whether this checkpoint is there before you go on. Its data "
        "was kept",
        uri=store.uri(key),
        cause=error,
    )
