"""When one rank fails, every rank is told why, soon, and no trace of the attempt stays."""

import dataclasses
import logging
import os
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt.background import process
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CloudCheckpointError,
    CommitUnknownError,
    ConfigError,
    DifferentCheckpointsError,
    IncompleteSaveError,
    InvalidURIError,
    MissingKeyError,
    ProcessGroupError,
    RanksFailedError,
    ShapeMismatchError,
    UnsupportedTensorError,
    UntrustedPickleError,
)
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI

from .layouts import LAYOUTS, Layout, full_state, spread
from .places import Place, on_disk, on_s3
from .values import assert_same, numbered

MIB = 1024 * 1024
ROWS = LAYOUTS["2 rows"].placements


def save(state, place: Place, **options):
    return cloudckpt.save(state, checkpoint_id=place.uri, config=place.config, **options)


def load(state, place: Place, **options) -> dict:
    cloudckpt.load(state, checkpoint_id=place.uri, config=place.config, **options)
    return state


def _rows(state: dict, *, blank: bool = False) -> dict:
    return spread(state, Layout((dist.get_world_size(),), ROWS), blank=blank)


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


# ---- a save that fails


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("this error can't be pickled")


_RAISED = {
    "an exception": ArithmeticError("the dog ate it"),
    "an interrupt": KeyboardInterrupt("the dog ate it"),
    "one of ours": UnsupportedTensorError("the dog ate it"),
}


