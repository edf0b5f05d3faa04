"""Carries out cases, and makes those small at which something is found."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from dcp.places import Place
from support.ranks import Ranks, RanksDiedError, RanksTimeoutError

from .cases import Case
from .running import Finding, Model, run_segment
from .shrinking import smaller

__all__ = ["Found", "carry_out", "found_in", "shrunk"]

_DEADLINE = 150.0  # seconds that the saves of a process group may take


@dataclass(frozen=True)
class Found:
    """A case, and what is found at it."""

    case: Case
    findings: list[Finding]

    def __str__(self) -> str:
        told = "\n".join(
            f"  after save {one.step}, {one.what}: {one.kind}: {one.text[:600]}"
            for one in self.findings
        )
        return f"\n{told}\nat\n{self.case!r}"


def carry_out(case: Case, ranks: Ranks, place: Place) -> list[Finding]:
    """What is not as it should be, of the first save behind which something is not."""
    model, first = Model(), 0
    for segment in case.segments:
        try:
            told = ranks(
                segment.world, run_segment, segment, first, model, place, case.tight,
                deadline=_DEADLINE,
            )  # fmt: skip
        except RanksTimeoutError as error:
            return [Finding(first, "ranks", "hang", str(error))]
        except RanksDiedError as error:
            return [Finding(first, "ranks", "death", str(error))]
        except AssertionError as error:
            return [Finding(first, "ranks", "error", str(error))]
        model, findings = told[0]
        if findings:
            return findings
        first += len(segment.saves)
    return []


def found_in(case: Case, ranks: Ranks, new_place: Callable[[str], Place]) -> Found | None:
    """What a case shows; None if all is well."""
    findings = carry_out(case, ranks, new_place(case.store))
    return Found(case, findings) if findings else None


def shrunk(
    found: Found, ranks: Ranks, new_place: Callable[[str], Place], *, seconds: float = 120.0
) -> Found:
    """A smaller case that shows the same: what can be left out, is, as far as the time allows."""
    end, at, was_smaller = time.monotonic() + seconds, 0, False
    while time.monotonic() < end:
        case = next(itertools.islice(smaller(found.case), at, None), None)
        if case is None:
            if not was_smaller:
                break
            at, was_smaller = 0, False  # what could not be left out before may be now
            continue
        again = found_in(case, ranks, new_place)
        if again is not None and again.findings[0].is_like(found.findings[0]):
            found, was_smaller = again, True
        else:
            at += 1
    return found
