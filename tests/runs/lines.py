"""A run in which jobs begin, are replaced, live on, go back and are killed, as chance draws them.

The model knows of each commit which one it continues, as no store does, and has all of them for
ever: the line of a run is the chain from the newest commit of the job that claimed the run last.
After each rule all that can be asked of the run must be as the model says.
"""

from __future__ import annotations

import math
import tempfile
import uuid
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import cloudckpt
from cloudckpt import CheckpointManager, Config
from cloudckpt.checkpointer import CheckpointerConfig, CommitHook
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CloudCheckpointError,
)
from cloudckpt.runs import Preemption, prune
from cloudckpt.runs.contents import read_content
from cloudckpt.runs.deleting import delete_run
from cloudckpt.transfer.retry import open_store
from cloudckpt.uri import CheckpointURI

__all__ = ["Lines"]

MOST_JOBS = 4


@dataclass(eq=False)
class Commit:
    """A checkpoint, and the one that it continues."""

    step: int
    value: float
    loss: float
    parent: Commit | None
    is_unread: bool = False

    def chain(self) -> list[Commit]:
        return [self, *(self.parent.chain() if self.parent is not None else [])]


@dataclass(eq=False)
class Claimed:
    """A claim: what the job continued when it made it, and its newest commit since."""

    base: Commit | None
    newest: Commit | None = None

    def line(self) -> list[Commit]:
        tip = self.newest or self.base
        return tip.chain() if tip is not None else []


class Killed(CommitHook):
    """Ends a save right before its commit, if it is told to."""

    is_due = False

    def before_commit(self, uri, metadata) -> None:
        if self.is_due:
            raise InterruptedError("killed")


@dataclass(eq=False)
class Job:
    manager: CheckpointManager
    hook: Killed
    seen: Claimed | None
    max_to_keep: int | None
    by_loss: str
    keep_abandoned: bool
    claim: Claimed | None = None
    head: Commit | None = None  # what its next save continues
    has_restored: bool = False
    begins: bool = True  # whether its next save begins a new line
    step: int = 0


def state(value: float) -> dict:
    return {"w": torch.full((64,), float(value)), "frozen": torch.arange(64.0)}


BY_LOSS = st.sampled_from(["", "best_to_keep", "max_to_keep"])
"""Empty if the newest are kept, otherwise the option that says how many of the best."""


def rules(keep: int | None, by_loss: str) -> dict[str, Any]:
    """What is kept, as options."""
    if by_loss:
        return {by_loss: keep, "best_metric": "loss", "best_mode": "min"}
    return {"max_to_keep": keep}


