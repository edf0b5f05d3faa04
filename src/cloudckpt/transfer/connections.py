"""Chooses how many connections a transfer opens: the configured number, or a search's result.

The next transfer in the same direction with the same bucket begins with that result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Literal

from cloudckpt.config import Config
from cloudckpt.stores.base import RangeReader
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.lanes import FIRST, LaneSearch, Tick

__all__ = ["transfer_group"]

Direction = Literal["out", "in"]


# the results of earlier transfers' searches: the number of lanes, and the rate of each
_found: dict[tuple[str, Direction], tuple[int, float | None]] = {}


def transfer_group(
    store: RangeReader,
    config: Config,
    direction: Direction,
    *,
    name: str,
    most_waiting: float = 2,
) -> TaskGroup:
    """Returns the group of threads for a transfer, each with a connection.

    Args:
        store: The target or source.
        config: Options; ``connections`` sets the number. ``"auto"`` searches for it if the store
            counts the bytes moved, and otherwise uses the number for small requests.
        direction: The direction of the transfer.
        name: The name of the threads.
        most_waiting: See :class:`TaskGroup`.
    """
    width, pace = config.requests_at_once, None
    if config.connections == "auto" and store.moved(()) is not None:
        most, place = config.most_connections, (store.uri(""), direction)
        lanes, each = _found.get(place, (FIRST, None))
        search = LaneSearch(lanes, most, each)
        width = search.lanes
        if most > 1:
            pace = _Paced(search, store, place)
    return TaskGroup(
        width, name=name, most_waiting=most_waiting, interrupt=store.interrupt, pace=pace
    )


class _Paced:
    """Sets a group's width by a :class:`LaneSearch`, from the bytes moved and the CPU time used."""

    def __init__(
        self, search: LaneSearch, store: RangeReader, place: tuple[str, Direction]
    ) -> None:
        self._search = search
        self._store = store
        self._place = place
        self._last = time.monotonic()
        self._cpu = time.process_time()
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    @property
    def tick(self) -> float:
        return self._search.tick

    def width(self, threads: Sequence[int], *, is_full: bool) -> int:
        now, cpu = time.monotonic(), time.process_time()
        seconds, used = now - self._last, cpu - self._cpu
        self._last, self._cpu = now, cpu
        moved = self._store.moved(threads) or ()
        return self._search.add(
            Tick(
                seconds=seconds,
                moved=sum(moved),
                moving=sum(count > 0 for count in moved),
                cpu=used / seconds / self._cores if seconds else 0.0,
                is_full=is_full,
            )
        )

    def ended(self) -> None:
        _found[self._place] = self._search.found, self._search.each
