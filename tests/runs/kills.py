"""Jobs of two ranks that are killed again and again, and go on from their newest checkpoint."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import cloudckpt
from runs.orphans import job, settled

__all__ = ["KINDS", "trained_through_kills"]

KINDS = ("SYNC", "THREAD", "PROCESS")
"""What saves: the trainer itself, a thread of it, or a process beside it."""

_KEPT = {"save_interval_steps": 2, "max_to_keep": 2, "keep_period": 6}


def trained_through_kills(
    folder: Path, kind: str, rng: random.Random, *, last: int, kills: int
) -> None:
    """Trains to a last step through some kills, of one rank or both, and sees that none is lost.

    Each job restores the state of one step, to the bit; the checkpoints that are kept are whole,
    and no others are there; and what the kills have left is swept away.
    """
    run = str(folder / "run")
    for _ in range(kills):
        if (first := _newest(run) + 1) >= last:
            break
        ended = job(
            folder,
            2,
            kind=kind,
            last=last,
            dies_at=rng.randrange(first, last),
            how="soon",
            victims=rng.choice([(0,), (1,), (0, 1)]),
            delay=rng.random() * 0.05,
            **_KEPT,
        )
        assert settled()  # a saving process may have been at it
        codes = [code for code, _ in ended]
        if codes == [0, 0]:  # it adopted the last step that there is to save, and saved nothing
            assert _newest(run) >= _expected_steps(last)[-1]
        else:
            assert -signal.SIGKILL in codes
    newest, last = _newest(run), last + 2  # the last job commits a step, and deletes old ones then
    ended = job(folder, 2, kind=kind, last=last, **_KEPT)
    assert [code for code, _ in ended] == [0, 0]
    for _, (restored, is_right) in ended:
        assert is_right
        assert (restored or 0) >= newest
    assert settled()
    checkpoints = cloudckpt.list_checkpoints(run)
    assert [one.step for one in checkpoints if one.is_committed] == _expected_steps(last)
    cloudckpt.sweep(run, older_than=0)
    left = cloudckpt.runs.find_leftovers(run, older_than=0)
    assert (left.objects, left.uploads) == ((), ())
    for step in _expected_steps(last):
        assert cloudckpt.verify(f"{run}/step-{step}").items == 6


def _newest(run: str) -> int:
    newest = cloudckpt.latest(run)
    return 0 if newest is None else int(newest.rpartition("-")[2])


def _expected_steps(last: int) -> list[int]:
    """The checkpoints that are there after some steps."""
    saved = range(2, last + 1, 2)
    return [step for step in saved if step % 6 == 0 or step in saved[-2:]]
