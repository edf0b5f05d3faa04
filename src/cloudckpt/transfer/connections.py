"""Decides how many connections a transfer opens: the configured number, or as many as help.

A lane is a thread with a connection. Clouds limit the rate of each connection (S3 to about 90 MB/s,
others to 10), so more lanes are faster until the link, the store or the CPU is the limit; beyond
that they only add cost. The best number is not known in advance. So the lanes are multiplied as
long as the rate rises, and then reduced to the number that reaches the same rate. The next transfer
in the same direction with the same bucket begins with the result.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cloudckpt.config import Config
from cloudckpt.stores.base import RangeReader
from cloudckpt.transfer.group import TaskGroup

__all__ = ["FIRST", "LaneSearch", "transfer_group"]

FIRST = 8
"""The number of lanes that a transfer begins with, unless an earlier one found a better number."""

_ALL = 7 / 8
"""The share of the lanes that must move bytes for all of them to count as started."""

_LONGEST_START = 0.5
"""Seconds after which new lanes count as started: connecting by TLS takes time."""

_CLEAR = 0.05
"""Seconds of measurement that suffice if the rate rises almost in proportion to the lanes."""

_LOOK = 0.3
"""Seconds of a long measurement.

A moderate rise of the rate is measured twice; the second result counts, as TCP starts slowly.
"""

_GAIN = 1.08
"""The factor by which the rate must rise for additional lanes to be kept."""

_SPARE = 1.1
"""How many times as many lanes are kept as would just reach the measured rate."""

_SLOWER = 0.6
"""The share of a lane's earlier rate below which fewer lanes are tried: other limits prevail."""

_NO_LOSS = 0.95
"""Fewer lanes are kept if they reach at least this share of the rate of more lanes."""

_FAST_LANE = 250e6
"""Bytes per second per lane above which no lanes are added: clouds limit connections to less."""

_MOST_CPU = 0.5
"""The share of the CPUs in use above which no lanes are added: training needs them too."""

_PAUSES = (1.0, 30.0)
"""The first and the longest pause before other numbers of lanes are tried again, in seconds."""

# seconds between ticks: at the beginning of a measurement; while it is unclear; otherwise
_QUICK, _CALM, _SLOW = 0.025, 0.1, 0.25

Direction = Literal["out", "in"]


# the results of earlier transfers' searches: the number of lanes, and the rate of each
_found: dict[tuple[str, Direction], tuple[int, float | None]] = {}


def transfer_group(store: RangeReader, config: Config, direction: Direction) -> TaskGroup:
    """Returns the group of threads for a transfer; each thread has a connection.

    Args:
        store: The target or source.
        config: Options; ``connections`` sets the number. ``"auto"`` searches for it if the store
            counts the bytes moved, and otherwise uses ``requests_at_once``.
        direction: "out" to the store, or "in" from it. Tasks of an "in" group must keep no memory
            alive while they are queued: any number of them may be queued.
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
        width,
        name="cloudckpt-save" if direction == "out" else "cloudckpt-load",
        most_waiting=2 if direction == "out" else math.inf,
        interrupt=store.interrupt,
        pace=pace,
    )


class _Paced:
    """Sets a group's number of threads by a :class:`LaneSearch`, from bytes moved and CPU time."""

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
            seconds=seconds,
            moved=sum(moved),
            moving=sum(count > 0 for count in moved),
            cpu=used / seconds / self._cores if seconds else 0.0,
            is_full=is_full,
        )

    def ended(self) -> None:
        _found[self._place] = self._search.found, self._search.each


@dataclass(slots=True)
class _Window:
    """A measurement: seconds, bytes, mean CPU use, and whether nearly all lanes moved bytes."""

    seconds: float = 0.0
    moved: int = 0
    cpu: float = 0.0
    is_steady: bool = True

    def add(self, seconds: float, moved: int, cpu: float, *, is_steady: bool) -> None:
        self.cpu = (self.cpu * self.seconds + cpu * seconds) / (self.seconds + seconds)
        self.seconds += seconds
        self.moved += moved
        self.is_steady = self.is_steady and is_steady

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.moved / self.seconds


