"""The groups of ranks that save together: of their trainers, and where their processes meet.

The process groups of savers are made when they are needed, and used again by later savers.

A closed saver's group is kept, not destroyed. torch names a new group after how many there are:
once one is destroyed, the next may get its name, find the addresses that it left in the store, and
wait for connections that nobody accepts (torch 2.13). The groups end with the default group.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cloudckpt.checkpoint.torch_private import set_group_timeout
from cloudckpt.errors import ConfigError, ProcessGroupError, SaveProcessError
from cloudckpt.fork import ModuleLock
from cloudckpt.stores.base import random_suffix

__all__ = ["MeetingPlace", "break_off", "exists", "give_back", "open_group"]


_NO_TAG = 1 << 20  # of messages that nobody sends
_CONNECT, _CONNECT_EACH = 30.0, 0.1
"""Seconds, and those for each rank, in which ranks that are all here connect to each other."""


@dataclass
class _Kept:
    """What is remembered while a default group exists.

    Attributes:
        free: Groups that no saver uses.
        opened: How many were opened by the same ranks.
    """

    free: list[dist.ProcessGroup] = field(default_factory=list)
    opened: dict[tuple[int, ...], int] = field(default_factory=dict)


_lock = ModuleLock()
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, _Kept] = weakref.WeakKeyDictionary()


def open_group(
    parent: dist.ProcessGroup | None,
    *,
    start_timeout: float,
    collective_timeout: float,
    have_met: bool = False,
) -> dist.ProcessGroup:
    """A gloo group of the same ranks, which nobody else uses; a collective call.

    The ranks find each other by a store, which does not know that one of them has died. So they are
    given long only to come here; once all are here, they connect within seconds, or never.

    Args:
        parent: The ranks; None for all.
        start_timeout: Seconds to wait for the other ranks to call this, too.
        collective_timeout: Seconds that collectives of the group may take.
        have_met: Whether the ranks come straight from a meeting, so that all are here already.

    Raises:
        ConfigError: If this rank is not one of them.
        ProcessGroupError: If the ranks do not meet.
    """
    world = dist.group.WORLD
    group = parent if parent is not None else world
    if world is None or not isinstance(group, dist.ProcessGroup):
        raise ConfigError("this rank is not in the process group that it is to save with")
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    with _lock:
        kept = _kept.setdefault(world, _Kept())
        free: dict[str, dist.ProcessGroup]
        free = {made.group_name: made for made in kept.free if _ranks(made) == ranks}
        number = kept.opened.get(ranks, 0)
    soon = min(start_timeout, _CONNECT + _CONNECT_EACH * len(ranks))
    patience = soon if have_met else start_timeout
    try:
        chosen = _agree(group, number, sorted(free), timedelta(seconds=patience))
        patience = soon
        made = free[chosen] if chosen else _new(ranks, timedelta(seconds=soon))
        set_group_timeout(timedelta(seconds=collective_timeout), made)
    except RuntimeError as exc:  # gloo and the stores have no other class in common
        raise ProcessGroupError(
            f"the ranks {list(ranks)} did not all make a group for their saves within "
            f"{patience:g} s; look whether one has ended. All of them must, and if they are not "
            "all ranks, each must have made as many groups before as the others",
            cause=exc,
        ) from exc
    with _lock:
        kept.opened[ranks] = number + 1
        if chosen:
            kept.free.remove(made)
    return made


def give_back(group: dist.ProcessGroup) -> None:
    """Lets a later saver have a group, all of whose collectives have ended on this rank."""
    world = dist.group.WORLD
    with _lock:
        if world is not None and world in _kept and exists(group):
            _kept[world].free.append(group)


def break_off(group: dist.ProcessGroup) -> None:
    """Ends the connections of a group of savers in which this rank has lost another.

    Only the neighbours of a rank that dies notice it. Those who wait for one of these, which has
    raised and lives on, would else wait until the time limit of the group. A receive that is late
    closes all connections of a gloo group.
    """
    late = timedelta(milliseconds=1)
    for peer in range(dist.get_world_size(group)) if exists(group) else ():
        if peer != dist.get_rank(group):
            with contextlib.suppress(RuntimeError, ValueError):  # late; of a group that is gone
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                receiving = dist.irecv(nothing, group=group, group_src=peer, tag=_NO_TAG)
                if receiving is not None:
                    receiving.wait(late)


def exists(group: dist.ProcessGroup) -> bool:
    """Whether nobody has destroyed a group, or the default group before it."""
    return bool(_ranks(group))


def _new(ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    made = dist.new_group(
        list(ranks),
        timeout=timeout,
        backend="gloo",
        # with it, the name depends on how many groups a rank is in, which may differ; without it,
        # all ranks must take part
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc="cloudckpt",
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Its ranks; none if it does not exist any more."""
    try:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    except KeyError:
        return ()