class Failing(DefaultSavePlanner):
    """Sends all but the last item of the last rank, and raises then."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def resolve_data(self, write_item):
        if _is_last() and write_item.index.fqn == self.plan.items[-1].index.fqn:
            raise _RAISED[self.kind] if self.kind in _RAISED else UnpicklableError("the dog ate it")
        return super().resolve_data(write_item)


def _failing_save(kind: str, place: Place) -> None:
    # several parts a rank, so that there are uploads to be aborted
    state = _rows({"a large": numbered(3 * 11 * MIB // 16, 4), "b": numbered(60, 10)})
    save({**state, "c": [1, 2, 3]}, place.having(part_size=5 * MIB), planner=Failing(kind))


@pytest.mark.parametrize("kind", ["an exception", "one of ours"])
@on_s3
def test_a_planner_that_raises_on_one_rank_fails_the_save_on_all(kind, place, ranks):
    told = ranks.errors(3, _failing_save, kind, place)
    expected = RanksFailedError if kind == "an exception" else UnsupportedTensorError
    assert [type(error) for error in told] == [expected] * 3
    assert all("the dog ate it" in str(error) for error in told)
    if kind == "an exception":
        assert all(str(error).startswith("one rank failed in step 'write': ") for error in told)
    assert place.names() == []
    assert place.unfinished() == []


@on_s3
def test_an_interrupt_on_one_rank_is_told_to_all_and_nothing_becomes_visible(place, ranks):
    told = ranks.errors(3, _failing_save, "an interrupt", place)
    assert [type(error) for error in told] == [
        RanksFailedError,
        RanksFailedError,
        KeyboardInterrupt,
    ]
    assert all("KeyboardInterrupt: the dog ate it" in str(error) for error in told[:2])
    assert ".metadata" not in place.names()
    assert place.unfinished() == []


def test_an_error_that_cannot_be_pickled_is_told_to_all(local, ranks):
    told = ranks.errors(3, _failing_save, "one that can't be pickled", local)
    assert all(isinstance(error, CloudCheckpointError) for error in told), told
    assert all("the dog ate it" in str(error) for error in told), told
    assert local.names() == []


class OneOfALibraryError(Exception):
    """It can be pickled, and not unpickled: as many are whose arguments are not those of the
    class above."""

    def __init__(self, what: str, whose: str) -> None:
        super().__init__(f"{whose} {what}")


class Odd(DefaultSavePlanner):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _fail(self, where: str) -> None:
        if where == self.where and _is_last():
            raise OneOfALibraryError("ate it", "the dog")

    def set_up_planner(self, *args, **kwargs):
        self._fail("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self):
        self._fail("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan):
        self._fail("finish_plan")
        return super().finish_plan(new_plan)


class OddValue:
    """Makes its own items, or not."""

    def __create_write_items__(self, fqn, value):
        if _is_last():
            raise OneOfALibraryError("ate it", "the dog")
        return []


class OddLoad(DefaultLoadPlanner):
    def create_local_plan(self):
        if _is_last():
            raise OneOfALibraryError("ate it", "the dog")
        return super().create_local_plan()


def _oddly(where: str, place: Place) -> None:
    if where == "load":
        save({"a": numbered(3)}, place)
        load({"a": torch.zeros(3)}, place, planner=OddLoad())
    elif where == "a value":
        save({"a": OddValue()}, place)
    else:
        save({"a": numbered(3)}, place, planner=Odd(where))


@pytest.mark.parametrize(
    "where", ["set_up_planner", "create_local_plan", "finish_plan", "a value", "load"]
)
def test_an_error_that_other_ranks_cannot_unpickle_leaves_nobody_waiting(where, local, ranks):
    told = ranks.errors(2, _oddly, where, local, deadline=60)
    assert [type(error) for error in told] == [CheckpointError] * 2
    assert all("the dog ate it" in str(error) for error in told), told


def _failing_save_by_torch(place: Place) -> dict:
    state = _rows({"a": numbered(600, 10), "b": numbered(60, 10)})
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=place.writer(), planner=Failing("an exception"))
    return {rank: str(error) for rank, (error, _) in caught.value.failures.items()}


def test_stock_save_tells_all_ranks_and_leaves_nothing_visible(place, ranks):
    assert ranks(3, _failing_save_by_torch, place) == [{2: "the dog ate it"}] * 3
    assert ".metadata" not in place.names()


def _failing_replacement(place: Place) -> None:
    save(_rows({"t": numbered(60, 10)}), place)
    dist.barrier()
    before = place.names()
    dist.barrier()
    with pytest.raises(RanksFailedError):
        save(_rows({"t": numbered(60, 10, first=999)}), place, planner=Failing("an exception"))
    dist.barrier()
    assert place.names() == before
    loaded = {"t": torch.zeros(60, 10)}
    assert_same(load(loaded, place)["t"], numbered(60, 10))


@on_s3
def test_a_failed_replacement_leaves_the_checkpoint_that_was_there(place, ranks):
    ranks(3, _failing_replacement, place)


def _odd_tensor_on_one_rank(place: Place) -> None:
    state = {"t": numbered(100)}
    if _is_last():
        state["odd"] = numbered(3, 3).to_sparse()
    save({**state, **_rows({"r": numbered(30, 3)})}, place)


@on_disk
def test_an_unsupported_tensor_on_one_rank_is_named_on_all(place, ranks):
    told = ranks.errors(3, _odd_tensor_on_one_rank, place)
    assert [type(error) for error in told] == [UnsupportedTensorError] * 3
    assert {error.item for error in told} == {"odd"}
    assert place.names() == []


class Forgetful(DefaultSavePlanner):
    """Drops what the last rank was to write, as a faulty planner or a lost worker would."""

    def finish_plan(self, new_plan):
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=[]) if _is_last() else plan


def _forgetful_save(place: Place) -> None:
    save(_rows({"t": numbered(60, 10)}), place, planner=Forgetful())


@on_disk
def test_a_planned_item_that_nobody_wrote_prevents_the_commit(place, ranks):
    told = ranks.errors(3, _forgetful_save, place)
    assert [type(error) for error in told] == [IncompleteSaveError] * 3
    assert all("(40, 0)" in str(error).replace("[", "(").replace("]", ")") for error in told)
    assert place.names() == []


def _hole(place: Place) -> None:
    state = _rows({"t": numbered(60, 10)})
    save({} if _is_last() else state, place)


@on_disk
def test_a_shard_that_no_rank_plans_is_named_on_all(place, ranks):
    told = ranks.errors(3, _hole, place)
    assert [type(error) for error in told] == [IncompleteSaveError] * 3
    assert [error.item for error in told] == ["t"] * 3
    assert place.names() == []


def _save_to_nowhere(place: Place) -> None:
    save({"t": numbered(10)}, place)


def test_a_bucket_that_is_not_there_is_named_on_all_ranks(s3, ranks):
    nowhere = Place("s3://there-is-no-such-bucket/run", s3.config)
    told = ranks.errors(2, _save_to_nowhere, nowhere)
    assert [type(error) for error in told] == [BucketNotFoundError] * 2
    assert all("there-is-no-such-bucket" in str(error) for error in told)


class Overtaken(DefaultSavePlanner):
    """While this save sends its data, another one commits to the same place."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    def finish_plan(self, new_plan):
        if dist.get_rank() == 0:
            save({"t": numbered(60, 10, first=555)}, self.place, no_dist=True)
        return super().finish_plan(new_plan)


