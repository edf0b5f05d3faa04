"""Exchanges the statuses of ranks: all begin a save or load, or all raise the same error.

A rank may be unable to begin: its location is not a valid URI, its ``state_dict()`` raises, or one
of its earlier saves is still in progress. torch's own steps report failures that happen within them
to the other ranks, but not earlier ones. So the ranks meet first, and exchange their statuses. They
do the same at the end of parts of the work, such as the reads of a load.

A rank that waits for others logs after 15 s which of them have not arrived: ``if rank == 0:
cloudckpt.save(...)`` would wait until the timeout of the process group, half an hour by default,
and then fail with a network error. The waiting ranks are recorded in the store through which the
group's ranks met. A rank records itself there only after waiting for a while, from a separate
thread, and removes the record when the wait is over: a call to which all ranks come in time makes
no request to the store.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import itertools
import logging
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._version import __version__
from cloudckpt.checkpoint.torch_private import Collectives, device_for_collectives, store_of_group
from cloudckpt.dcp.failures import break_off, one_error, portable, portable_errors, unpickled
from cloudckpt.dcp.gloo_threads import let_finish
from cloudckpt.errors import (
    CloudCheckpointError,
    ConfigError,
    DifferentCheckpointsError,
    ProcessGroupError,
    RanksFailedError,
    TransferCancelledError,
)
from cloudckpt.gc_pause import paused_gc

__all__ = [
    "LOADING",
    "PLAN_ANEW",
    "PLAN_EACH_TIME",
    "Consensus",
    "Meeting",
    "RankStatus",
    "all_expected",
    "check_together",
    "collective",
    "no_more_expected",
]

logger = logging.getLogger("cloudckpt")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

if sys.version_info < (3, 14):
    atexit.register(let_finish)

FIRST_LINE = 15.0
"""Seconds of waiting before a rank logs which other ranks are missing."""
LOADING = "while the checkpoint was loaded"
"""The value of the argument ``during`` of :meth:`Meeting.exchange` that a load passes."""
_ECHOES = (RanksFailedError, TransferCancelledError)
"""Errors of ranks that fail because others have failed."""
_MARKED_AFTER = 0.5  # seconds of waiting after which a rank is marked as waiting
_LAST_CALL = 10.0  # seconds that a call of the store may take when the interpreter ends
# ranks of one group that check for the others: each check costs a request per rank
_MOST_LOOKS = 16

_call: ContextVar[str | None] = ContextVar("cloudckpt_call", default=None)
_groups: ContextVar[tuple[dist.ProcessGroup, ...]] = ContextVar("cloudckpt_groups", default=())

PLAN_EACH_TIME = 0
"""The plan number of a rank that plans every save, or that does not save."""
PLAN_ANEW = 1
"""The plan number of a rank that has no plan from an earlier save."""


class RankStatus(NamedTuple):
    """The status that a rank reports in a meeting.

    Attributes:
        failure: The error that keeps the rank from beginning; None if it can begin.
        earlier: The number of the earlier save that failed with ``failure``; None if this call
            failed, or nothing did.
        location: The location of the save or load, which must be the same on all ranks; empty if it
            may differ.
        options: Other settings that must be the same on all ranks, each as ``name=value``.
        is_busy: Whether an earlier save of the rank is in progress.
        is_stuck: Whether that save makes no progress because the store fails or does not answer.
        plan: The number of the rank's plan for the save; or ``PLAN_ANEW`` or ``PLAN_EACH_TIME``.
        version: The version of this package, which must be the same on all ranks.
    """

    failure: BaseException | None = None
    earlier: int | None = None
    location: str = ""
    options: tuple[str, ...] = ()
    is_busy: bool = False
    is_stuck: bool = False
    plan: int = PLAN_EACH_TIME
    version: str = __version__

    @property
    def is_early(self) -> bool:
        """Whether the rank failed before it had a location, or in an earlier save."""
        return self.failure is not None and (not self.location or self.earlier is not None)

    def _apart(self, other: RankStatus) -> str:
        return ", ".join(option for option in self.options if option not in other.options)

    def difference(self, first: RankStatus, rank: int) -> CloudCheckpointError | None:
        """Returns an error if this status, of ``rank``, contradicts the first rank's; else None."""
        error_class: type[CloudCheckpointError] = ConfigError
        if self.version != first.version:
            setting, mine, theirs = "cloudckpt", self.version, first.version
            advice = "install the same version on all ranks"
        elif self.options != first.options:
            setting, mine, theirs = "the options", self._apart(first), first._apart(self)
            advice = "give the same on all ranks"
        elif self.location != first.location:
            setting, mine, theirs = "the location", self.location, first.location
            advice = "give the same checkpoint_id on all ranks, for example by broadcasting it"
            error_class = DifferentCheckpointsError
        else:
            return None
        return error_class(
            f"rank 0 has {setting} {theirs}, but rank {rank} has {mine}: {advice}",
            uri=first.location or None,
        )