def _agree(group: dist.ProcessGroup, number: int, free: list[str], timeout: timedelta) -> str:
    """The name of a group that all ranks have free; empty if there is none.

    A saver may be closed on one rank while another still uses it, or believes it broken.
    """
    rank, size, store = group.rank(), group.size(), group.get_group_store()
    place = f"cloudckpt/open/{number}"
    store.set(f"{place}/{rank}", json.dumps(free))
    if rank == 0:
        keys = [f"{place}/{other}" for other in range(size)]
        store.wait(keys, timeout)
        common = set.intersection(*(set(json.loads(store.get(key))) for key in keys))
        store.set(f"{place}/chosen", min(common, default=""))
    store.wait([f"{place}/chosen"], timeout)
    chosen: str = store.get(f"{place}/chosen").decode()
    return chosen


_TOKEN = "cloudckpt/token"  # noqa: S105 - no secret
_LOOPBACK = "127.0.0.1"
_ADDRESS_TIMEOUT = 10.0  # seconds to reach an address


class MeetingPlace:
    """A store in the first rank's trainer, at which the saving processes of all ranks meet.

    Attributes:
        address: Host and port by which this rank and its processes reach it.
    """

    def __init__(self, group: dist.ProcessGroup, start_timeout: float) -> None:
        """A collective call.

        Args:
            group: The ranks.
            start_timeout: Seconds that an answer of the store may take.

        Raises:
            SaveProcessError: If this rank reaches it by none of its addresses.
        """
        timeout = timedelta(seconds=start_timeout)
        found: list[Any] = [None]
        own: TCPStore | None = None
        if dist.get_rank(group) == 0:
            own = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            found = [_Offer(_machine(), _addresses(group), own.port, random_suffix())]
            own.set(_TOKEN, found[0].token)
        dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
        offer: _Offer = found[0]
        here = [_LOOPBACK] if own is not None or offer.machine == _machine() else []
        for host in (*here, *offer.addresses):
            if (store := own or _reached(host, offer, timeout)) is not None:
                self._store, self.address = store, (host, offer.port)
                return
        raise SaveProcessError(
            f"the saving processes can't meet: port {offer.port} of the first rank's machine is "
            f"reached by none of its addresses {list(offer.addresses)}. Set MASTER_ADDR to one "
            "that all machines reach, and let them reach each other's ports"
        )

    def leave_note(self, name: str) -> None:
        """Tells all ranks something; does nothing if the store is gone."""
        with contextlib.suppress(Exception):
            self._store.set(name, "")

    def has_note(self, name: str) -> bool:
        """Whether some rank has left this note.

        Raises:
            SaveProcessError: If the store does not answer.
        """
        try:
            return bool(self._store.check([name]))
        except Exception as exc:
            raise SaveProcessError(
                "the first rank's trainer, at which the saving processes meet, does not answer",
                cause=exc,
            ) from exc


@dataclass(frozen=True)
class _Offer:
    """Where the first rank's trainer has its store.

    Attributes:
        machine: Its own, see :func:`_machine`.
        addresses: By which other machines may reach it, the likeliest first.
        port: Of the store.
        token: What is found there: another machine may have something else at that address.
    """

    machine: str
    addresses: Sequence[str]
    port: int
    token: str


def _reached(address: str, offer: _Offer, timeout: timedelta) -> TCPStore | None:
    """The store of an offer, if it is what this address leads to."""
    patience = min(_ADDRESS_TIMEOUT, timeout.total_seconds())
    found: list[TCPStore] = []

    def reach() -> None:
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # also those of torch's stores
            socket.create_connection((address, offer.port), patience).close()
            store = TCPStore(address, offer.port, timeout=timedelta(seconds=patience))
            if store.get(_TOKEN).decode() == offer.token:
                store.set_timeout(timeout)
                found.append(store)

    # a server that is no store, and says nothing, would hold torch's client for good
    thread = threading.Thread(target=reach, name="cloudckpt-meet", daemon=True)
    thread.start()
    thread.join(2 * patience)
    return found[0] if found else None


def _machine() -> str:
    """The same for processes that reach each other by the loopback address.

    Host names do not tell: those of containers are often equal.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not on Linux
        return f"{socket.gethostname()} {uuid.getnode()}"


def _addresses(group: dist.ProcessGroup) -> list[str]:
    """What other machines may know this one by."""
    known: list[str] = []
    if master := os.environ.get("MASTER_ADDR"):
        if dist.get_global_rank(group, 0) == 0:
            known.append(master)
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((master, 9))  # sends nothing: the kernel chooses the address of the route
            known.append(way.getsockname()[0])
    return list(dict.fromkeys((*known, socket.getfqdn(), socket.gethostname())))