def _overtaken(place: Place, replaces: bool) -> None:
    if replaces:
        save(_rows({"t": numbered(60, 10)}), place)
    save(_rows({"t": numbered(60, 10, first=222)}), place, planner=Overtaken(place))


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replacement"])
@on_s3
def test_a_save_that_lost_the_race_is_told_on_all_ranks_and_cleans_up(replaces, place, ranks):
    told = ranks.errors(3, _overtaken, place, replaces)
    assert [type(error) for error in told] == [CheckpointConflictError] * 3
    assert_same(load({"t": torch.zeros(60, 10)}, place)["t"], numbered(60, 10, first=555))
    named = {info.relative_path for info in place.reader().read_metadata().storage_data.values()}
    assert set(place.data()) == named
    assert set(place.names()) == named | {".metadata"}


def _surprised_after_the_commit(surprise: str, place: Place) -> str:
    """Rank 0 meets an error that no store should raise, when .metadata is already written."""
    save(_rows({"t": numbered(60, 10)}), place)
    store = open_store(CheckpointURI.parse(place.uri), place.config)
    put = store.put

    def odd_put(key, *args, **kwargs):
        info = put(key, *args, **kwargs)
        if key.endswith("/.metadata"):
            raise RuntimeError("a surprise behind the commit")
        return info

    def odd_delete(keys):
        raise RuntimeError("a surprise behind the commit")

    try:
        if dist.get_rank() == 0:
            setattr(store, surprise, odd_put if surprise == "put" else odd_delete)
        save(_rows({"t": numbered(60, 10, first=777)}), place)
    except CloudCheckpointError as error:
        return str(error)
    finally:
        store.__dict__.pop(surprise, None)
    return "saved"


@pytest.mark.parametrize("surprise", ["put", "delete"])
def test_data_of_a_checkpoint_that_may_be_committed_is_never_deleted(surprise, place, ranks):
    told = ranks(3, _surprised_after_the_commit, surprise, place)
    assert len(set(told)) == 1
    assert_same(load({"t": torch.zeros(60, 10)}, place)["t"], numbered(60, 10, first=777))


def _surprised_by_a_listing(error: type[Exception], place: Place) -> int:
    """Rank 0 meets an error when it looks for what the new checkpoint hides."""
    place = place.having(incremental=True)
    save(_rows({"t": numbered(60, 10)}), place)
    store, listed = open_store(CheckpointURI.parse(place.uri), place.config), []

    def odd_list(prefix, retry=None):
        listed.append(prefix)
        raise error("a surprise behind the commit")

    try:
        if dist.get_rank() == 0:
            store.list = odd_list
        save(_rows({"t": numbered(60, 10, first=777)}), place)
    finally:
        store.__dict__.pop("list", None)
    return len(listed)


@pytest.mark.parametrize("error", [MemoryError, OSError, RuntimeError])
@on_disk
def test_a_surprise_behind_the_commit_undoes_nothing(error, place, ranks):
    assert ranks(2, _surprised_by_a_listing, error, place) == [1, 0]
    assert_same(load({"t": torch.zeros(60, 10)}, place)["t"], numbered(60, 10, first=777))


class OddInterrupt(BaseException):
    def __reduce__(self):
        raise TypeError("this interrupt can't be pickled")


_BEHIND = {
    "an exception": ConnectionError("the pointer was not written"),
    "an error of a store": AccessDeniedError("the pointer was not written"),
    "an interrupt": KeyboardInterrupt("the pointer was not written"),
    "an interrupt that can't be pickled": OddInterrupt("the pointer was not written"),
}


class Pointing(cloudckpt.CloudStorageWriter):
    """Does more than ours once it has committed: it fails, or commits once more."""

    def __init__(self, place: Place, kind: str) -> None:
        super().__init__(place.uri, config=place.config)
        self.kind = kind

    def finish(self, metadata, results):
        super().finish(metadata, results)
        if self.kind in _BEHIND:
            raise _BEHIND[self.kind]
        super().finish(metadata, results)


def _finish_with_more(kind: str, place: Place) -> None:
    save(_rows({"t": numbered(60, 10)}), place)
    writer = Pointing(place, kind)
    cloudckpt.save(_rows({"t": numbered(60, 10, first=777)}), storage_writer=writer)