@dataclass(frozen=True)
class Consensus:
    """The result of a meeting, the same on all ranks except for ``rank``.

    Attributes:
        rank: This rank in the group.
        statuses: The statuses, by rank.
        values: The values that ranks have reported in addition, by rank.
        during: What the ranks were doing, such as ``LOADING``; empty if they met before they began.
    """

    rank: int
    statuses: Sequence[RankStatus]
    values: list[Any]
    during: str

    @property
    def any_is_busy(self) -> bool:
        """Whether a save is in progress on some rank."""
        return any(one.is_busy for one in self.statuses)

    @property
    def any_is_stuck(self) -> bool:
        """Whether a save makes no progress on some rank."""
        return any(one.is_stuck for one in self.statuses)

    @property
    def plan(self) -> int:
        """The number of the plan that all ranks have in common.

        It is ``PLAN_EACH_TIME`` if some rank plans every save; otherwise ``PLAN_ANEW`` if the ranks
        have no common plan.
        """
        plans = {one.plan for one in self.statuses}
        if PLAN_EACH_TIME in plans:
            return PLAN_EACH_TIME
        return plans.pop() if len(plans) == 1 else PLAN_ANEW

    @property
    def earlier(self) -> set[int]:
        """The numbers of earlier saves whose failure some rank has reported in this meeting."""
        return {one.earlier for one in self.statuses if one.earlier is not None}

    def raise_on_all_ranks(self) -> None:
        """Raises the same error on all ranks, if a rank can't go on or contradicts another.

        Raises:
            BaseException: See :meth:`objection`.
        """
        if (error := self.objection()) is not None:
            raise error

    def objection(self) -> BaseException | None:
        """Returns the error that all ranks are to raise after the meeting; None if all may go on.

        Returns:
            - A ConfigError if ranks have different options or versions of cloudckpt; a
              DifferentCheckpointsError if they have different locations.
            - Else, if ranks failed, the error that ``failures.one_error`` makes of their failures,
              or the failure itself if this process is alone.

            If some ranks failed early (:attr:`RankStatus.is_early`), only their failures count, and
            differences do not.
        """
        failures = {
            rank: one.failure for rank, one in enumerate(self.statuses) if one.failure is not None
        }
        if self.during:  # a rank may have stopped, or heard of the error, because another failed
            failures = {
                rank: error for rank, error in failures.items() if not isinstance(error, _ECHOES)
            } or failures
        # an early failure explains later failures of other ranks
        early = {rank: error for rank, error in failures.items() if self.statuses[rank].is_early}
        first = self.statuses[0]
        if not early:
            for rank, one in enumerate(self.statuses):
                if (error := one.difference(first, rank)) is not None:
                    return error
        failures = early or failures
        if not failures:
            return None
        if len(self.statuses) == 1:
            return failures[0]  # no other rank has to understand it
        when = "in an earlier save" if self.earlier else self.during or "at the beginning"
        return one_error(failures, self.rank, when, first.location or None)


@functools.cache
def _warn_of_others() -> None:
    """Warns, once, if this process is one of several that save by themselves."""
    count = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and count.isdecimal() and int(count) > 1:
        logger.warning(
            "this is one of %s processes (WORLD_SIZE), but torch.distributed is not "
            "initialized: each process saves and loads by itself, and saves to the same "
            "location replace each other. Call torch.distributed.init_process_group() first, "
            "or pass no_dist=True if this is intended",
            count,
        )


