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


# ---- what a planner raises, at any stage, by any road


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("this error can't be pickled")


class OneOfALibraryError(Exception):
    """It can be pickled, and not unpickled: as many are whose arguments are not those of the
    class above."""

    def __init__(self, what: str, whose: str) -> None:
        super().__init__(f"{whose} {what}")


RAISED = {  # and what it becomes on all ranks
    "foreign": (lambda: ArithmeticError("the dog ate it"), RanksFailedError),
    "ours": (lambda: UnsupportedTensorError("the dog ate it"), UnsupportedTensorError),
    "an interrupt": (lambda: KeyboardInterrupt("the dog ate it"), RanksFailedError),
    "not to be pickled": (lambda: UnpicklableError("the dog ate it"), CheckpointError),
    "not to be unpickled": (lambda: OneOfALibraryError("ate it", "the dog"), CheckpointError),
}
SAVING = ["set_up_planner", "create_local_plan", "finish_plan", "resolve_data"]
LOADING = ["set_up_planner", "create_local_plan", "resolve_tensor", "commit_tensor", "load_bytes"]


def failing(base: type, stage: str, kind: str):
    """A planner that raises on the last rank; of the data, when it is asked for the last item."""

    class Planner(base):
        pass

    def method(self, *args, **kwargs):
        is_early = stage == "resolve_data" and args[0].index.fqn != self.plan.items[-1].index.fqn
        if _is_last() and not is_early:
            raise RAISED[kind][0]()
        return getattr(base, stage)(self, *args, **kwargs)

    setattr(Planner, stage, method)
    return Planner()