@pytest.mark.parametrize("kind", [*_BEHIND, "a second commit"])
@on_disk
def test_what_fails_behind_the_commit_of_a_derived_writer_undoes_nothing(kind, place, ranks):
    told = ranks.errors(2, _finish_with_more, kind, place)
    if kind == "an interrupt":
        assert [type(error) for error in told] == [KeyboardInterrupt, RanksFailedError]
    else:
        assert [type(error) for error in told] == [CommitUnknownError] * 2
        assert all("the checkpoint is committed" in str(error) for error in told)
    assert_same(load({"t": torch.zeros(60, 10)}, place)["t"], numbered(60, 10, first=777))


class Interrupted(DefaultSavePlanner):
    def resolve_data(self, write_item):
        raise KeyboardInterrupt("enough")


def _interrupted_alone(place: Place) -> None:
    if _is_last():
        save({"t": numbered(5)}, place, no_dist=True, planner=Interrupted())


def test_an_interrupt_of_a_save_without_the_others_stays_one(local, ranks):
    told = ranks.errors(2, _interrupted_alone, local)
    assert [type(error) for error in told] == [type(None), KeyboardInterrupt]


class Stubborn(dict):
    """A Stateful whose methods fail, as those of a module that does not fit do."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def state_dict(self):
        if self.where == "state_dict":
            raise RuntimeError("the module does not fit")
        return {"t": numbered(5)}

    def load_state_dict(self, state):
        raise RuntimeError("the module does not fit")


def _use_stubborn(where: str, place: Place) -> None:
    if where == "state_dict":
        save({"module": Stubborn(where)}, place)
    else:
        save({"module": {"t": numbered(5)}}, place)
        dist.barrier()
        load({"module": Stubborn(where)}, place)


@pytest.mark.parametrize("where", ["state_dict", "load_state_dict"])
def test_an_error_of_a_stateful_object_is_not_taken_for_a_lost_rank(where, local, ranks):
    for error in ranks.errors(2, _use_stubborn, where, local):
        assert "the module does not fit" in str(error)
        assert not isinstance(error, ProcessGroupError), error


class StubbornOnOne(Stubborn):
    """One of a rank; those of the others are fine."""

    def state_dict(self):
        return super().state_dict() if _is_last() else {"t": numbered(5)}


def _ungrateful(kind: str, place: Place) -> dict:
    """What the last rank does before torch's first step, in which the others are waiting."""
    if kind == "state_dict":
        return {"state": {"module": StubbornOnOne("state_dict")}, "place": place}
    odd = dataclasses.replace(place, uri="ftp://nowhere") if _is_last() else place
    return {"state": {"t": numbered(5)}, "place": odd}


def _fail_early(kind: str, place: Place) -> None:
    save(**_ungrateful(kind, place))


def _fail_to_load_early(kind: str, place: Place) -> None:
    save({"t": numbered(5), "module": {"t": numbered(5)}}, place)
    dist.barrier()
    load(**_ungrateful(kind, place))


@pytest.mark.parametrize("action", [_fail_early, _fail_to_load_early])
@pytest.mark.parametrize(
    ("kind", "reason", "error"),
    [
        ("state_dict", "the module does not fit", RanksFailedError),
        ("location", "ftp", InvalidURIError),
    ],
)
def test_a_rank_that_fails_before_it_begins_is_told_to_all(
    kind, reason, error, action, local, ranks
):
    told = ranks.errors(3, action, kind, local)
    assert [type(one) for one in told] == [error] * 3
    assert all(reason in str(one) for one in told)


class Sharded:
    """A Stateful whose state_dict() asks all ranks, as that of an FSDP module may."""

    def state_dict(self):
        seen = torch.tensor([dist.get_rank()])
        dist.all_reduce(seen)
        return {"t": numbered(int(seen))}

    def load_state_dict(self, state):
        raise NotImplementedError


def _begin_with_collectives(action, place: Place) -> None:
    uri = "ftp://nowhere" if _is_last() else place.uri
    action({"model": Sharded()}, checkpoint_id=uri, config=place.config)


@pytest.mark.parametrize("action", [cloudckpt.save, cloudckpt.load, cloudckpt.async_save])
def test_a_bad_location_of_one_rank_is_told_although_state_dict_asks_all_ranks(
    action, local, ranks
):
    told = ranks.errors(3, _begin_with_collectives, action, local, deadline=60.0)
    assert [type(error) for error in told] == [InvalidURIError] * 3


