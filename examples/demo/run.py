"""The story: train on 2 ranks, lose one amid a save, go on with 4, lose all, finish with 1."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from rich.console import Console

import cloudckpt
from bucket import (
    bucket_of_user,
    embedded_bucket,
    find_remains,
    wait_until_torn,
)
from children import Ranks
from cloudckpt.uri import CheckpointURI
from messages import Check, Job, Phase, Staged
from model import GPT
from report import Screen

__all__ = ["run"]

_SAVES = 6  # checkpoints of the whole run; the third is cut in its middle and written again
_UNTIL_TORN = 30.0  # seconds for the save to get to its middle
_SAME_LOSS = 1e-3  # of a batch, summed by other numbers of ranks in another order
_SAME_CURVE = 5e-2  # of steps that two numbers of ranks train from the same checkpoint


def run(location: str | None, *, steps: int, keep: bool, console: Console) -> bool:
    """Runs the demo.

    Args:
        location: A URI to put the checkpoints beneath; without one, an S3 server is started.
        steps: Steps to train in all; 6 at least.
        keep: Whether the checkpoints beneath ``location`` stay there.
        console: Where to report to.

    Returns:
        Whether everything that was checked is as it should be.

    Raises:
        ChildError: If a rank failed that should not have.
        CloudCheckpointError: If the bucket can't be used.
    """
    place = bucket_of_user(location, keep=keep) if location else embedded_bucket()
    with _terminated_as_interrupted(), place as run_uri:
        passed = _Story(run_uri, steps, Screen(console)).tell()
    if keep:
        console.print(f"the checkpoints are kept at {run_uri}", soft_wrap=True)
    return passed


class _Story:
    def __init__(self, run_uri: CheckpointURI, steps: int, screen: Screen) -> None:
        self._run = run_uri
        self._steps = steps
        self._every = steps // _SAVES
        self._screen = screen
        self._phases: list[Phase] = []
        self._checks: list[Check] = []

    def tell(self) -> bool:
        parameters = sum(parameter.numel() for parameter in GPT().parameters())
        self._screen.say(
            f"[bold]A GPT of {parameters / 1e6:.1f} million parameters learns the source of "
            f"Python's standard library[/bold]\ncheckpoints go to {self._run}"
        )
        self._lose_a_rank()
        self._go_on_with_four()
        self._finish_with_one()
        self._screen.summarize(self._phases, self._checks)
        return all(check.holds for check in self._checks)

    def _lose_a_rank(self) -> None:
        torn_step = 3 * self._every
        phase = self._train(2, last_step=self._steps, kill_in_save_of=torn_step)
        self._check(
            "the other rank noticed and ended",
            0 in phase.failures,
            _brief(phase.failures.get(0, "it ended without an error")),
        )
        torn = self._place_of(torn_step)
        self._check(
            "the torn save is no checkpoint: it is a CheckpointNotFoundError to look into it",
            _is_not_found(torn),
            f"left behind: {find_remains(torn)}",
        )
        newest = cloudckpt.latest(self._run)
        self._check(
            "the newest checkpoint is the last one that was committed",
            newest == str(self._place_of(2 * self._every)),
            str(newest),
        )

    def _go_on_with_four(self) -> None:
        before = self._phases[-1].losses
        phase = self._train(4, last_step=self._steps, kill_all_behind=5 * self._every)
        self._check_resumed(phase)
        both = sorted(before.keys() & phase.losses.keys())
        apart = max((abs(before[step] - phase.losses[step]) for step in both), default=float("inf"))
        self._check(
            "steps that were lost are learned again the same way",
            apart <= _SAME_CURVE,
            f"{len(both)} steps, losses differ by at most {apart:.1e}",
        )

    def _finish_with_one(self) -> None:
        phase = self._train(1, last_step=self._steps, measure=True)
        self._check_resumed(phase)
        staged = 5 * self._every
        self._check(
            "all ranks were killed right behind a step that was staged, and it is not lost",
            phase.resumed is not None and phase.resumed.step == staged,
            f"step {staged} was staged, step {phase.resumed and phase.resumed.step} was restored",
        )
        first, last = self._phases[0].losses[1], phase.losses[self._steps]
        self._check("the model has learned", last < first, f"loss {first:.2f} → {last:.2f}")
        found = [one.step for one in cloudckpt.list_checkpoints(self._run) if one.is_committed]
        wanted = [n * self._every for n in range(1, _SAVES)] + [self._steps]
        self._check(
            "every checkpoint is committed, the torn one too, now that it was saved again",
            found == wanted,
            f"steps {', '.join(map(str, found))}",
        )

    def _train(
        self,
        ranks: int,
        *,
        last_step: int,
        kill_in_save_of: int | None = None,
        kill_all_behind: int | None = None,
        measure: bool = False,
    ) -> Phase:
        """Trains from the newest checkpoint on; if ranks are to be killed, until the others end."""
        job = Job(
            run=str(self._run),
            last_step=last_step,
            save_every=self._every,
            stall_at=kill_in_save_of,
            measure=measure,
        )
        phase = Phase(ranks, last_step)
        self._phases.append(phase)
        staged: set[int] = set()
        with self._screen.follow(phase) as bar, Ranks(job, ranks) as group:
            for rank, event in group.events():
                phase.note(rank, event)
                bar.update()
                if isinstance(event, Staged) and event.step == kill_in_save_of and rank == 1:
                    self._kill_in_the_middle(group, phase, event.step)
                if isinstance(event, Staged) and event.step == kill_all_behind:
                    staged.add(rank)
                    if len(staged) == ranks:
                        for one in staged:
                            group.kill(one)
                        phase.killed = f"all ranks, behind step {event.step} that was staged"
            if phase.killed is None:
                group.require_success()
            elif kill_all_behind is None:
                codes = group.exit_codes()
                self._check(
                    "the rank died by SIGKILL", codes[1] == -signal.SIGKILL, f"exit codes {codes}"
                )
        return phase

    def _kill_in_the_middle(self, group: Ranks, phase: Phase, step: int) -> None:
        remains = wait_until_torn(self._place_of(step), _UNTIL_TORN)
        group.kill(1)
        phase.killed = f"rank 1 in the save of step {step}"
        self._check(
            f"rank 1 was killed in the middle of the save of step {step}",
            remains.objects > 0 and not remains.committed,
            str(remains),
        )

    def _check_resumed(self, phase: Phase) -> None:
        resumed = phase.resumed
        claim = f"resumed on {phase.ranks} rank(s), the loss is what it was when it was saved"
        if resumed is None:
            self._check(claim, False, "nothing was loaded")
            return
        apart = abs(resumed.again - resumed.recorded)
        self._check(
            claim,
            apart <= _SAME_LOSS,
            f"step {resumed.step}: {resumed.recorded:.6f}, now {resumed.again:.6f}",
        )

    def _place_of(self, step: int) -> CheckpointURI:
        return self._run.join(f"step-{step}")

    def _check(self, claim: str, holds: bool, evidence: str) -> None:
        self._checks.append(Check(claim, holds, evidence))


def _is_not_found(checkpoint: CheckpointURI) -> bool:
    try:
        cloudckpt.inspect(checkpoint)
    except cloudckpt.errors.CheckpointNotFoundError:
        return True
    return False


def _brief(error: str) -> str:
    """The first sentence of an error of gloo, without the place in its source."""
    return re.sub(r"\[/[^]]*\] ", "", error).partition(". ")[0]


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP clean up as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