class Meeting:
    """Exchanges statuses between the ranks of a group, so that all go on, or none does.

    Attributes:
        group: The ranks; None if this process is alone.
        is_broken: Whether a collective may still be in progress on some rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Creates the object; not a collective call.

        Args:
            group: The ranks; None if this process is alone.

        Raises:
            ConfigError: If this rank is not in the group.
        """
        # torch gives this value to a rank outside of the group
        if group is not None and cast(Any, group) == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(
                "this rank is not in the given process group: make this call only on ranks of "
                "that group"
            )
        self.group = group
        self.is_broken = False

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, no_dist: bool) -> Meeting:
        """Returns the meeting of the ranks that torch would save with, given these two arguments.

        Args:
            process_group: The ranks; None for the default group. It is ignored if torch.distributed
                is not initialized: this process is then alone.
            no_dist: Whether this process is alone in any case.

        Raises:
            ConfigError: If this rank is not in the group.
        """
        if not (no_dist or (dist.is_available() and dist.is_initialized())):
            _warn_of_others()
            return cls(None)
        if no_dist:
            return cls(None)
        group = process_group if process_group is not None else dist.group.WORLD
        return cls(None if dist.get_world_size(group) == 1 else group)

    @property
    def rank(self) -> int:
        """This rank in the group, even after the group was destroyed."""
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def exchange(self, status: RankStatus, value: Any = None, *, during: str = "") -> Consensus:
        """Returns the statuses of all ranks, and a value of each; a collective call.

        Args:
            status: This rank's status.
            value: A value to report in addition.
            during: What the ranks were doing, such as ``LOADING``, for messages; empty if they
                meet before they begin. Only if it is empty, a rank that waits long logs which ranks
                are missing.

        Raises:
            ProcessGroupError: If a rank ended, a connection to it broke, or the group was
                destroyed; if ``status`` has a failure, that is raised instead.
        """
        if self.group is None:
            return Consensus(0, [status], [value], during)
        with self._together(status.failure, during):
            rank, failure = dist.get_rank(self.group), portable(status.failure, status.location)
            own = status._replace(failure=failure), value
            reports: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(reports, pickle.dumps(own), group=self.group)
        # equal reports of many ranks are unpickled once; this rank's failure keeps its traceback
        parsed = {report: pickle.loads(report) for report in set(reports)}  # noqa: S301 - of a rank
        by_rank = [parsed[report] for report in reports]
        by_rank[rank] = own
        statuses, values = zip(*by_rank, strict=True)
        return Consensus(rank, statuses, [*values], during)

    def begin(
        self,
        prepare: Callable[[], T],
        status: Callable[[T], RankStatus] | None = None,
        *,
        during: str = "",
    ) -> T:
        """Returns the result of ``prepare``, if it succeeds on all ranks; a collective call.

        Args:
            prepare: Called on this rank. An error that it raises is reported to all ranks.
            status: Makes this rank's status from the result of ``prepare``; None: an empty one.
            during: As in :meth:`exchange`, if ``prepare`` is part of the work itself.

        Raises:
            BaseException: The error of ``prepare``, if this process is alone.
            CloudCheckpointError: See :meth:`Consensus.objection` and :meth:`exchange`.
        """
        return self.agreed(prepare, status, during=during)[0]

    def gathered(self, work: Callable[[], T], *, during: str = "while they worked") -> list[T]:
        """Returns the results of ``work`` of all ranks, by rank; otherwise like :meth:`begin`."""
        return self.agreed(work, during=during, shares=True)[1].values

    def agreed(
        self,
        prepare: Callable[[], T],
        status: Callable[[T], RankStatus] | None = None,
        *,
        during: str = "",
        shares: bool = False,
    ) -> tuple[T, Consensus]:
        """Returns the result of ``prepare``, as :meth:`begin` does, and the result of the meeting.

        Args:
            prepare: As in :meth:`begin`.
            status: As in :meth:`begin`.
            during: As in :meth:`begin`.
            shares: Whether :attr:`Consensus.values` are to have the results of all ranks.
        """
        with all_expected(None if during else self.group):
            try:
                made = prepare()
                own = RankStatus() if status is None else status(made)
            except BaseException as error:
                self.exchange(RankStatus(failure=error), during=during).raise_on_all_ranks()
                raise
            consensus = self.exchange(own, made if shares else None, during=during)
        consensus.raise_on_all_ranks()
        return made, consensus

    def broadcast_from_first(self, compute: Callable[[], T]) -> T:
        """Calls ``compute`` on the first rank, and returns its result on all; a collective call.

        Args:
            compute: Called on the first rank only. An error that it raises is raised on all ranks.

        Raises:
            BaseException: See :meth:`begin`.
        """
        made = self.begin(compute if self.rank == 0 else lambda: None)
        return cast(T, self.from_first(made))

    def from_first(self, value: T) -> T:
        """Returns the first rank's value on all ranks, whose own is ignored; a collective call.

        Raises:
            ProcessGroupError: If a rank ended, a connection to it broke, or the group was
                destroyed.
        """
        if self.group is None:
            return value
        values = [value]
        with self._together(None):
            device = torch.device(device_for_collectives(self.group))
            dist.broadcast_object_list(values, group=self.group, group_src=0, device=device)
        return values[0]

    def combined_by_first(
        self, step: str, work: Callable[[], T], combine: Callable[[list[T]], R], uri: str | None
    ) -> R:
        """Calls ``work`` on all ranks, and ``combine`` on the first; a collective call.

        Returns the result of ``combine`` on all ranks; only the first gets all results of ``work``.

        Args:
            step: The step of the save or load, for messages.
            work: Called on this rank.
            combine: Called on the first rank, with the results of ``work`` by rank.
            uri: The checkpoint, for messages.

        Raises:
            BaseException: If ``work`` fails on a rank, or ``combine`` on the first: one error for
                all ranks, see ``failures.one_error``. Its cause is a CheckpointException with the
                failures of all ranks.
            ProcessGroupError: If a rank ended, a connection to it broke, or the group was
                destroyed.
        """
        return cast(R, self._through_first(Collectives.all_reduce, step, work, combine, uri))

    def divided_by_first(
        self,
        step: str,
        work: Callable[[], T],
        divide: Callable[[list[T]], list[R]],
        uri: str | None,
    ) -> R:
        """Calls ``work`` on all ranks, and ``divide`` on the first; a collective call.

        Returns this rank's entry of the list that ``divide`` returns; otherwise it is like
        :meth:`combined_by_first`.
        """
        return cast(R, self._through_first(Collectives.reduce_scatter, step, work, divide, uri))

    def _through_first(
        self,
        send: Callable[..., Any],
        step: str,
        work: Callable[[], object],
        combine: Callable[[list[Any]], object],
        uri: str | None,
    ) -> Any:
        sendable, when = portable_errors(uri), f"in step {step!r}"

        # pickled here, where an error fails the step, and not by the collective
        def pickled() -> object:
            return work() if self.group is None else pickle.dumps(work())

        def combined(given: list[Any]) -> object:
            if self.group is not None:
                with paused_gc():
                    for rank, data in enumerate(given):  # in place, so that the pickles are freed
                        given[rank] = unpickled(data, uri)
            return combine(given)

        with self._together(None, when):
            ranks = Collectives(self.group, self.group is not None, 0)  # fails without the group
            try:
                return send(ranks, step, sendable(pickled), sendable(combined))
            except CheckpointException as exc:
                failed = exc
        failures = {rank: error for rank, (error, _) in failed.failures.items()}
        raise one_error(failures, self.rank, when, uri) from failed

    @contextlib.contextmanager
    def _together(self, failure: BaseException | None, during: str = "") -> Iterator[None]:
        try:
            with all_expected(None if during else self.group):
                yield
        except BaseException as exc:
            self.is_broken = True
            break_off(self.group)  # the others would wait for this rank
            # gloo raises the former, and a destroyed group the latter
            if not isinstance(exc, (RuntimeError, ValueError)):
                raise
            if failure is not None:
                raise failure from exc
            when = during and f" {during}"
            raise ProcessGroupError(
                f"the process group was destroyed{when}: before that, wait for all saves and loads"
                if isinstance(exc, ValueError)
                else f"the ranks lost each other{when}: one of them ended, or a connection between "
                "them broke; find out which rank ended first and why, and start all of them again",
                committed=None if during else False,
                cause=exc,
            ) from exc