class Everywhere:
    """All ways to begin a save or a load, of which the last rank takes a wrong turn."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.uri = "ftp://nowhere" if _is_last() else place.uri
        self.options = {"config": place.config}

    def save(self) -> None:
        cloudckpt.save({"t": numbered(5)}, checkpoint_id=self.uri, **self.options)

    def save_without_collectives(self) -> None:
        cloudckpt.save(
            {"t": numbered(5)},
            checkpoint_id=self.place.uri,
            use_collectives=not _is_last(),
            **self.options,
        )

    def async_save_without_collectives(self) -> None:
        cloudckpt.async_save(
            {"t": numbered(5)},
            checkpoint_id=self.place.uri,
            use_collectives=not _is_last(),
            **self.options,
        )

    def save_with_a_writer_of_torch(self) -> None:
        writer = FileSystemWriter(self.place.path) if _is_last() else self.place.writer()
        cloudckpt.save({"t": numbered(5)}, storage_writer=writer)

    def load_with_a_reader_of_torch(self) -> None:
        reader = FileSystemReader(self.place.path) if _is_last() else self.place.reader()
        cloudckpt.load({"t": numbered(5)}, storage_reader=reader)

    def load(self) -> None:
        cloudckpt.load({"t": numbered(5)}, checkpoint_id=self.uri, **self.options)

    def async_save(self) -> None:
        cloudckpt.async_save({"t": numbered(5)}, checkpoint_id=self.uri, **self.options)

    def async_save_leads_its_writer_elsewhere(self) -> None:
        cloudckpt.async_save(
            {"t": numbered(5)}, checkpoint_id=self.uri, storage_writer=self.place.writer()
        )

    def async_save_in_a_process(self) -> None:
        cloudckpt.async_save(
            {"t": numbered(5)},
            checkpoint_id=self.uri,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            **self.options,
        )

    def async_save_with_other_options(self) -> None:
        busy = "skip" if _is_last() else "wait"
        place = self.place.having(background=cloudckpt.BackgroundOptions(when_busy=busy))
        cloudckpt.async_save({"t": numbered(5)}, checkpoint_id=place.uri, config=place.config)

    def sync_checkpointer_saves(self) -> None:
        self._sync().save({"t": numbered(5)}, self.uri)

    def sync_checkpointer_takes_an_unknown_argument(self) -> None:
        self._sync().save({"t": numbered(5)}, self.place.uri, **({"x": 1} if _is_last() else {}))

    def sync_checkpointer_loads(self) -> None:
        self._sync().load(self.uri)

    def sync_checkpointer_loads_strictly(self) -> None:
        self._sync().load(self.place.uri, None, strict=_is_last())

    def async_checkpointer_saves(self) -> None:
        with self._async() as checkpointer:
            checkpointer.save(self.uri, {"t": numbered(5)})

    def async_checkpointer_is_given_the_state_first(self) -> None:
        state, uri = {"t": numbered(5)}, self.place.uri
        with self._async() as checkpointer:
            checkpointer.save(*((state, uri) if _is_last() else (uri, state)))

    def async_checkpointer_saves_elsewhere(self) -> None:
        with self._async() as checkpointer:
            checkpointer.save(self.place.at(f"of-{dist.get_rank()}").uri, {"t": numbered(5)})

    def an_async_checkpointer_of_another_kind(self) -> None:
        both = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
        self._async(both[_is_last()]).close()

    def an_async_checkpointer_whose_process_one_cannot_start(self) -> None:
        failing = mock.Mock(side_effect=ConfigError("no processes here"))
        with mock.patch.object(process, "_start", failing if _is_last() else process._start):
            self._async(AsyncCheckpointerType.PROCESS).close()

    def _sync(self) -> cloudckpt.checkpointer.SyncCheckpointer:
        return cloudckpt.checkpointer.make_sync_checkpointer(
            cloudckpt.checkpointer.CheckpointerConfig(**self.options)
        )

    def _async(self, kind=AsyncCheckpointerType.THREAD) -> cloudckpt.checkpointer.AsyncCheckpointer:
        config = cloudckpt.checkpointer.CheckpointerConfig(kind=kind, **self.options)
        return cloudckpt.checkpointer.make_async_checkpointer(config)


def _begin_wrongly(way: str, place: Place) -> None:
    try:
        getattr(Everywhere(place), way)()
    finally:
        cloudckpt.checkpointer.close_async_savers()


@pytest.mark.parametrize("way", [name for name in vars(Everywhere) if not name.startswith("_")])
def test_what_one_rank_begins_wrongly_is_told_to_all_at_once(way, local, ranks):
    save({"t": numbered(5)}, local, no_dist=True)
    before = local.names()
    told = ranks.errors(2, _begin_wrongly, way, local, deadline=60.0)
    assert isinstance(told[0], InvalidURIError | ConfigError | DifferentCheckpointsError), told
    assert type(told[0]) is type(told[1])
    assert local.names() == before


# ---- a load that fails


def _saved(place: Place) -> None:
    save({**_rows(full_state()), "step": 3, f"of {dist.get_rank()}": numbered(5)}, place)


def _load_with_extra(who: str, place: Place) -> None:
    state = {**_rows(full_state(), blank=True), "step": None}
    if who == "all" or _is_last():
        state["evne"] = torch.zeros(3)
    load(state, place)


@pytest.mark.parametrize("who", ["all", "the last"])
@on_disk
def test_a_key_that_is_not_stored_is_named_on_all_ranks(who, place, ranks):
    ranks(2, _saved, place)
    told = ranks.errors(3, _load_with_extra, who, place)
    assert [type(error) for error in told] == [MissingKeyError] * 3
    assert {error.item for error in told} == {"evne"}
    assert all("'even'" in str(error) for error in told)  # what may have been meant
    assert all(isinstance(error, KeyError) for error in told)


def _load_misshapen(who: str, place: Place) -> None:
    state = _rows(full_state(), blank=True)
    if who == "all" or _is_last():
        state["uneven"] = torch.zeros(5, 7)
    load(state, place)


@pytest.mark.parametrize("who", ["all", "the last"])
@on_disk
def test_another_shape_is_named_on_all_ranks(who, place, ranks):
    ranks(2, _saved, place)
    told = ranks.errors(3, _load_misshapen, who, place)
    assert [type(error) for error in told] == [ShapeMismatchError] * 3
    assert all("uneven" in str(error) for error in told)
    assert all("(7, 5)" in str(error) and "(5, 7)" in str(error) for error in told)


@pytest.mark.parametrize("value", [5, None, "text", numpy.zeros(3)], ids=lambda v: type(v).__name__)
def test_a_value_where_the_checkpoint_has_a_tensor_is_named(value, local):
    save({"step": torch.tensor([3, 4]), "rest": 1}, local)
    with pytest.raises(ShapeMismatchError, match="put a tensor there") as caught:
        load({"step": value, "rest": 0}, local)
    assert caught.value.item == "step"


class OfTorch(DefaultLoadPlanner):
    """One that is not taken for its flags alone, as torch's own is."""


