"""Runs all checks of a location, in order."""

from __future__ import annotations

from collections.abc import Callable

from cloudckpt.config import Config, config_or_default
from cloudckpt.doctor import surroundings
from cloudckpt.doctor.findings import Checks, Finding, Test, failed, ok, skipped
from cloudckpt.doctor.trials import NEEDS, Trials
from cloudckpt.errors import ConfigError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.registry import checkpoint_location, open_store
from cloudckpt.stores.rest import RestStore
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["examine"]

_SIZE = 16 * 1024 * 1024
_LARGEST = 1024 * 1024 * 1024


def examine(
    location: URILike,
    *,
    config: Config | None = None,
    size: int = _SIZE,
    read_only: bool = False,
    patience: float = 60.0,
    tell: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Checks whether a location can be saved to and loaded from, and returns the findings.

    A failed check is a finding, not an error; the checks that are still possible continue. Test
    objects have names beginning with ``.cloudckpt-doctor.`` and are deleted at the end, also after
    an interrupt; those that can't be deleted are reported. No finding shows credentials.

    Args:
        location: Where checkpoints will be, for example ``s3://bucket/run``.
        config: Options; by default those of the environment.
        size: Bytes of the object that measures the speed, from 1 to 2**30.
        read_only: Whether to write nothing, for users that may only load.
        patience: Seconds, more than 0, after which a check is interrupted and counts as failed.
        tell: Called with each finding as soon as its check has ended.

    Returns:
        The findings, in the order of the checks.

    Raises:
        ConfigError: If ``size``, ``patience`` or an option is not valid.
        InvalidURIError: If ``location`` is not a valid location.
    """
    if not 1 <= size <= _LARGEST:
        raise ConfigError(f"size={size}: write a number of bytes from 1 to {_LARGEST} (1 GiB)")
    if patience <= 0:
        raise ConfigError(f"patience={patience}: write more than 0 seconds")
    uri, config = checkpoint_location(location), config_or_default(config)
    checks = Checks(tell, patience)
    checks.add("location", ok(f"{uri}", values={"scheme": uri.scheme}))
    store = _connected(checks, uri, config)
    if store is not None and not checks.hopeless:
        _run_trials(checks, Trials(store, uri, config, size), uri, store, read_only)
    else:
        checks.add("list", skipped("no tests in the bucket, because of the failure above"))
    return checks.findings


def _connected(checks: Checks, uri: CheckpointURI, config: Config) -> ObjectStore | None:
    """Checks credentials, endpoint and connection; returns the store, or None if opening fails."""
    opened: list[ObjectStore] = []

    def log_in(retrier: Retrier) -> Finding:
        store = retrier.call(lambda: open_store(uri, config))
        found = ok("none are needed on this machine")
        if isinstance(store, RestStore):
            found = surroundings.credentials(retrier.call(store.origin))
        opened.append(store)
        return found

    checks.run("credentials", log_in)
    if not opened:
        return None
    [store] = opened
    if not isinstance(store, RestStore):
        checks.add("endpoint", ok("none: the location is on this machine"))
        return store
    access = store.access
    checks.run("endpoint", lambda retrier: surroundings.endpoint(access))
    http = HttpClient(access.http_options)
    try:
        checks.run(
            "connection",
            lambda retrier: retrier.call(lambda: surroundings.connection(access, http)),
            is_vital=True,
            interrupt=http.interrupt,
        )
    finally:
        http.close()
    return store


def _run_trials(
    checks: Checks, trials: Trials, uri: CheckpointURI, store: ObjectStore, read_only: bool
) -> None:
    reading: dict[str, Test] = {"list": trials.list, "read": trials.read}
    writing: dict[str, Test] = {
        "list": trials.list,
        "write": trials.write,
        "read": trials.read,
        "conditions": trials.conditions,
        "checksums": trials.checksums,
        "multipart": trials.multipart,
        "speed": trials.speed,
    }
    try:
        for name, call in (reading if read_only else writing).items():
            if checks.hopeless:
                checks.add(name, skipped("not tried, because of the failure above"))
                continue
            needs = NEEDS.get(name, NEEDS["write"]).get(uri.scheme, "")
            is_vital = name == "list"
            checks.run(name, call, needs=needs, is_vital=is_vital, interrupt=store.interrupt)
    finally:
        if trials.keys:
            try:
                checks.add("clean-up", trials.clean())
            except BaseException:  # a second interrupt
                advice = f"delete the objects that begin with {trials.start} yourself"
                checks.add(
                    "clean-up", failed("interrupted before the test objects were deleted", advice)
                )
                raise