def check_together(use_collectives: bool, uri: str | None = None) -> None:
    """Refuses ``use_collectives=False``, with which each rank would commit on its own.

    Raises:
        ConfigError: If ``use_collectives`` is false.
    """
    if not use_collectives:
        raise ConfigError(
            "use_collectives=False is not supported: each rank would commit its part by "
            "itself, and if one of them failed, the location would hold parts of two "
            "checkpoints. Leave it out; all ranks then commit together. If one process is to "
            "save alone, pass no_dist=True",
            uri=uri,
        )


def collective(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a collective function so that logged lines about missing ranks call it ``name``.

    In nested calls the outermost function gives the name.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            token = _call.set(_call.get() or name)
            try:
                return function(*args, **kwargs)
            finally:
                _call.reset(token)

        return call

    return decorate


@contextlib.contextmanager
def all_expected(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Logs which ranks are missing while this rank waits for them in a ``with`` block.

    No rank may be able to leave the block before all ranks have entered it. The ranks are logged
    once, after :data:`FIRST_LINE` seconds. Nothing is logged inside another such block of the same
    group, or outside of a :func:`collective` function, whose name the log line needs.
    """
    groups, call = _groups.get(), _call.get()
    if group is None or call is None or group in groups:
        yield
        return
    token = _groups.set((*groups, group))
    wait = _Wait(group, call)
    try:
        yield
    finally:
        wait.over.set()
        _groups.reset(token)


class _Wait:
    """This rank's wait in an :func:`all_expected` block, and the thread that logs missing ranks.

    ``Thread.start`` is not used, as it returns only once the thread runs, for which a training loop
    could wait long. An exit handler ends the thread: if the interpreter ended it in a call of
    torch's rendezvous store (C++), the process would end by ``std::terminate``.
    """

    def __init__(self, group: dist.ProcessGroup, call: str) -> None:
        self._group = weakref.ref(group)  # the group may be destroyed once the wait is over
        self._call = call
        self.over, self.ended = threading.Event(), threading.Event()
        if _closed.is_set():
            return
        _waits.add(self)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the interpreter ends, or the system has no thread left
            _waits.discard(self)

    def _run(self) -> None:
        try:
            # the store is gone when the job ends; the job itself reports its failures
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                self._watch()
        finally:
            self.ended.set()
            _waits.discard(self)

    def _watch(self) -> None:
        """Marks this rank as waiting and, if the wait lasts, logs once which ranks are missing."""
        began = time.monotonic()
        if self.over.wait(_MARKED_AFTER) or (group := self._group()) is None:
            return
        store, ranks = store_of_group(group), dist.get_process_group_ranks(group)
        own = dist.get_rank(group)
        del group
        if store is None:
            return
        looks, *marks = (f"cloudckpt/{self._call}/{n}" for n in ("looks", *range(len(ranks))))
        store.set(marks[own], "waits")
        try:
            if self.over.wait(FIRST_LINE - _MARKED_AFTER):
                return
            if len(ranks) <= _MOST_LOOKS or store.add(looks, 1) <= _MOST_LOOKS:
                present = dict(zip(ranks, marks, strict=True))
                missing = sorted(rank for rank in ranks if not store.check([present[rank]]))
                if missing and not self.over.is_set():
                    logger.warning(
                        "%s: rank %d has waited for %.0f s, because %s not called it. All ranks "
                        "of the process group must call it; is the call inside an `if rank == "
                        "0:`? The call goes on once they join, or fails at the group's timeout",
                        self._call,
                        ranks[own],
                        time.monotonic() - began,
                        _listed(missing),
                    )
            self.over.wait()
        finally:
            store.delete_key(marks[own])
            store.delete_key(looks)


def _listed(ranks: Sequence[int]) -> str:
    """Returns ranks as text with a verb, such as ``rank 3 has`` or ``ranks 1-7, 9 have``."""
    spans = []
    for _, span in itertools.groupby(enumerate(ranks), lambda numbered: numbered[1] - numbered[0]):
        (_, first), *_, (_, last) = [*span] * 2
        spans.append(str(first) if first == last else f"{first}-{last}")
    more = f" and others, {len(ranks)} in all" if len(spans) > 8 else ""
    noun, verb = ("rank", "has") if len(ranks) == 1 else ("ranks", "have")
    return f"{noun} {', '.join(spans[:8])}{more} {verb}"


_waits: set[_Wait] = set()
_closed = threading.Event()


def no_more_expected() -> None:
    """Ends the threads that log missing ranks, for good; called before a process ends."""
    _closed.set()
    waits = [*_waits]
    for wait in waits:
        wait.over.set()
    for wait in waits:
        wait.ended.wait(_LAST_CALL)


def _forget() -> None:
    """Drops the waits in a forked child, which has none of their threads."""
    _waits.clear()
    _closed.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(no_more_expected)