def _fail_to_save(stage: str, kind: str, place: Place) -> None:
    # several parts a rank, so that there are uploads to be aborted
    state = _rows({"a large": numbered(3 * 11 * MIB // 16, 4), "b": numbered(60, 10)})
    planner = failing(DefaultSavePlanner, stage, kind)
    save({**state, "c": [1, 2, 3]}, place.having(part_size=5 * MIB), planner=planner)


def _check_all_are_told(told, kind: str) -> None:
    expected = [RAISED[kind][1]] * len(told)
    if kind == "an interrupt":
        expected[-1] = KeyboardInterrupt
    assert [type(error) for error in told] == expected
    assert all("the dog ate it" in str(error) for error in told), told
    if kind == "foreign":
        failures = {len(told) - 1: "ArithmeticError: the dog ate it"}
        assert all(error.failures == failures for error in told)


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("stage", SAVING)
def test_what_fails_on_one_rank_fails_the_save_on_all_and_nothing_stays(stage, kind, local, ranks):
    _check_all_are_told(ranks.errors(3, _fail_to_save, stage, kind, local, deadline=60), kind)
    assert ".metadata" not in local.names()
    assert local.names() == [] or kind == "an interrupt"


@pytest.mark.parametrize("kind", ["foreign", "an interrupt"])
@on_s3
def test_uploads_of_a_save_that_failed_are_aborted(kind, place, ranks):
    _check_all_are_told(ranks.errors(3, _fail_to_save, "resolve_data", kind, place), kind)
    assert ".metadata" not in place.names()
    assert place.unfinished() == []


def _fail_to_load(stage: str, kind: str, place: Place) -> None:
    planner = failing(DefaultLoadPlanner, stage, kind)
    load({**_rows(full_state(), blank=True), "step": None}, place, planner=planner)


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("stage", LOADING)
def test_what_fails_on_one_rank_fails_the_load_on_all(stage, kind, local, ranks):
    ranks(2, _saved, local)
    _check_all_are_told(ranks.errors(3, _fail_to_load, stage, kind, local, deadline=60), kind)


class OddValue:
    """Makes its own items, or not."""

    def __create_write_items__(self, fqn, value):
        raise OneOfALibraryError("ate it", "the dog")


def _fail_by_torch(place: Place) -> dict:
    state = _rows({"a": numbered(600, 10), "b": numbered(60, 10)})
    planner = failing(DefaultSavePlanner, "resolve_data", "foreign")
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=place.writer(), planner=planner)
    return {rank: str(error) for rank, (error, _) in caught.value.failures.items()}


def test_stock_save_tells_all_ranks_and_leaves_nothing_visible(place, ranks):
    assert ranks(3, _fail_by_torch, place) == [{2: "the dog ate it"}] * 3
    assert ".metadata" not in place.names()


def _fail_to_replace(place: Place) -> None:
    save(_rows({"t": numbered(60, 10)}), place)
    dist.barrier()
    before = place.names()
    dist.barrier()
    planner = failing(DefaultSavePlanner, "resolve_data", "foreign")
    with pytest.raises(RanksFailedError):
        save(_rows({"t": numbered(60, 10, first=999)}), place, planner=planner)
    dist.barrier()
    assert place.names() == before
    loaded = {"t": torch.zeros(60, 10)}
    assert_same(load(loaded, place)["t"], numbered(60, 10))


@on_s3
def test_a_failed_replacement_leaves_the_checkpoint_that_was_there(place, ranks):
    ranks(3, _fail_to_replace, place)


# ---- what a rank saves


class Forgetful(DefaultSavePlanner):
    """Drops what the last rank was to write, as a faulty planner or a lost worker would."""

    def finish_plan(self, new_plan):
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=[]) if _is_last() else plan


def _odd_tensor(place: Place) -> None:
    odd = {"odd": numbered(3, 3).to_sparse()} if _is_last() else {}
    save({"t": numbered(100), **odd, **_rows({"r": numbered(30, 3)})}, place)


def _forget(place: Place) -> None:
    save(_rows({"t": numbered(60, 10)}), place, planner=Forgetful())


def _hole(place: Place) -> None:
    state = _rows({"t": numbered(60, 10)})
    save({} if _is_last() else state, place)


def _elsewhere(place: Place) -> None:
    save(_rows(full_state()), place.at(f"step-{dist.get_rank()}"))


def _odd_value(place: Place) -> None:
    save({"a": OddValue() if _is_last() else 1}, place)


UNFIT = {  # with the error, and the item that it names
    "a tensor of an unsupported kind": (_odd_tensor, UnsupportedTensorError, "odd"),
    "an item that nobody wrote": (_forget, IncompleteSaveError, "t"),
    "a shard that no rank plans": (_hole, IncompleteSaveError, "t"),
    "places that differ": (_elsewhere, DifferentCheckpointsError, None),
    "a value that fails to plan": (_odd_value, CheckpointError, None),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_one_rank_can_not_save_is_named_on_all(what, local, ranks):
    action, kind, item = UNFIT[what]
    told = ranks.errors(3, action, local, deadline=60)
    assert [type(error) for error in told] == [kind] * 3
    assert {error.item for error in told} == {item}
    assert local.names() == []


def _save_to_nowhere(place: Place) -> None:
    save({"t": numbered(10)}, place)


def test_a_bucket_that_is_not_there_is_named_on_all_ranks(s3, ranks):
    nowhere = Place("s3://there-is-no-such-bucket/run", s3.config)
    told = ranks.errors(2, _save_to_nowhere, nowhere)
    assert [type(error) for error in told] == [BucketNotFoundError] * 2


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


# ---- once it may be committed


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


# ---- before the first step


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


def _fail_early(action, place: Place) -> None:
    save({"module": {"t": numbered(5)}}, place)
    dist.barrier()
    action({"module": StubbornOnOne("state_dict")}, place)


@pytest.mark.parametrize("action", [save, load], ids=["save", "load"])
def test_a_state_that_one_rank_can_not_make_is_told_to_all(action, local, ranks):
    told = ranks.errors(3, _fail_early, action, local)
    assert [type(one) for one in told] == [RanksFailedError] * 3
    assert all("the module does not fit" in str(one) for one in told)


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


def _checkpointer(place: Place, kind=AsyncCheckpointerType.THREAD):
    config = cloudckpt.checkpointer.CheckpointerConfig(kind=kind, config=place.config)
    return cloudckpt.checkpointer.make_async_checkpointer(config)


def _by_checkpointer(place: Place, *args, **kwargs) -> None:
    with _checkpointer(place) as checkpointer:
        checkpointer.save(*args, **kwargs)


def _without_a_process(place: Place) -> None:
    failing = mock.Mock(side_effect=ConfigError("no processes here"))
    with mock.patch.object(process, "_start", failing if _is_last() else process._start):
        _checkpointer(place, AsyncCheckpointerType.PROCESS).close()


def _of_torch(kind: type, ours, place: Place):
    return kind(place.path) if _is_last() else ours(place.uri, config=place.config)


STATE = {"t": numbered(5)}
BOTH = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
WAYS = {  # to begin, of which the last rank takes a wrong turn: its location is not one
    "save": lambda place, uri: save(STATE, dataclasses.replace(place, uri=uri)),
    "load": lambda place, uri: load(STATE, dataclasses.replace(place, uri=uri)),
    "save alone": lambda place, uri: save(STATE, place, use_collectives=not _is_last()),
    "save by torch": lambda place, uri: cloudckpt.save(
        STATE, storage_writer=_of_torch(FileSystemWriter, cloudckpt.CloudStorageWriter, place)
    ),
    "load by torch": lambda place, uri: cloudckpt.load(
        STATE, storage_reader=_of_torch(FileSystemReader, cloudckpt.CloudStorageReader, place)
    ),
    "async": lambda place, uri: cloudckpt.async_save(STATE, checkpoint_id=uri),
    "async alone": lambda place, uri: cloudckpt.async_save(
        STATE, checkpoint_id=place.uri, use_collectives=not _is_last()
    ),
    "async elsewhere": lambda place, uri: cloudckpt.async_save(
        STATE, checkpoint_id=uri, storage_writer=place.writer()
    ),
    "async in a process": lambda place, uri: cloudckpt.async_save(
        STATE, checkpoint_id=uri, async_checkpointer_type=BOTH[1]
    ),
    "async with other options": lambda place, uri: cloudckpt.async_save(
        STATE,
        checkpoint_id=place.uri,
        config=place.having(
            background=cloudckpt.BackgroundOptions(when_busy="skip" if _is_last() else "wait")
        ).config,
    ),
    "checkpointer": lambda place, uri: _by_checkpointer(place, uri, STATE),
    "checkpointer's arguments": lambda place, uri: _by_checkpointer(
        place, *((STATE, place.uri) if _is_last() else (place.uri, STATE))
    ),
    "checkpointer elsewhere": lambda place, uri: _by_checkpointer(
        place, place.at(f"of-{dist.get_rank()}").uri, STATE
    ),
    "checkpointer loads": lambda place, uri: _checkpointer(place).load(uri),
    "checkpointer loads strictly": lambda place, uri: _checkpointer(place).load(
        place.uri, None, strict=_is_last()
    ),
    "checkpointers of two kinds": lambda place, uri: _checkpointer(place, BOTH[_is_last()]).close(),
    "no process": lambda place, uri: _without_a_process(place),
}


def _begin_wrongly(way: str, place: Place) -> None:
    try:
        WAYS[way](place, "ftp://nowhere" if _is_last() else place.uri)
    finally:
        cloudckpt.checkpointer.close_async_savers()


@pytest.mark.parametrize("way", WAYS)
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


def _load_with(more: dict, who: str, place: Place) -> None:
    state = _rows(full_state(), blank=True)
    load({**state, **(more if who == "all" or _is_last() else {})}, place)


@pytest.mark.parametrize("who", ["all", "the last"])
@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [("evne", (3,), MissingKeyError), ("uneven", (5, 7), ShapeMismatchError)],
)
def test_a_tensor_that_does_not_fit_is_named_on_all_ranks(who, name, shape, kind, local, ranks):
    ranks(2, _saved, local)
    told = ranks.errors(3, _load_with, {name: torch.zeros(shape)}, who, local)
    assert [type(error) for error in told] == [kind] * 3
    assert {error.item for error in told} == {name}


@pytest.mark.parametrize("value", [5, None, "text", numpy.zeros(3)], ids=lambda v: type(v).__name__)
def test_a_value_where_the_checkpoint_has_a_tensor_is_named(value, local):
    save({"step": torch.tensor([3, 4]), "rest": 1}, local)
    with pytest.raises(ShapeMismatchError) as caught:
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
    assert {error.uri for error in told} == {place.uri}
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


def test_two_ranks_that_fail_differently_are_both_named(local, ranks):
    told = ranks.errors(3, _fail_differently, local)
    assert [type(error) for error in told] == [RanksFailedError] * 3
    assert told[0].failures.keys() == {0, 1}
    assert all("rank 0: " in str(error) and "rank 1: " in str(error) for error in told)
    assert all(error.message.startswith("2 ranks failed in step 'write': ") for error in told)


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


def _load_own_step(place: Place) -> None:
    for step in range(2):
        save(_rows(full_state()), place.at(f"step-{step}"))
    load(_rows(full_state(), blank=True), place.at(f"step-{dist.get_rank()}"))


def test_ranks_that_load_different_steps_are_told(local, ranks):
    told = ranks.errors(2, _load_own_step, local)
    assert [type(error) for error in told] == [DifferentCheckpointsError] * 2


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
