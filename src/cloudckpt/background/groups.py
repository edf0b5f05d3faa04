"""Opens process groups for savers, and keeps the groups of closed savers for reuse.

A closed saver's group is kept, not destroyed. torch names a new group by the number of groups: once
one is destroyed, the next may get its name, read the addresses that it left in the store, and wait
for connections that nobody accepts (torch 2.13). The groups end with the default group.
"""

from __future__ import annotations

import functools
import json
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import Store, groups_joined, set_group_timeout
from cloudckpt.errors import ConfigError, ProcessGroupError
from cloudckpt.fork import module_lock

__all__ = ["START_TIMEOUT", "exists", "give_back", "open_group"]

START_TIMEOUT = 300.0
"""Seconds in which all ranks must make a group, and a saving process must be ready."""


_CONNECT, _CONNECT_EACH = 30.0, 0.1
"""Seconds, and extra seconds per rank, within which ranks must connect once all have arrived."""

_LONGEST_PAUSE = 1.0
"""Maximum seconds between two checks of the store for ranks that are late."""


@dataclass
class _Kept:
    """The groups that savers have opened beside one default group.

    Attributes:
        free: Groups that no saver uses.
        opened: For each set of ranks, how often savers have opened a group of these ranks.
    """

    free: list[dist.ProcessGroup] = field(default_factory=list)
    opened: dict[tuple[int, ...], int] = field(default_factory=dict)


_lock = module_lock()
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, _Kept] = weakref.WeakKeyDictionary()


def open_group(
    parent: dist.ProcessGroup | None,
    *,
    start_timeout: float,
    collective_timeout: float,
    have_met: bool = False,
) -> dist.ProcessGroup:
    """Returns a gloo group of the ranks of ``parent``; a collective call.

    Nothing else uses the group: it is new, or was kept when its saver was closed.

    The ranks meet through torch's key-value store, which does not notice that a rank has died. So
    ``start_timeout`` covers only their arrival; after that, they connect within seconds or never.

    Args:
        parent: The ranks; None for all.
        start_timeout: Seconds to wait for the other ranks to call this, too.
        collective_timeout: Seconds that collectives of the group may take.
        have_met: Whether the ranks come straight from a meeting, so that all have arrived.

    Raises:
        ConfigError: If this rank is not in the group.
        ProcessGroupError: If not all ranks have arrived and connected in time.
    """
    world = dist.group.WORLD
    group = parent if parent is not None else world
    if world is None or not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            "this rank is not in the process group given for saving: make this call only on ranks "
            "of that group"
        )
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    with _lock:
        kept = _kept.setdefault(world, _Kept())
        free: dict[str, dist.ProcessGroup]
        free = {made.group_name: made for made in kept.free if _ranks(made) == ranks}
        number = kept.opened.get(ranks, 0)
    soon = min(start_timeout, _CONNECT + _CONNECT_EACH * len(ranks))
    patience = soon if have_met else start_timeout
    try:
        chosen, most = _agree(group, number, sorted(free), patience)
        patience = soon
        made = free[chosen] if chosen else _new(ranks, most, timedelta(seconds=soon))
        set_group_timeout(timedelta(seconds=collective_timeout), made)
    # gloo and the stores share no other class of errors
    except (RuntimeError, TimeoutError) as exc:
        raise ProcessGroupError(
            f"the ranks {list(ranks)} did not all make a group for their saves within "
            f"{patience:g} s: one may have ended, or not reach the others; all must make the same "
            "calls of cloudckpt. If torchrun has restarted its workers, its rendezvous may still "
            "list the old ones: run TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone ... "
            "(on several nodes --rdzv-backend c10d --rdzv-endpoint HOST:PORT)",
            cause=exc,
        ) from exc
    with _lock:
        kept.opened[ranks] = number + 1
        if chosen:
            kept.free.remove(made)
    return made


def give_back(group: dist.ProcessGroup) -> None:
    """Keeps a group for later savers, unless the group was destroyed.

    All collectives of the group must have ended on this rank.
    """
    world = dist.group.WORLD
    with _lock:
        if world is not None and world in _kept and exists(group):
            _kept[world].free.append(group)


def exists(group: dist.ProcessGroup) -> bool:
    """Whether neither the group nor its default group has been destroyed."""
    return bool(_ranks(group))


def _new(ranks: tuple[int, ...], most: int, timeout: timedelta) -> dist.ProcessGroup:
    """Makes a gloo group of ``ranks``; a collective call of only these ranks.

    If ``ranks`` are not all ranks of the job, torch names the group by the number of groups that
    each rank has joined, and the names must agree. So a rank that has joined fewer than ``most``
    groups first makes further groups, of itself alone.
    """
    is_part = len(ranks) < dist.get_world_size()
    make = functools.partial(
        dist.new_group, timeout=timeout, backend="gloo", use_local_synchronization=is_part
    )
    while is_part and groups_joined() < most:
        make([dist.get_rank()], group_desc="cloudckpt-count")
    made = make(list(ranks), group_desc="cloudckpt")
    assert isinstance(made, dist.ProcessGroup)
    return made


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Returns the ranks of a group; empty if it no longer exists."""
    try:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    except KeyError:
        return ()


def _agree(
    group: dist.ProcessGroup, number: int, free: list[str], timeout: float
) -> tuple[str, int]:
    """Agrees with the other ranks on a group to reuse.

    A group that is free on this rank may still be in use, or broken, on another.

    Args:
        group: The ranks.
        number: How often these ranks have opened a group before.
        free: The names of the groups that no saver of this rank uses.
        timeout: Seconds to wait for the other ranks.

    Returns:
        The name of a group that is free on all ranks, empty without such a group; and the largest
        number of groups that any of the ranks has joined.

    Raises:
        TimeoutError: If a rank has not replied in time.
    """
    rank, size, store = group.rank(), group.size(), group.get_group_store()
    prefix = f"cloudckpt/open/{number}"
    store.set(f"{prefix}/{rank}", json.dumps([free, groups_joined()]))
    if rank == 0:
        keys = [f"{prefix}/{other}" for other in range(size)]
        _await(store, keys, timeout)
        reports = [json.loads(store.get(key)) for key in keys]
        common = set.intersection(*(set(names) for names, _ in reports))
        choice = min(common, default=""), max(count for _, count in reports)
        store.set(f"{prefix}/chosen", json.dumps(choice))
    _await(store, [f"{prefix}/chosen"], timeout)
    chosen, most = json.loads(store.get(f"{prefix}/chosen"))
    return chosen, most


def _await(store: Store, keys: list[str], timeout: float) -> None:
    """Waits until all keys are in the store.

    The store's own ``wait`` is not used: it would block other threads that use the store, such as
    the one that logs missing ranks.

    Raises:
        TimeoutError: If keys are missing after ``timeout`` seconds.
    """
    began = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - began
        if waited > timeout:
            raise TimeoutError(f"the ranks did not all reply within {timeout:g} s")
        time.sleep(min(_LONGEST_PAUSE, max(0.001, waited / 10)))