def test_with_a_planner_of_torch_a_missing_key_is_still_named(local):
    save({"a": numbered(3)}, local)
    with pytest.raises(RanksFailedError, match="Missing key in checkpoint state_dict: b"):
        load({"b": torch.zeros(3)}, local, planner=OfTorch())
    with pytest.raises(MissingKeyError, match="first: \\['b'\\]"):
        load({"b": torch.zeros(3)}, local, planner=DefaultLoadPlanner())


def _load_from(place: Place) -> None:
    load(_rows(full_state(), blank=True), place)


def test_a_checkpoint_that_is_not_there_is_told_on_all_ranks(place, ranks):
    told = ranks.errors(3, _load_from, place)
    assert [type(error) for error in told] == [CheckpointNotFoundError] * 3
    assert all(place.uri in str(error) for error in told)
    assert all(isinstance(error, FileNotFoundError) for error in told)


UNREADABLE = [
    MemoryError("no room"),
    RecursionError("too deep"),
    ValueError("Invalid endpoint: nonsense"),
    OSError("the disk is on fire"),
    KeyError("metadata"),
    AccessDeniedError("not you", uri="file:///x"),
]


def _fail_to_read(monkeypatch, error: Exception, name: str) -> None:
    """Makes reads of a metadata object fail with an error that is not the store's answer."""
    for verb in ("get", "get_range", "head"):
        read = getattr(LocalStore, verb)

        def failing(store, key, *arguments, read=read, **options):
            if key.endswith(f"/{name}"):
                raise error
            return read(store, key, *arguments, **options)

        monkeypatch.setattr(LocalStore, verb, failing)


@pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
@pytest.mark.parametrize("is_there", [True, False])
def test_metadata_that_can_not_be_read_is_not_told_as_not_there(
    error, name, is_there, local, monkeypatch
):
    """Else a training script begins anew over a checkpoint that is good."""
    if is_there:
        save({"t": numbered(5)}, local)
        os.rename(f"{local.path}/.metadata", f"{local.path}/{name}")
    _fail_to_read(monkeypatch, error, name)
    with pytest.raises(CloudCheckpointError) as caught:
        load({"t": torch.zeros(5)}, local)
    assert str(error) in str(caught.value)
    assert not isinstance(caught.value, (CheckpointNotFoundError, FileNotFoundError))
    assert not isinstance(caught.value, (CheckpointCorruptError, RanksFailedError))
    if isinstance(error, CloudCheckpointError):
        assert type(caught.value) is type(error)


def test_a_reader_that_is_used_again_remembers_no_failure(local, monkeypatch):
    save({"t": numbered(5)}, local)
    reader = local.reader()
    with monkeypatch.context() as patched:
        _fail_to_read(patched, MemoryError(), ".metadata")
        with pytest.raises(CheckpointError, match="MemoryError"):
            reader.read_metadata()
    assert reader.read_metadata().state_dict_metadata.keys() == {"t"}
    assert reader.read_metadata(rank=0).state_dict_metadata.keys() == {"t"}


def _load_where_the_first_can_not_read(place: Place, error: Exception) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 0:  # it reads for all
            _fail_to_read(patched, error, ".metadata")
        _load_from(place)


@pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: type(error).__name__)
def test_metadata_that_one_rank_can_not_read_is_told_to_all_as_what_it_is(error, local, ranks):
    ranks(2, _saved, local)
    told = ranks.errors(2, _load_where_the_first_can_not_read, local, error)
    expected = type(error) if isinstance(error, CloudCheckpointError) else CheckpointError
    assert [type(error) for error in told] == [expected] * 2
    assert all(type(error).__name__ in str(one) or str(error) in str(one) for one in told)


class OfTheUser:
    """What a planner keeps with the metadata."""


class Keeping(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.kept = OfTheUser()
        return plans, metadata


def _load_what_one_rank_does_not_trust(place: Place) -> None:
    writer = FileSystemWriter(place.path)
    dcp.save({"a": numbered(3)}, storage_writer=writer, planner=Keeping())
    load({"a": torch.zeros(3)}, place, trust_pickle=not _is_last())


def test_metadata_that_one_rank_does_not_trust_are_refused_on_all(local, ranks):
    told = ranks.errors(2, _load_what_one_rank_does_not_trust, local, deadline=60)
    assert [type(error) for error in told] == [UntrustedPickleError] * 2


def _damage(place: Place, name: str) -> None:
    data = bytearray(place.read(name))
    for at in range(len(data) // 3, len(data), 1000):
        data[at] ^= 255
    if place.uri.startswith("s3://"):
        bucket, _, prefix = place.uri.removeprefix("s3://").partition("/")
        place.client().put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=bytes(data))
    else:
        with open(os.path.join(place.path, name), "wb") as file:
            file.write(data)


@on_s3
def test_damage_that_one_rank_meets_is_told_to_all(place, ranks):
    ranks(2, _saved, place)
    places = place.reader().read_metadata().storage_data.items()
    names = {
        info.relative_path
        for index, info in places
        if (index.fqn, any(index.offset or ())) == ("large", True)
    }
    for name in names:
        _damage(place, name)
    told = ranks.errors(2, _load_from, place)
    assert [type(error) for error in told] == [CheckpointCorruptError] * 2
    assert all(name in str(error) for error in told for name in names)


class Clumsy(DefaultLoadPlanner):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _fail(self, where: str) -> None:
        if where == self.where and _is_last():
            raise ArithmeticError("the dog ate it")

    def resolve_tensor(self, read_item):
        self._fail("resolve_tensor")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item, tensor):
        self._fail("commit_tensor")
        return super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item, value):
        self._fail("load_bytes")
        return super().load_bytes(read_item, value)


def _load_clumsily(where: str, place: Place) -> None:
    load({**_rows(full_state(), blank=True), "step": None}, place, planner=Clumsy(where))


