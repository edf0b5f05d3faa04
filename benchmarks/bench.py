"""What every scenario is given: the server, who takes part, and how much time there is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from benchmarks.children import ChildFailedError
from benchmarks.contenders import CONTENDERS
from benchmarks.places import remove_local
from benchmarks.rows import REFERENCE, is_ours
from benchmarks.server.process import ServerHandle
from benchmarks.server.shaping import Shape

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Bench:
    """One run of the benchmarks."""

    server: ServerHandle
    contenders: Sequence[str]
    quick: bool
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    """By scenario and contender: why there are no numbers."""
    scenario: str = ""
    rounds: int = 7
    """How often the reference and cloudckpt are measured; peers half as often."""
    fleets: Sequence[tuple[int, int]] = ()
    """The jobs that `fleet` simulates: how many ranks, and how many tensors."""

    def rounds_of(self, contender: str) -> int:
        """Returns how often `contender` is measured: more often if a limit hangs on it."""
        if contender == REFERENCE or is_ours(contender):
            return self.rounds
        return max(1, self.rounds // 2)

    def sized(self, full: int, quick: int) -> int:
        """Returns the size for this run."""
        return quick if self.quick else full

    def taking_part(self, *wanted: str) -> list[str]:
        """Returns who of `wanted` (all if none is named) runs; notes who is not installed."""
        chosen = [name for name in wanted or self.contenders if name in self.contenders]
        for name in chosen:
            if not CONTENDERS[name].installed:
                self.failures[self.scenario, name] = "not installed"
        return [name for name in chosen if self.standing(name)]

    def standing(self, contender: str) -> bool:
        """Whether `contender` has not failed in this scenario."""
        return (self.scenario, contender) not in self.failures

    def attempt(
        self, contender: str, action: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Runs `action`; on failure notes it, drops the contender and returns None."""
        if not self.standing(contender):
            return None
        try:
            return action(*args, **kwargs)
        except ChildFailedError as failure:
            self.failures[self.scenario, contender] = f"failed: {failure}"
            self.say(f"{contender}: {failure}")
            return None

    @contextmanager
    def running(self, scenario: str) -> Iterator[None]:
        """Frames one scenario: a clean server before and after, and its time on the screen."""
        self.scenario = scenario
        self._clean()
        began = time.monotonic()
        self.say("begins")
        try:
            yield
        finally:
            self._clean()
            self.say(f"took {time.monotonic() - began:.0f} s")

    def say(self, text: str) -> None:
        """Tells whoever watches."""
        print(f"[{self.scenario}] {text}", file=sys.stderr, flush=True)

    def _clean(self) -> None:
        self.server.inject()
        self.server.shape(Shape())
        self.server.record(False)
        self.server.clear()
        self.server.reset()
        remove_local(self.server.port)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Returns `names` starting elsewhere, so that no contender always goes first."""
    by %= max(1, len(names))
    return [*names[by:], *names[:by]]
