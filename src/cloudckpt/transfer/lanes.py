"""How many lanes a transfer should use: decided from what moved, without I/O or a clock.

A lane is a thread with a connection. Clouds limit each connection (S3 to about 90 MB/s, others to
10), so more lanes are faster until the link, the store or the CPU is the limit; beyond that they
only cost. That number is not known beforehand, so it is searched for: the lanes are multiplied as
long as that moves more, and otherwise reduced to as many as made the difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["FIRST", "LaneSearch", "Tick"]

FIRST = 8
"""Lanes that a transfer begins with."""

_ALL = 7 / 8
"""The share of the lanes that must move bytes for all to be counted as under way."""

_LONGEST_START = 0.5
"""Seconds in which new lanes must be under way: connections that are made, by TLS, far away."""

_CLEAR = 0.05
"""Seconds after which a gain is believed that is clear: most of what the lanes could add."""

_LOOK = 0.3
"""Seconds of a look at a gain that is not clear. TCP begins slowly: the second look decides."""

_GAIN = 1.08
"""How many times as much must move for more lanes to stay."""

_SPARE = 1.1
"""Lanes over as many as just reach the limit."""

_SLOWER = 0.6
"""The share of what a lane has moved before, below which a limit has come nearer."""

_NO_LOSS = 0.95
"""The share that fewer lanes must go on moving to stay fewer."""

_FAST_LANE = 250e6
"""Bytes a second of a lane that nobody limits: no cloud gives a connection that much."""

_MOST_CPU = 0.5
"""The share of the CPUs in use from which on no lanes are added: training needs them, too."""

_PAUSES = (1.0, 30.0)
"""Seconds until it is tried again whether more lanes pay: at first, and at most."""

# seconds of a tick: while something is tried, as long as that is not clear, and else
_QUICK, _CALM, _SLOW = 0.025, 0.1, 0.25


@dataclass(frozen=True, slots=True)
class Tick:
    """What happened in a moment.

    Attributes:
        seconds: How long it was.
        moved: Bytes of all lanes.
        moving: How many lanes have moved any.
        cpu: The share of the CPUs that this process has used.
        is_full: Whether every lane had work; what moves otherwise says nothing of more lanes.
    """

    seconds: float
    moved: int
    moving: int
    cpu: float
    is_full: bool


@dataclass(slots=True)
class _Window:
    """Ticks in a row, seen as one."""

    seconds: float = 0.0
    moved: int = 0
    cpu: float = 0.0
    is_steady: bool = True

    def add(self, tick: Tick, lanes: int) -> None:
        self.cpu = (self.cpu * self.seconds + tick.cpu * tick.seconds) / (
            self.seconds + tick.seconds
        )
        self.seconds += tick.seconds
        self.moved += tick.moved
        self.is_steady = self.is_steady and tick.moving >= _ALL * lanes

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.moved / self.seconds


class LaneSearch:
    """Searches for the number of lanes of one transfer while it runs.

    Attributes:
        lanes: How many there should be now.
        each: What a lane moves where nothing else is the limit, in bytes a second; None as long as
            that is unknown.
    """

    def __init__(self, first: int, most: int, each: float | None = None) -> None:
        """
        Args:
            first: Lanes to begin with.
            most: Lanes there may be.
            each: What a lane has moved in an earlier transfer.
        """
        self.lanes = min(first, most)
        self.each = each
        self._most = most
        self._before: tuple[int, float] | None = None  # lanes and rate that the present ones follow
        self._found: int | None = None
        self._pause = 0.0  # 0: nothing was found yet
        self._window: _Window | None = None
        self._started = 0.0
        self._looks = 0
        self._factor = 2  # by which lanes are multiplied; more once that has clearly paid

    @property
    def found(self) -> int:
        """The lanes that have proven to pay; those that are only being tried are not among them.

        But for those whose trial nothing speaks against, after one that has clearly paid: a short
        transfer ends amid it.
        """
        if self._before is None:
            return self.lanes
        before, _ = self._before
        is_likely = self.lanes > before and self._factor > 2 and not self._looks
        return self.lanes if is_likely else before

    @property
    def tick(self) -> float:
        """Seconds after which the next tick is wanted."""
        if self._pause and self._before is None:
            return _SLOW
        is_unclear = self._window is not None and self._window.seconds > _CLEAR
        return _CALM if is_unclear else _QUICK

    def add(self, tick: Tick) -> int:
        """Takes what has happened since the last tick; returns how many lanes there should be."""
        if not tick.is_full or not tick.moved:
            self._started = max(self._started, 0.0) if self._window is None else 0.0
            self._window = None if self._window is None else _Window()
            return self.lanes
        if self._window is None:  # buffers fill in the tick in which the last lane gets under way
            self._started += tick.seconds
            if tick.moving >= _ALL * self.lanes or self._started >= _LONGEST_START:
                self._window = _Window()
            return self.lanes
        window = self._window
        window.add(tick, self.lanes)
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
        """What the present lanes move is known: are there too many, or too few?"""
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
            # the look at fewer may have been too short: they are only tried
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
        else:  # the lanes themselves are slower than they were
            self.each = rate / before
            self._settle(before)

    def _settle(self, lanes: int) -> None:
        """Stays with ``lanes`` for a while; twice as long as the last time."""
        self._factor = 2
        first, most = _PAUSES
        self._pause = min(2 * self._pause, most) or first
        self._change(lanes)
