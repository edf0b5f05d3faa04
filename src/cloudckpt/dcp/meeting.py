"""The meeting of all ranks before a save or load: all begin, or all raise the same error.

A rank may be unable to begin: its location is not a valid URI, its ``state_dict()`` raises, or one
of its earlier saves is still in progress. torch's own steps report failures that happen within them
to the other ranks, but not earlier ones. So the ranks meet first, and exchange their statuses.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from cloudckpt._version import __version__
from cloudckpt.checkpoint.torch_private import Collectives, device_for_collectives
from cloudckpt.dcp.arrivals import all_expected
from cloudckpt.dcp.failures import portable
from cloudckpt.dcp.gloo_threads import let_finish
from cloudckpt.errors import (
    CloudCheckpointError,
    ConfigError,
    DifferentCheckpointsError,
    ProcessGroupError,
    RanksFailedError,
)

__all__ = [
    "PLAN_ANEW",
    "PLAN_EACH_TIME",
    "Meeting",
    "RankStatus",
    "Consensus",
    "break_off",
    "check_together",
    "one_error",
]

logger = logging.getLogger("cloudckpt")

T = TypeVar("T")

if sys.version_info < (3, 14):
    atexit.register(let_finish)

_NO_TAG = 1 << 20  # a tag that no message uses
_LATE = timedelta(milliseconds=1)

PLAN_EACH_TIME = 0
"""The plan number of a rank that plans every save, or that does not save."""
PLAN_ANEW = 1
"""The plan number of a rank that has no plan from an earlier save."""


class RankStatus(NamedTuple):
    """The status that a rank reports in a meeting.

    Attributes:
        failure: The error because of which it can't begin.
        earlier: The number of the earlier save in which ``failure`` happened; None if in none.
        location: The location of the save or load, which must be the same on all ranks; empty if it
            may differ.
        options: Other settings that must be the same on all ranks, as text.
        is_busy: Whether one of its saves is in progress.
        is_stuck: Whether that save makes no progress because the store fails or does not answer.
        plan: The number of its plan for the save, or one of the two constants above.
        version: The version of this package, which must be the same on all ranks.
    """

    failure: BaseException | None = None
    earlier: int | None = None
    location: str = ""
    options: str = ""
    is_busy: bool = False
    is_stuck: bool = False
    plan: int = PLAN_EACH_TIME
    version: str = __version__

    @property
    def is_early(self) -> bool:
        """Whether the rank failed before it had a location, or in an earlier save."""
        return self.failure is not None and (not self.location or self.earlier is not None)

    def difference(self, first: RankStatus, rank: int) -> CloudCheckpointError | None:
        """Returns the error if ``rank``'s status contradicts that of the first rank, else None."""
        uri = first.location or None
        if self.version != first.version:
            return ConfigError(
                f"rank 0 runs cloudckpt {first.version}, but rank {rank} runs {self.version}: "
                "install the same version on all ranks",
                uri=uri,
            )
        if self.options != first.options:
            return ConfigError(
                f"rank 0 has the options {first.options}, but rank {rank} has {self.options}: "
                "give the same on all ranks",
                uri=uri,
            )
        if self.location != first.location:
            return DifferentCheckpointsError(
                f"rank 0 uses {first.location}, but rank {rank} uses {self.location}: give the "
                "same checkpoint_id on all ranks, for example by broadcasting it",
                uri=uri,
            )
        return None