@pytest.mark.parametrize("where", ["resolve_tensor", "commit_tensor", "load_bytes"])
def test_a_load_planner_that_raises_on_one_rank_fails_the_load_on_all(where, local, ranks):
    ranks(2, _saved, local)
    told = ranks.errors(3, _load_clumsily, where, local)
    assert [type(error) for error in told] == [RanksFailedError] * 3
    step = "before it began" if where == "resolve_tensor" else "while it was loaded"
    expected = f"one rank failed {step}: rank 2: ArithmeticError: the dog ate it"
    assert all(str(error).startswith(expected) for error in told)
    assert all(error.failures == {2: "ArithmeticError: the dog ate it"} for error in told)


def test_two_ranks_that_fail_differently_are_both_named(local, ranks):
    told = ranks.errors(3, _fail_differently, local)
    assert [type(error) for error in told] == [RanksFailedError] * 3
    assert told[0].failures.keys() == {0, 1}
    assert all("rank 0: " in str(error) and "rank 1: " in str(error) for error in told)
    assert all(str(error).startswith("2 ranks failed in step 'write': ") for error in told)


class Different(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 0:
            raise ArithmeticError("the dog ate it")
        if dist.get_rank() == 1:
            raise UnsupportedTensorError("so it did")
        return super().resolve_data(write_item)


def _fail_differently(place: Place) -> None:
    save(_rows({"t": numbered(60, 10)}), place, planner=Different())


def _load_blank(place: Place, stock: bool) -> None:
    if stock:
        dcp.load({"t": torch.zeros(5)}, storage_reader=place.reader())
    else:
        load({"t": torch.zeros(5)}, place)


def _warnings_of_a_missing_checkpoint(place: Place, stock: bool) -> list[str]:
    """What reaches the root logger."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises((CheckpointNotFoundError, CheckpointException)):
            _load_blank(place, stock)
    finally:
        logging.getLogger().removeHandler(handler)
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def test_a_missing_checkpoint_is_told_by_its_error_alone(place, ranks):
    assert ranks(2, _warnings_of_a_missing_checkpoint, place, False) == [[], []]
    for told in ranks(2, _warnings_of_a_missing_checkpoint, place, True):
        # torch's own load does as it likes, and that of torch 2.9 warns of nothing
        assert all("Global metadata is not found" in line for line in told)


def _save_to_own_place(place: Place) -> None:
    save(_rows(full_state()), place.at(f"step-{dist.get_rank()}"))


@on_disk
def test_ranks_that_save_to_different_places_commit_nothing(place, ranks):
    told = ranks.errors(2, _save_to_own_place, place)
    assert [type(error) for error in told] == [DifferentCheckpointsError] * 2
    assert all("/step-0" in str(error) and "/step-1" in str(error) for error in told)
    assert place.names() == []
    assert place.unfinished() == []


def _save_two(place: Place) -> None:
    for step in range(2):
        save(_rows(full_state()), place.at(f"step-{step}"))


def _load_own_step(place: Place) -> None:
    load(_rows(full_state(), blank=True), place.at(f"step-{dist.get_rank()}"))


@on_disk
def test_ranks_that_load_different_steps_are_told(place, ranks):
    ranks(2, _save_two, place)
    told = ranks.errors(2, _load_own_step, place)
    assert [type(error) for error in told] == [DifferentCheckpointsError] * 2
    assert all("/step-0" in str(error) and "/step-1" in str(error) for error in told)


class _Replaces(cloudckpt.CloudStorageReader):
    """Rank 1 goes on only when the checkpoint that rank 0 has seen was replaced."""

    def read_metadata(self, *args, **kwargs):
        if dist.get_rank() == 0:
            found = super().read_metadata(*args, **kwargs)
            state = {"t": numbered(100)}
            cloudckpt.save(state, checkpoint_id=self.uri, config=self.config, no_dist=True)
            dist.barrier()
            return found
        dist.barrier()
        return super().read_metadata(*args, **kwargs)


def _load_replaced(place: Place) -> None:
    reader = _Replaces(place.uri, config=place.config)
    cloudckpt.load({"t": torch.zeros(100)}, storage_reader=reader)


@on_disk
def test_a_checkpoint_that_is_replaced_between_the_ranks_is_not_mixed(place, ranks):
    save({"t": numbered(100)}, place, no_dist=True)
    told = ranks.errors(2, _load_replaced, place)
    assert [type(error) for error in told] == [CheckpointReplacedError] * 2
    assert all("was replaced 5 times while" in str(error) for error in told)
