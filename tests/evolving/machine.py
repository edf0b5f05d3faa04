"""Carries out cases, and has hypothesis draw them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from dcp.places import Place
from support.ranks import Ranks, RanksDiedError, RanksTimeoutError

from .cases import Case
from .running import Finding, Model, run_segment

__all__ = ["carry_out", "check_drawn"]

_DEADLINE = 150.0  # seconds that the saves of a process group may take
QUICK = (Phase.generate,)
THOROUGH = (Phase.reuse, Phase.generate, Phase.shrink)


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


def check_drawn(
    drawn: SearchStrategy[Case],
    ranks: Ranks,
    new_place: Callable[[str], Place],
    *,
    number: int,
    examples: int,
    phases: tuple[Phase, ...] = THOROUGH,
) -> int:
    """Carries out cases as hypothesis draws them; one that shows something is made small.

    Args:
        drawn: The cases.
        ranks: Carry them out.
        new_place: Where they save, by the kind of store.
        number: The seed.
        examples: How many cases.
        phases: Of hypothesis.

    Returns:
        How many saves there were.

    Raises:
        AssertionError: With what was found; hypothesis adds the case, as code that makes it.
    """
    saves = 0

    @seed(number)
    @settings(max_examples=examples, phases=phases, suppress_health_check=list(HealthCheck))
    @given(drawn)
    def all_is_well(case: Case) -> None:
        nonlocal saves
        saves += len(case.saves)
        findings = carry_out(case, ranks, new_place(case.store))
        assert not findings, "\n".join(map(str, findings))[:3000]

    all_is_well()
    return saves