@dataclass(frozen=True)
class Consensus:
    """The result of a meeting, the same on all ranks.

    Attributes:
        rank: This rank in the group.
        statuses: The statuses, by rank.
        values: The values that ranks have reported besides, by rank.
    """

    rank: int
    statuses: Sequence[RankStatus]
    values: list[Any]

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
        """The number of the plan that all ranks have.

        ``PLAN_ANEW`` if ranks have no plan or different ones; ``PLAN_EACH_TIME`` if some rank plans
        every save.
        """
        plans = {one.plan for one in self.statuses}
        if PLAN_EACH_TIME in plans:
            return PLAN_EACH_TIME
        return plans.pop() if len(plans) == 1 else PLAN_ANEW

    @property
    def earlier(self) -> set[int]:
        """The numbers of earlier saves whose failure some rank has reported in this meeting."""
        return {one.earlier for one in self.statuses if one.earlier is not None}

    def raise_on_all_ranks(self, when: str = "before it began") -> None:
        """Raises the error because of which the ranks can't begin, the same on all, if any.

        Raises:
            BaseException: See :meth:`objection`.
        """
        if (error := self.objection(when)) is not None:
            raise error

    def objection(self, when: str = "before it began") -> BaseException | None:
        """Returns the error because of which the ranks can't begin, the same on all, or None.

        Args:
            when: When the failures happened, for the message.

        Returns:
            A ConfigError if two ranks were given different options, or run different versions; a
            DifferentCheckpointsError if they name different locations; the failure, if all failed
            ranks failed with the same class of error; a RanksFailedError if the classes differ, or
            come from outside cloudckpt.
        """
        failures = {
            rank: one.failure for rank, one in enumerate(self.statuses) if one.failure is not None
        }
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
        when = "in an earlier save" if self.earlier else when
        return one_error(failures, self.rank, when, first.location or None)


def _no_objection(made: object) -> RankStatus:
    return RankStatus()