class LaneSearch:
    """Searches for the best number of lanes while a transfer runs, from measurements passed to it.

    A lane is a thread with a connection.

    Attributes:
        lanes: The number of lanes that should be in use now.
        each: The rate of a lane when only its connection limits it, in bytes per second; None as
            long as unknown.
    """

    def __init__(self, first: int, most: int, each: float | None = None) -> None:
        """Starts a search.

        Args:
            first: The number of lanes to begin with.
            most: The most lanes.
            each: The rate of a lane in an earlier transfer, in bytes per second; None if unknown.
        """
        self.lanes = min(first, most)
        self.each = each
        self._most = most
        # the lanes and rate before the present change
        self._before: tuple[int, float] | None = None
        self._pause = 0.0  # seconds; 0: no result yet
        self._window: _Window | None = None
        self._started = 0.0
        self._looks = 0
        self._factor = 2  # multiplies the lanes; 4 after a clear gain

    @property
    def found(self) -> int:
        """The number of lanes with which the next transfer should begin.

        While another number is tried, this is the number before the trial. But if the previous
        trial was a clear gain, and the first measurement of this one is still under way, it is the
        number on trial.
        """
        if self._before is None:
            return self.lanes
        before, _ = self._before
        is_likely = self.lanes > before and self._factor > 2 and not self._looks
        return self.lanes if is_likely else before

    @property
    def tick(self) -> float:
        """Seconds until the next measurement is due."""
        if self._pause and self._before is None:
            return _SLOW
        is_unclear = self._window is not None and self._window.seconds > _CLEAR
        return _CALM if is_unclear else _QUICK

    def add(self, *, seconds: float, moved: int, moving: int, cpu: float, is_full: bool) -> int:
        """Takes a measurement of all lanes; returns the number of lanes to use from now on.

        Args:
            seconds: The time since the last measurement.
            moved: Bytes moved by all lanes.
            moving: The number of lanes that moved any.
            cpu: The share of the CPUs that this process used.
            is_full: Whether every lane had work; otherwise the rate does not show whether more
                lanes help.
        """
        if not is_full or not moved:
            if self._window is not None:
                self._started, self._window = 0.0, _Window()
            return self.lanes
        have_started = moving >= _ALL * self.lanes
        if self._window is None:  # in the tick in which the last lane starts, buffers fill up
            self._started += seconds
            if have_started or self._started >= _LONGEST_START:
                self._window = _Window()
            return self.lanes
        window = self._window
        window.add(seconds, moved, cpu, is_steady=have_started)
        if self._before is not None:
            before, rate = self._before
            if self.lanes > before:
                self._judge_more(window, before, rate)
            else:
                self._judge_fewer(window, before, rate)
        elif window.seconds >= (self._pause or (_QUICK if window.is_steady else _LOOK)):
            self._measured(window)
        return self.lanes

    def _change(self, lanes: int, before: tuple[int, float] | None = None) -> None:
        self.lanes = lanes
        self._before = before
        self._looks = 0
        self._started = 0.0
        self._window = None

    def _measured(self, window: _Window) -> None:
        """Tries fewer lanes if the rate is far below the expected one, else more if possible."""
        rate = window.rate
        if self.each is not None and rate < _SLOWER * self.each * self.lanes:
            if window.seconds < _LOOK:
                return
            needed = max(math.ceil(_SPARE * rate / self.each), min(FIRST, self._most))
            if needed < self.lanes:
                self._change(needed, (self.lanes, rate))
                return
        elif self.each is None:
            self.each = rate / self.lanes
        self._grow(window)

    def _grow(self, window: _Window) -> None:
        rate = window.rate
        pays = window.cpu < _MOST_CPU and rate < _FAST_LANE * self.lanes
        if pays and self.lanes < self._most:
            self._change(min(self._factor * self.lanes, self._most), (self.lanes, rate))
        else:
            self._settle(self.lanes)

    def _judge_more(self, window: _Window, before: int, rate: float) -> None:
        gain, ideal = window.rate / rate, self.lanes / before
        if gain >= max(0.75 * ideal, (1 + ideal) / 2) and window.seconds >= _CLEAR:
            self.each = window.rate / self.lanes
            self._pause = 0.0
            self._before = None
            self._factor = 4
            self._grow(window)
        elif window.seconds >= _LOOK and self._looks == 0:
            self._looks, self._window = 1, _Window()
        elif window.seconds >= _LOOK:
            # the measurement of fewer lanes may have been too short, so fewer are only tried
            needed = math.ceil(before * gain * _SPARE) if gain >= _GAIN else before
            if needed < self.lanes:
                self._change(needed, (self.lanes, window.rate))
            else:
                self._settle(self.lanes)

    def _judge_fewer(self, window: _Window, before: int, rate: float) -> None:
        if window.seconds < _LOOK:
            return
        if window.rate >= _NO_LOSS * rate:
            self._settle(self.lanes)
        else:  # each lane has become slower
            self.each = rate / before
            self._settle(before)

    def _settle(self, lanes: int) -> None:
        """Uses `lanes` without trying others for a pause, which doubles each time, up to 30 s."""
        self._factor = 2
        first, most = _PAUSES
        self._pause = min(2 * self._pause, most) or first
        self._change(lanes)
