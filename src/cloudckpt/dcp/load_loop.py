"""Loads on all ranks of a group: one rank reads the metadata, and each plans its own reads.

The ranks meet four times:

1. The first rank reads the metadata and broadcasts it with the terms of the load. A rank that
   can't take part, or disagrees, goes on to the next meeting and reports it there.
2. Once each rank has planned and located its bytes, all report that they are ready and which bytes
   they want, so that bytes wanted by several ranks leave the store once (``sharing``). If a rank is
   not ready, all raise.
3. Once each rank has fetched its bytes, all report success or failure.
4. They do so again once the values are in the state dict, after the user's ``load_state_dict``
   methods. If such a method is itself a collective call and fails on one rank only, the others may
   wait for that rank until the timeout of the process group; so it logs its failure first.

torch's loader has every rank read the metadata, gathers all plans on one rank, and sends each rank
its part of them. This happens here, too, between the first two meetings, for planners with their
own global plan and for readers of other packages: these get every call that torch makes, and share
no reads.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from cloudckpt.dcp.content import Content
from cloudckpt.dcp.failures import one_error, unpickled
from cloudckpt.dcp.load_plan import CloudLoadPlanner
from cloudckpt.dcp.loading import Load, Offer, SharedReads
from cloudckpt.dcp.meeting import LOADING, Meeting, RankStatus, all_expected
from cloudckpt.dcp.reader import CloudStorageReader, Model
from cloudckpt.dcp.report import LoadReport
from cloudckpt.errors import (
    CheckpointReplacedError,
    CloudCheckpointError,
    MissingKeyError,
    text_of,
)
from cloudckpt.transfer.landing import Segment
from cloudckpt.transfer.retry import retry_if_replaced

__all__ = ["load_together"]

logger = logging.getLogger("cloudckpt")


def load_together(
    meeting: Meeting,
    state_dict: dict[str, Any],
    begin: Callable[[], tuple[StorageReader, LoadPlanner | None, Content]],
) -> LoadReport:
    """Loads into a state dict; a collective call, which raises the same error on all ranks.

    Args:
        meeting: The meeting of the ranks.
        state_dict: The caller's state dict; loaded values that are not filled in place replace its
            own.
        begin: Returns the reader, the planner (None for a default one), and the content to load.

    Returns:
        The report of the load.

    Raises:
        CloudCheckpointError: As :func:`cloudckpt.load`.
        Exception: An error of ``begin`` or of a ``load_state_dict()``, unchanged, if this process
            loads alone.
    """
    with all_expected(meeting.group):
        try:
            load = _Load(meeting, *begin())
        except BaseException as error:
            if meeting.group is None:
                raise
            load = _Load(meeting, failure=error)
    retry_if_replaced(load.run)

    def fill() -> LoadReport:
        report, given = load.reported(), list(state_dict.items())
        try:
            loaded = load.content.put(load.state_dict)
        except Exception as error:
            if meeting.group is not None:
                what = "the loaded values could not be put into the state dict"
                logger.error("%s: rank %d: %s: %s", report.uri, meeting.rank, what, text_of(error))
            raise
        for key, value in given:
            if loaded[str(key)] is not value:
                state_dict[key] = loaded[str(key)]
        return report

    return meeting.begin(fill, during="while the loaded values were put into the state dict")


class _Terms(NamedTuple):
    """The terms of a load, which the first rank broadcasts as a plain tuple.

    Attributes:
        location: The location that the first rank loads from.
        options: Options that must be the same on all ranks.
        version: The first rank's version of cloudckpt.
        begins: Whether the first rank can load.
        gathers: Whether the first rank needs the plans of all ranks.
        shares: Which ranks share their reads, see ``Config.shared_reads``.
        metadata: The metadata that the first rank has read; None if each rank reads it itself,
            this process loads alone, or the first rank can't load.
    """

    location: str = ""
    options: tuple[str, ...] = ()
    version: str = ""
    begins: bool = False
    gathers: bool = False
    shares: str = "off"
    metadata: bytes | Model | None = None


class _Load:
    """One rank's side of a load; a rank that can't take part has a failure and no reader."""

    def __init__(
        self,
        meeting: Meeting,
        reader: StorageReader | None = None,
        planner: LoadPlanner | None = None,
        content: Content | None = None,
        *,
        failure: BaseException | None = None,
    ) -> None:
        self.state_dict: dict[str, Any] = {}
        self.content = Content({}, meeting.rank) if content is None else content
        self._meeting = meeting
        self._failure = failure
        self._reader = cast(StorageReader, reader)
        self._ours = reader if type(reader) is CloudStorageReader else None
        self._uri = reader.checkpoint_id if isinstance(reader, CloudStorageReader) else None
        planner = DefaultLoadPlanner() if planner is None else planner
        is_changed = any(map(callable, vars(planner).values()))  # a method was replaced
        if type(planner) is DefaultLoadPlanner and not is_changed and self._uri is not None:
            planner = CloudLoadPlanner(self._uri, partial=planner.allow_partial_load)
        self._planner = planner
        self._metadata = Metadata({})  # replaced by the metadata that is read
        self._plan = LoadPlan([])
        self._load: Load | None = None
        self._begun: set[str] = set()  # the names that an earlier try may have begun to fill
        self._segments: Sequence[Segment] = ()  # those that other ranks may want, too

    def run(self) -> None:
        """Carries out the load together with the other ranks.

        Raises:
            CheckpointReplacedError: If another save has replaced the checkpoint; the call can then
                be repeated.
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        # after a retry: a planner may have begun to fill it
        self.state_dict, self._load = dict(self.content.state), None
        try:
            with contextlib.ExitStack() as until_the_end:
                with all_expected(self._meeting.group):
                    shared = self._ready(until_the_end)
                self._fetch(shared, until_the_end.pop_all())
        except CheckpointReplacedError:
            if self._failure is None:
                self._reader.reset()
            raise
        except Exception as error:
            if self._meeting.group is not None or isinstance(error, CloudCheckpointError):
                raise
            # as if one of several ranks had failed
            raise one_error({0: error}, 0, LOADING, self._uri) from error

    def reported(self) -> LoadReport:
        """Returns the report of the load; logs the notes of the content.

        Rank 0 also logs the report, unless the planner's ``logs`` is False.
        """
        planner, content, uri = self._planner, self.content, self._uri or ""
        for note in content.notes:
            logger.warning("%s: %s", uri, note)
        wanted = getattr(planner, "state_dict", self.state_dict)
        # some planners make their own
        metadata = getattr(planner, "metadata", None) or self._metadata
        ours = planner if isinstance(planner, CloudLoadPlanner) else None
        report = LoadReport.of(
            wanted,
            metadata,
            self._plan,
            uri,
            left_alone=content.left_alone | ({} if ours is None else ours.left_alone),
            converted=None if ours is None else ours.converted,
            unused=content.others if ours is None else content.others | ours.unused,
        )
        if self._meeting.rank == 0 and getattr(planner, "logs", True):
            report.log()
        if self._ours is not None:
            self._ours.report = report
        return report

    def _ready(self, until_the_end: contextlib.ExitStack) -> SharedReads | None:
        """Plans the load, and waits until all ranks are ready; raises an error if one can't load.

        Args:
            until_the_end: Takes the resources that are released when the load has ended.

        Returns:
            The reads to share with other ranks; None if no reads are shared.
        """
        meeting, status, terms = self._meeting, self._status(), _Terms()
        if meeting.rank == 0 and status.failure is None:
            try:
                terms = self._terms(status)
            except BaseException as error:  # noqa: BLE001 - reported to all ranks
                status = status._replace(failure=error)
        terms = _Terms._make(meeting.from_first(tuple(terms)))
        if terms.begins and status.failure is None:
            first = RankStatus(
                location=terms.location, options=terms.options, version=terms.version
            )
            status = status._replace(failure=status.difference(first, meeting.rank))

        part = self._planned_together(status, terms) if terms.gathers else None
        offer: Offer | None = None
        if terms.begins and status.failure is None:
            try:
                plan = unpickled(part, self._uri) if part else self._local_plan(terms)
                offer = self._prepare(plan, terms.shares, until_the_end)
            except BaseException as error:  # noqa: BLE001 - reported to all ranks
                status = status._replace(failure=error)
        consensus = meeting.exchange(status, offer)
        consensus.raise_on_all_ranks()
        if self._ours is None or meeting.group is None or terms.shares == "off":
            return None
        config = self._ours.config
        shared = SharedReads(meeting.group, config, self._segments, consensus.values)
        until_the_end.callback(shared.leave)
        return shared

    def _status(self) -> RankStatus:
        if self._failure is not None:
            return RankStatus(failure=self._failure)
        option = f"storage_reader={type(self._reader).__name__}"
        if self._ours is not None:
            option = f"shared_reads={self._ours.config.shared_reads!r}"
        return RankStatus(location=self._uri or "", options=(option,))

    def _terms(self, status: RankStatus) -> _Terms:
        terms = _Terms(status.location, status.options, status.version, begins=True, gathers=True)
        if (ours := self._ours) is None:
            return terms
        self._metadata = ours.read_metadata()
        # with torch's default planner, the first rank returns the plans unchanged
        own = getattr(self._planner.create_global_plan, "__func__", None)
        terms = terms._replace(gathers=own is not DefaultLoadPlanner.create_global_plan)
        if self._meeting.group is None:
            return terms
        return terms._replace(shares=ours.config.shared_reads, metadata=ours.packed())

    def _local_plan(self, terms: _Terms) -> LoadPlan:
        is_first, reader, planner = self._meeting.rank == 0, self._reader, self._planner
        if self._ours is None:
            self._metadata = reader.read_metadata()
        elif not is_first:
            assert terms.metadata is not None
            self._metadata = self._ours.adopt(terms.metadata)
        self.content.fit(self._metadata, self._meeting.size, self._uri or "")
        planner.set_up_planner(self.state_dict, self._metadata, is_first)
        reader.set_up_storage_reader(self._metadata, is_first)
        plan = planner.create_local_plan()
        return reader.prepare_local_plan(plan) if terms.gathers else plan

    def _planned_together(self, status: RankStatus, terms: _Terms) -> bytes:
        """Returns this rank's part, pickled, of a plan that the first rank makes from all plans."""

        def make() -> LoadPlan:
            if status.failure is not None:
                raise status.failure
            return self._local_plan(terms)

        def divide(plans: list[LoadPlan]) -> list[bytes]:
            plans = self._reader.prepare_global_plan(self._planner.create_global_plan(plans))
            return [pickle.dumps(plan) for plan in plans]

        return self._meeting.divided_by_first("plan", make, divide, self._uri)

    def _prepare(
        self, plan: LoadPlan, shares: str, until_the_end: contextlib.ExitStack
    ) -> Offer | None:
        """Finishes a plan and, if the reader is cloudckpt's own, locates its bytes.

        Args:
            plan: This rank's plan.
            shares: See :class:`_Terms`.
            until_the_end: Takes the resources that are released when the load has ended.

        Returns:
            This rank's report of the reads that it can share; None if no reads are shared.

        Raises:
            MissingKeyError: If the checkpoint was replaced during an earlier try, and that try may
                have changed an entry that the new checkpoint does not fill.
        """
        self._plan = self._planner.finish_plan(plan)
        names = {item.dest_index.fqn for item in self._plan.items}
        if gone := self._begun - names:
            name = min(gone)
            raise MissingKeyError(
                f"the checkpoint was replaced while it was loaded, and the new one has no {name} "
                "that fits, so that this entry may hold values of the old one: load again, into a "
                "fresh state dict",
                uri=self._uri,
                item=name,
            )
        if self.content.state:  # else the planner makes new tensors at each try
            self._begun = names
        if self._ours is None:
            return None
        self._load = until_the_end.enter_context(self._ours.begun(self._planner))
        self._load.prepare(self._plan)
        if shares == "off":
            return None
        self._segments = self._load.segments()
        return SharedReads.offer(self._segments, shares)

    def _fetch(self, shared: SharedReads | None, until_the_end: contextlib.ExitStack) -> None:
        """Fetches this rank's bytes; raises the same error on all ranks if it fails on one."""

        def fetch() -> None:
            with until_the_end:
                if self._load is None:
                    self._reader.read_data(self._plan, self._planner).wait()
                else:
                    self._load.run(shared)

        self._meeting.begin(fetch, during=LOADING)