class Lines(RuleBasedStateMachine):
    """Attributes: where the run is, and the options."""

    place: str | None = None
    config = Config(connections=2)

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, Commit] = {}
        self.copied: dict[int, Commit] = {}  # the steps of a copy of the run
        self.other: Commit | None = None  # the newest of another program
        self.claim: Claimed | None = None
        self.damaged: set[str] = set()  # the keys of data
        self.folder = f"{self.place or tempfile.mkdtemp()}/{uuid.uuid4().hex}"
        self.uri = str(CheckpointURI.parse(f"{self.folder}/run"))
        self.jobs: list[Job] = []
        self.saves = 0.0

    def teardown(self) -> None:
        for one in self.jobs:
            one.manager.close()

    def step_at(self, step: int) -> CheckpointURI:
        return CheckpointURI.parse(f"{self.uri}/step-{step}")

    def managed(self, uri: str, **options: Any) -> CheckpointManager:
        signals = Preemption(signals=())
        return CheckpointManager(uri, asynchronous=False, preemption=signals, **options)

    def objects(self, step: int) -> set[str]:
        """The keys of the data of a committed step, those of others that it refers to too."""
        at = self.step_at(step)
        return {at.key(one.name) for one in read_content(at, self.config).commit.objects}

    def is_damaged(self, step: int) -> bool:
        return bool(self.damaged and self.damaged & self.objects(step))

    # the model

    def on_line(self, steps: dict[int, Commit] | None = None) -> dict[int, Commit]:
        """The readable steps on the line, of the run or of a copy of it."""
        steps = self.steps if steps is None else steps
        known = {step: one for step, one in steps.items() if not one.is_unread}
        line = [] if self.claim is None else self.claim.line()
        is_known = self.claim is None or len(known) == len(steps)
        if known and is_known and not any(one in line for one in known.values()):
            line = known[max(known)].chain()  # as if there were no claim
        return {step: one for step, one in sorted(known.items()) if one in line}

    def abandoned(self) -> list[int]:
        """The readable steps that are not on the line."""
        readable = {step for step, one in self.steps.items() if not one.is_unread}
        return sorted(readable - self.on_line().keys())

    def unneeded(self, max_to_keep: int | None, by_loss: str) -> list[int]:
        line = self.on_line()
        if max_to_keep is None or not line:
            return []
        newest = sorted(line, reverse=True)
        if not by_loss:
            return sorted(newest[max_to_keep:])
        scored = [step for step in newest if line[step].loss < math.inf]
        best = sorted(scored, key=lambda step: line[step].loss)[:max_to_keep]
        return sorted({*scored} - {newest[0], *best})

    def claims(self, job: Job, base: Commit | None) -> bool:
        """Whether a job may write; it has claimed the run then."""
        if self.claim is not (job.claim or job.seen):
            return False
        if job.claim is None or job.begins:
            self.claim = job.claim = Claimed(base)
        job.begins = False
        return True

    # what happens

    @rule(
        max_to_keep=st.sampled_from([None, None, 1, 2]),
        by_loss=BY_LOSS,
        incremental=st.booleans(),
        keep_abandoned=st.booleans(),
    )
    def begins(self, max_to_keep, by_loss, incremental, keep_abandoned) -> None:
        if len(self.jobs) == MOST_JOBS:
            self.jobs.pop(0).manager.close()
        hook = Killed()
        manager = self.managed(
            self.uri,
            **rules(max_to_keep, by_loss),
            incremental=incremental,
            keep_abandoned=keep_abandoned,
            checkpointer=CheckpointerConfig(commit_hook=hook, config=self.config),
        )
        options = max_to_keep, by_loss, keep_abandoned
        self.jobs.append(Job(manager, hook, self.claim, *options))

    def job(self, data: st.DataObject) -> Job:
        return self.jobs[data.draw(st.integers(0, len(self.jobs) - 1))]

    @precondition(lambda self: self.jobs)
    @rule(
        data=st.data(),
        further=st.integers(1, 3),
        loss=st.integers(0, 9),
        dies=st.booleans(),
        force=st.booleans(),
    )
    def saves_a_step(self, data, further, loss, dies, force) -> None:
        job = self.job(data)
        step = job.step + further
        self.saves += 1
        one = Commit(step, self.saves, loss, job.head)
        expected: type[CloudCheckpointError] | None = None
        is_refused = step in self.steps and not job.has_restored and not force
        if not self.claims(job, job.head):
            # a hook, and what is at the location, come before the last look at the claim
            is_other = dies or is_refused
            expected = CloudCheckpointError if is_other else CheckpointConflictError
        elif is_refused:
            expected = CheckpointExistsError
        elif dies:
            expected = CloudCheckpointError
        job.hook.is_due = dies
        options = {"metrics": {"loss": float(loss)}, "force": force}
        if expected is not None:
            with pytest.raises(expected):
                job.manager.save(step, state(one.value), **options)
            return
        assert job.manager.save(step, state(one.value), **options)
        job.manager.wait_until_finished()
        assert job.claim is not None
        self.steps[step] = job.claim.newest = job.head = one
        job.step = step
        gone = self.unneeded(job.max_to_keep, job.by_loss)
        if job.has_restored and not job.keep_abandoned:
            gone += self.abandoned()
        for step in gone:
            del self.steps[step]
        self.copies()

    def loads(self, job: Job, step: int | None) -> None:
        """Has a job restore a step, or the newest."""
        found = state(-1)
        line = self.on_line() if step is None else {step: self.steps[step]}
        good = [one for step, one in line.items() if not self.is_damaged(step)]
        is_damage = len(good) < len(line) or (
            step is None and any(one.is_unread for one in self.steps.values())
        )
        if not good and is_damage:
            with pytest.raises(CheckpointCorruptError):
                job.manager.restore(found, step=step)
            return
        expected = good[-1] if good else None
        assert job.manager.restore(found, step=step) == (expected and expected.step)
        assert found["w"].unique().tolist() == [expected.value if expected else -1]
        job.has_restored = True
        job.begins = True
        job.head = expected
        job.step = expected.step if expected else 0

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def restores(self, data) -> None:
        self.loads(self.job(data), None)

    @precondition(lambda self: self.jobs and self.steps)
    @rule(data=st.data())
    def goes_to(self, data) -> None:
        readable = [step for step, one in self.steps.items() if not one.is_unread]
        if readable:
            self.loads(self.job(data), data.draw(st.sampled_from(sorted(readable))))

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def somebody_removes_one(self, data) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        cloudckpt.delete(self.step_at(step), config=self.config)
        del self.steps[step]

    @precondition(lambda self: self.jobs and self.steps)
    @rule(data=st.data())
    def deletes_one(self, data) -> None:
        job, step = self.job(data), data.draw(st.sampled_from(sorted(self.steps)))
        line = self.on_line()
        base = line[max(line)] if line else None
        begins, job.begins = job.begins, False
        may = self.claims(job, base)
        job.begins = begins  # a deletion begins no line
        if not may:
            with pytest.raises(CheckpointConflictError):
                job.manager.delete(step)
            return
        job.manager.delete(step)
        del self.steps[step]

    @rule(keep=st.integers(1, 2), by_loss=BY_LOSS, abandoned=st.booleans())
    def prunes(self, keep, by_loss, abandoned) -> None:
        line = self.on_line()
        if not any(one.loss < math.inf for one in line.values()):
            by_loss = ""
        options = rules(keep, by_loss) | {"abandoned": abandoned, "config": self.config}
        expected = self.unneeded(keep, by_loss) + (self.abandoned() if abandoned else [])
        if expected and max(self.steps.keys() - self.abandoned()) not in line:
            with pytest.raises(CheckpointCorruptError):
                prune(self.uri, **options)
            return
        found = prune(self.uri, **options)
        assert found == [str(self.step_at(step)) for step in expected]
        for step in expected:
            del self.steps[step]

    @precondition(lambda self: not self.jobs and self.claim is None)
    @rule(count=st.integers(1, 3))
    def another_program_has_saved(self, count) -> None:
        for _ in range(count):
            self.saves += 1
            step = 2 if self.other is None else self.other.step + 2
            one = self.other = Commit(step, self.saves, math.inf, self.other)
            cloudckpt.save(
                state(one.value), checkpoint_id=self.step_at(one.step), config=self.config
            )
            self.steps[one.step] = one

    @precondition(lambda self: self.claim is not None)
    @rule(step=st.integers(1, 12))
    def one_is_copied_in(self, step) -> None:
        if step in self.steps:
            return
        self.saves += 1
        one = Commit(step, self.saves, 0.0, None)
        elsewhere = f"{self.folder}/elsewhere"
        with self.managed(elsewhere, config=self.config) as manager:
            manager.save(step, state(one.value), metrics={"loss": 0.0}, force=True)
        cloudckpt.copy(f"{elsewhere}/step-{step}", self.step_at(step), config=self.config)
        self.steps[step] = one

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), notes=st.booleans())
    def one_is_damaged(self, data, notes) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        one, store = self.steps[step], open_store(self.step_at(step), self.config)
        if one.is_unread:
            return
        if notes:
            key = self.step_at(step).key(".metadata")
            content = bytes(store.get(key)[0])
            if b'"metrics"' not in content:
                return
            store.put(key, [memoryview(content.replace(b'"metrics"', b'"Metrics"'))], checksum=None)
            one.is_unread = True
            return
        for key in self.objects(step) - self.damaged:
            content = bytearray(store.get(key)[0])
            for at in range(len(content) // 8, 7 * len(content) // 8):
                content[at] ^= 1
            store.put(key, [memoryview(content)], checksum=None)
            self.damaged.add(key)

    @precondition(lambda self: self.steps)
    @rule()
    def leftovers_are_swept(self) -> None:
        cloudckpt.sweep(self.uri, older_than=0, config=self.config)
        for step, one in self.steps.items():
            if not (one.is_unread or self.is_damaged(step)):
                cloudckpt.verify(self.step_at(step), config=self.config)

    def copies(self) -> None:
        """Copies the run to where it was copied before, unless something is damaged."""
        if self.damaged or any(one.is_unread for one in self.steps.values()):
            return
        copied = cloudckpt.copy(self.uri, f"{self.folder}/copy", config=self.config)
        assert copied.checkpoints + copied.already_there == len(self.steps)
        self.copied |= self.steps
        line = self.on_line(self.copied)
        found = cloudckpt.list_checkpoints(f"{self.folder}/copy", config=self.config)
        abandoned = {one.step: one.is_abandoned for one in found if one.is_committed}
        assert abandoned == {step: step not in line for step in self.copied}

    @precondition(lambda self: self.copied)
    @rule()
    def the_copy_is_removed(self) -> None:
        self.copied = {}
        delete_run(f"{self.folder}/copy", config=self.config)
        at = CheckpointURI.parse(f"{self.folder}/copy")
        assert list(open_store(at, self.config).list(at.key(""))) == []

    # what everybody sees

    @invariant()
    def everybody_sees_the_line(self) -> None:
        line = self.on_line()
        newest = cloudckpt.latest(self.uri, config=self.config)
        assert newest == (str(self.step_at(max(line))) if line else None)
        listed = cloudckpt.list_checkpoints(self.uri, config=self.config)
        found = {one.step: one for one in listed}
        committed = {step: one.is_abandoned for step, one in found.items() if one.is_committed}
        assert committed == {
            step: not (one.is_unread or step in line) for step, one in self.steps.items()
        }
        if self.jobs:
            manager = self.jobs[-1].manager
            assert manager.all_steps() == [*line]
            if self.jobs[-1].by_loss:
                losses = {step: one.loss for step, one in line.items() if one.loss < math.inf}
                best = min(losses, key=lambda step: (losses[step], -step), default=None)
                assert manager.best_step() == best