@functools.cache
def _warn_of_others() -> None:
    """Warns, once, that this process is one of several that save by themselves."""
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
    """Exchanges statuses between the ranks of a group, so that they begin together or not at all.

    Attributes:
        group: The ranks; None if this process is alone.
        is_broken: Whether a collective may still be in progress on some rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Makes the meeting of a group; not a collective call.

        Raises:
            ConfigError: If this rank is not in the group: it would save or load alone.
        """
        # torch gives this value to a rank outside of the group
        if group is not None and cast(Any, group) == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(
                "this rank is not in the given process group: make this call on the ranks of "
                "the group only"
            )
        self.group = group
        self.is_broken = False

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, no_dist: bool) -> Meeting:
        """Returns the meeting of the ranks that torch would save with, given these two arguments.

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

    def exchange(
        self, status: RankStatus, value: Any = None, *, has_begun: bool = False
    ) -> Consensus:
        """Exchanges the ranks' statuses, and a value of each; a collective call.

        Args:
            status: This rank's status.
            value: A value to report besides.
            has_begun: Whether the ranks report the result of the work, not whether they can begin
                it.

        Raises:
            ProcessGroupError: If the ranks lost each other.
        """
        if self.group is None:
            return Consensus(0, [status], [value])
        with self._together(status.failure, has_begun):
            rank, failure = dist.get_rank(self.group), portable(status.failure, status.location)
            own = status._replace(failure=failure), value
            reports: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(reports, pickle.dumps(own), group=self.group)
        # equal reports of many ranks are unpickled once; this rank's failure keeps its traceback
        parsed = {report: pickle.loads(report) for report in set(reports)}  # noqa: S301 - of a rank
        found = [parsed[report] for report in reports]
        found[rank] = own
        return Consensus(rank, [one for one, _ in found], [one for _, one in found])

    def begin(
        self, prepare: Callable[[], T], status: Callable[[T], RankStatus] = _no_objection
    ) -> T:
        """Returns the result of ``prepare``, if it succeeds on all ranks; a collective call.

        Args:
            prepare: Called on this rank. An error that it raises is reported to all ranks.
            status: Makes this rank's status from the result of ``prepare``.

        Raises:
            BaseException: The error of ``prepare``, if this process is alone.
            CloudCheckpointError: See :meth:`Consensus.objection` and :meth:`exchange`.
        """
        return self.begin_planned(prepare, status)[0]

    def begin_planned(
        self, prepare: Callable[[], T], status: Callable[[T], RankStatus]
    ) -> tuple[T, int]:
        """Does the same as :meth:`begin`, and also returns :attr:`Consensus.plan`."""
        with all_expected(self.group):
            try:
                made = prepare()
                own = status(made)
            except BaseException as error:
                self.exchange(RankStatus(failure=error)).raise_on_all_ranks()
                raise
            consensus = self.exchange(own)
        consensus.raise_on_all_ranks()
        return made, consensus.plan

    def broadcast_from_first(self, compute: Callable[[], T]) -> T:
        """Calls ``compute`` on the first rank, and returns its result on all; a collective call.

        Args:
            compute: Called on the first rank only. An error that it raises is raised on all ranks.

        Raises:
            CloudCheckpointError: See :meth:`begin`.
        """
        if self.group is None:
            return compute()
        made = self.begin(compute if self.rank == 0 else lambda: None)
        return cast(T, self.from_first(made))

    def from_first(self, value: T) -> T:
        """Returns the first rank's value on all ranks; a collective call.

        Raises:
            ProcessGroupError: If the ranks lost each other.
        """
        if self.group is None:
            return value
        told = [value]
        with self._together(None, has_begun=False):
            device = torch.device(device_for_collectives(self.group))
            dist.broadcast_object_list(told, group=self.group, group_src=0, device=device)
        return told[0]

    def gathered(self, value: T) -> list[T]:
        """Returns the values of all ranks, by rank; a collective call.

        Raises:
            ProcessGroupError: If the ranks lost each other.
        """
        return self.exchange(RankStatus(), value, has_begun=True).values

    def divided_by_first(self, value: T, divide: Callable[[list[T]], list[T]]) -> T:
        """Returns this rank's part of what the first rank makes of all values; a collective call.

        No other rank gets the values of all.

        Args:
            value: This rank's value.
            divide: Returns a part for each rank, given the values of all; called on the first rank.
                An error that it raises is raised on all ranks.

        Raises:
            CloudCheckpointError: See :meth:`begin`.
        """
        ranks = Collectives(self.group, self.group is not None, 0)
        with self._together(None, has_begun=False):
            told = ranks.gather_object(value)
        parts = self.begin(lambda: None if told is None else divide(told))
        with self._together(None, has_begun=False):
            return ranks.scatter_object(parts)

    @contextlib.contextmanager
    def _together(self, failure: BaseException | None, has_begun: bool) -> Iterator[None]:
        try:
            with all_expected(None if has_begun else self.group):
                yield
        # gloo raises the former, and a destroyed group the latter
        except (RuntimeError, ValueError) as exc:
            self.is_broken = True
            break_off(self.group)
            if failure is not None:
                raise failure from exc
            outcome = "" if has_begun else ", and nothing was started"
            raise ProcessGroupError(
                f"the ranks did not meet{outcome}: a rank ended or its connection broke; find "
                "out which rank ended first and why, and start all of them again",
                committed=None if has_begun else False,
                cause=exc,
            ) from exc
        except BaseException:
            self.is_broken = True
            raise


def break_off(group: dist.ProcessGroup | None) -> None:
    """Ends the connections of a gloo group in which this rank has lost another.

    When a rank dies, only the ranks that wait for it notice. Others wait for one of these, which
    has raised but may live on; they would wait until the group's timeout. No collective of the
    group can succeed any more. A receive that times out closes all connections of a gloo group.
    """
    if group is None:
        return
    with contextlib.suppress(ValueError, KeyError, TypeError):  # the group was destroyed
        if dist.get_backend_config(group).find("gloo") < 0:
            return
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):  # timed out or already closed
            # torch's functions refuse a destroyed group, whose connections may still be open
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([nothing], peer, _NO_TAG).wait(_LATE)


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


def one_error(
    failures: Mapping[int, BaseException], rank: int, step: str, uri: str | None
) -> BaseException:
    """Combines the errors of several ranks into one that the user can act on.

    Args:
        failures: The errors, by rank.
        rank: This rank.
        step: When the ranks failed, for the message.
        uri: The checkpoint.
    """
    own = failures.get(rank)
    if own is not None and not isinstance(own, Exception):
        return own  # an interrupt of this process stays an interrupt
    first = failures[min(failures)]
    if isinstance(first, CloudCheckpointError) and len({type(e) for e in failures.values()}) == 1:
        return first
    texts = {rank: f"{type(error).__name__}: {error}" for rank, error in sorted(failures.items())}
    count = "one rank" if len(texts) == 1 else f"{len(texts)} ranks"
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in list(texts.items())[:8])
    more = f"; and {len(texts) - 8} more" if len(texts) > 8 else ""
    return RanksFailedError(f"{count} failed {step}: {listed}{more}", failures=texts, uri=uri)
