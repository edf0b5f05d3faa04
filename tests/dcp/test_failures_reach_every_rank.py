"""When one rank fails, every rank is told why, soon, and no trace of the attempt stays.

One matrix, of roads, stages and kinds of failures. All points of a road are tried in one launch of
its ranks, one after the other, and each is followed by a save or load that works.
"""

import contextlib
import dataclasses
import os
import threading
from unittest import mock

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
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import errors
from cloudckpt.background import arena, process
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpointer import CheckpointerConfig, CommitHook, make_async_checkpointer
from cloudckpt.dcp.meeting import Consensus, RankStatus
from cloudckpt.hf import SafetensorsWriter
from cloudckpt.stores.local import LocalStore

from .layouts import LAYOUTS, Layout, full_state, spread
from .places import Place
from .values import assert_same, numbered

PATIENCE = 120.0
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS


def _rows(state: dict, *, blank: bool = False) -> dict:
    layout = Layout((dist.get_world_size(),), LAYOUTS["2 rows"].placements)
    return spread(state, layout, blank=blank)


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("this error can't be pickled")


class OneOfALibraryError(Exception):
    """It can be pickled, and not unpickled, as its arguments are not those of the class above."""

    def __init__(self, what: str, whose: str) -> None:
        super().__init__(f"{whose} {what}")


KINDS = {  # of what a planner raises
    "foreign": lambda: ArithmeticError("the dog ate it"),
    "ours": lambda: errors.UnsupportedTensorError("the dog ate it"),
    "interrupt": lambda: KeyboardInterrupt("the dog ate it"),
    "not to be pickled": lambda: UnpicklableError("the dog ate it"),
    "not to be unpickled": lambda: OneOfALibraryError("ate it", "the dog"),
}
BECOMES = {
    "foreign": "RanksFailedError",
    "ours": "UnsupportedTensorError",
    "interrupt": "RanksFailedError",
    "not to be pickled": "CheckpointError",
    "not to be unpickled": "CheckpointError",
}


def _failing(base: type, stage: str, kind: str):
    """A planner that raises on the last rank; of the data, when it is asked for the last item."""

    class Planner(base):
        pass

    def method(self, *args, **kwargs):
        is_early = stage == "resolve_data" and args[0].index.fqn != self.plan.items[-1].index.fqn
        if _is_last() and not is_early:
            raise KINDS[kind]()
        return getattr(base, stage)(self, *args, **kwargs)

    setattr(Planner, stage, method)
    return Planner()


def _told(action) -> tuple[str, str | None, bool]:
    """The class of what is raised, the item that it names, and whether it says what has failed."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        failures = getattr(error, "failures", None) or {dist.get_world_size() - 1: ""}
        assert set(failures) == {dist.get_world_size() - 1}, failures
        return type(error).__name__, getattr(error, "item", None), "the dog ate it" in str(error)
    return "", None, False


# ---- saves


class Forgetful(DefaultSavePlanner):
    """Drops what the last rank was to write, as a faulty planner or a lost worker would."""

    def finish_plan(self, new_plan):
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=[]) if _is_last() else plan


class OddPart:
    """A part of a plan whose class can't be imported on the first rank, or on the last."""

    def __init__(self, where: str) -> None:
        if where == ("last" if _is_last() else "first"):
            raise ModuleNotFoundError("the dog ate it")
        self.where = where

    @classmethod
    def planned(cls, where: str):
        made = cls.__new__(cls)
        made.where = where
        return made

    def __reduce__(self):
        return OddPart, (self.where,)


def _planning_oddly(base: type, where: str, field: str):
    """A planner whose plan on the last rank has an odd part."""

    class Planner(base):
        def create_local_plan(self):
            plan, part = super().create_local_plan(), OddPart.planned(where)
            return dataclasses.replace(plan, **{field: part}) if _is_last() else plan

        def create_global_plan(self, plans):
            return super().create_global_plan(plans)

    return Planner()


ODD = [("plan", "can't be unpickled on the first"), ("plan", "can't be unpickled on the last")]


class Stateful(dict):
    """One whose methods fail on the last rank, as those of a module that does not fit do."""

    def state_dict(self):
        if _is_last() and "load" not in self:
            raise self.get("raises", RuntimeError)("the dog ate it")
        return {"t": numbered(5)}

    def load_state_dict(self, state):
        if _is_last():
            raise KINDS[self["load"]]()


class OddValue:
    def __create_write_items__(self, fqn, value):
        raise OneOfALibraryError("ate it", "the dog")


class Refusing(CommitHook):
    def before_commit(self, uri, metadata):
        raise errors.AccessDeniedError("the dog ate it")


def _refuse_thread(thread: threading.Thread, start=threading.Thread.start) -> None:
    if thread.name.startswith("cloudckpt-async"):
        raise RuntimeError("the dog ate it")
    start(thread)


STATES = {  # what the last rank has beside what all have, the error, and the item that it names
    "a sparse tensor": ({"odd": lambda: numbered(3, 3).to_sparse()}, "UnsupportedTensorError"),
    "no pickle holds it": ({"odd": threading.Lock}, "UnsupportedValueError"),
    "a value that plans itself": ({"itself": OddValue}, "CheckpointError"),
    "another shape": ({"same": lambda: numbered(4)}, "KeyCollisionError"),
    "another type": ({"same": lambda: numbered(3).bfloat16()}, "KeyCollisionError"),
    "a value for a tensor": ({"same": lambda: 5}, "KeyCollisionError"),
}
PLANNING = ["set_up_planner", "create_local_plan", "finish_plan", "resolve_data"]
Told = tuple[str, str | None]
"""The class of an error on all ranks, and the item that it names."""

SAVING: dict[tuple[str, str], Told] = {
    **{(stage, kind): (BECOMES[kind], None) for stage in PLANNING for kind in KINDS},
    **{
        ("state", name): (error, next(iter(own)) if error != "CheckpointError" else None)
        for name, (own, error) in STATES.items()
    },
    ("state", "a shard is missing"): ("IncompleteSaveError", "a"),
    ("state", "Stateful"): ("RanksFailedError", None),
    ("state", "Stateful, interrupt"): ("RanksFailedError", None),
    ("plan", "nobody writes an item"): ("IncompleteSaveError", "a"),
    **dict.fromkeys(ODD, ("CheckpointError", None)),
    ("location", "no location"): ("InvalidURIError", None),
    ("location", "another"): ("DifferentCheckpointsError", None),
    ("store", "denied"): ("AccessDeniedError", None),
    ("commit", "refused by a hook"): ("AccessDeniedError", None),
    ("results", "not to be pickled"): ("RanksFailedError", None),
}
IN_BACKGROUND = {  # what is another error there, or has no like in other saves
    ("thread", "can't be started"): ("AsyncSaveError", None),  # first: a thread is kept
    ("memory", "lacks"): ("StagingMemoryError", None),
    ("state", "no pickle holds it"): ("StagingError", "odd"),
    ("state", "Stateful, interrupt"): ("StagingError", None),
    **{(stage, "foreign"): SAVING[stage, "foreign"] for stage in PLANNING},
    **{
        point: SAVING[point]
        for point in SAVING
        if point[1] in ("a sparse tensor", "a shard is missing", "refused by a hook")
        or point[0] == "location"
        or point == ("resolve_data", "interrupt")
    },
}
MATRIX = {
    "save": SAVING,
    "THREAD": IN_BACKGROUND | {("store", "denied"): SAVING["store", "denied"]},
    "PROCESS": IN_BACKGROUND,
    "torch": {("resolve_data", "foreign"): ("CheckpointException", None)},
}


def _save(road: str, state: dict, place: Place, planner=None, hook=None) -> None:
    given = {"checkpoint_id": place.uri, "config": place.config, "planner": planner}
    if hook is not None or road == "torch":
        writer = cloudckpt.CloudStorageWriter(place.uri, config=place.config, commit_hook=hook)
        given = {"storage_writer": writer, "planner": planner}
    if road == "torch":
        dcp.save(state, **given)
    elif road == "save":
        cloudckpt.save(state, **given)
    else:
        kind = AsyncCheckpointerType[road]
        cloudckpt.async_save(state, async_checkpointer_type=kind, **given).result(PATIENCE)


def _fail(road: str, stage: str, kind: str, place: Place) -> None:
    """A save in which the last rank fails."""
    state = {**_rows({"a": numbered(60, 4), "b": numbered(60, 10)}), "same": numbered(3)}
    planner, hook, last = None, None, _is_last()
    with contextlib.ExitStack() as stack:
        if stage in PLANNING:
            planner = _failing(DefaultSavePlanner, stage, kind)
        elif (stage, kind) in ODD:
            planner = _planning_oddly(DefaultSavePlanner, kind.split()[-1], "storage_data")
        elif stage == "plan":
            planner = Forgetful()
        elif kind.startswith("Stateful"):
            raises = {"raises": KeyboardInterrupt} if kind.endswith("interrupt") else {}
            state["module"] = Stateful(raises)
        elif stage == "state" and last:
            own = STATES[kind][0] if kind in STATES else {}
            state = {**state, **{name: make() for name, make in own.items()}} if own else {}
        elif kind == "another":
            place = place.at(f"of-{dist.get_rank()}")
        elif kind == "no location" and last:
            place = dataclasses.replace(place, uri="ftp://nowhere")
        elif stage == "commit":
            hook = Refusing()
        elif stage == "store" and last:
            denied = errors.AccessDeniedError("the dog ate it", certain=True)
            stack.enter_context(mock.patch.object(LocalStore, "put", side_effect=denied))
        elif stage == "thread" and last:
            stack.enter_context(mock.patch.object(threading.Thread, "start", _refuse_thread))
        elif stage == "results" and last:
            odd = mock.Mock(side_effect=MemoryError("the dog ate it"))
            stack.enter_context(mock.patch.object(Record, "__reduce__", odd))
        elif stage == "memory":
            state["large"] = torch.zeros(1 << 21)
            if last:
                stack.enter_context(mock.patch.object(arena, "available_memory", return_value=1000))
        _save(road, state, place, planner, hook)


def _try_all(road: str, points: list, place: Place) -> dict:
    """By point, what this rank is told, and what is left of the save."""
    found = {}
    try:
        for number, (stage, kind) in enumerate(points):
            here = place.at(str(number))
            told = _told(lambda: _fail(road, stage, kind, here))  # noqa: B023
            dist.barrier()
            found[stage, kind] = told, here.names(), here.unfinished()
            dist.barrier()
            _save(road, {"t": numbered(5)}, here)  # the next one works
    finally:
        cloudckpt.checkpointer.close_async_savers()
    return found


@pytest.mark.parametrize("road", MATRIX)
def test_what_fails_on_one_rank_fails_the_save_on_all_and_nothing_stays(road, local, ranks):
    points, seen = MATRIX[road], set()
    by_rank = ranks(2, _try_all, road, list(points), local, deadline=150)
    for rank, of_rank in enumerate(by_rank):
        for point, ((error, item, is_said), names, unfinished) in of_rank.items():
            is_interrupted, expected = "interrupt" in point[1], points[point]
            if is_interrupted and rank == 1:
                expected = "KeyboardInterrupt", None
            assert (error, item) == expected, (point, rank)
            assert is_said or point[0] in ("state", "plan", "location", "memory"), point
            assert ".metadata" not in names, point
            # torch has no hook for a failed save
            assert road == "torch" or is_interrupted or names == [], point
            assert unfinished == [], point
            seen.add(point)
    assert seen == points.keys()


class Different(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if not _is_last():
            raise [ArithmeticError, errors.UnsupportedTensorError][dist.get_rank()](
                "the dog ate it"
            )
        return super().resolve_data(write_item)


def _fail_differently(place: Place) -> None:
    _save("save", _rows({"t": numbered(60, 10)}), place, Different())


def test_two_ranks_that_fail_differently_are_both_named(local, ranks):
    told = ranks.errors(3, _fail_differently, local)
    assert [type(error) for error in told] == [errors.RanksFailedError] * 3
    assert all(error.failures.keys() == {0, 1} for error in told)


class Cancelled:
    def state_dict(self):
        raise errors.TransferCancelledError("by its own user")

    load_state_dict = dict


def _stop_alone(place: Place) -> None:
    _save("save", {"a": Cancelled() if _is_last() else 1}, place, None)


def test_a_rank_that_stops_although_no_other_has_failed_is_heard_by_all(local, ranks):
    assert [*map(type, ranks.errors(2, _stop_alone, local))] == [errors.TransferCancelledError] * 2


def test_a_failure_of_an_earlier_save_is_named_beside_one_of_this():
    earlier = RankStatus(failure=errors.RanksFailedError("rank 1 failed"), earlier=1)
    now = RankStatus(failure=errors.InvalidURIError("the location is empty"))
    assert Consensus(0, [earlier, now], [None, None], "").objection().failures.keys() == {0, 1}


# ---- once it may be committed


@pytest.mark.parametrize("error", [ConnectionError, KeyboardInterrupt, None])
def test_what_fails_after_the_commit_of_a_derived_writer_undoes_nothing(error, local):
    """It may also commit once more."""

    class Pointing(cloudckpt.CloudStorageWriter):
        def finish(self, metadata, results):
            super().finish(metadata, results)
            if error is not None:
                raise error("no pointer")
            super().finish(metadata, results)

    writer = Pointing(local.uri, config=local.config)
    raised = KeyboardInterrupt if error is KeyboardInterrupt else errors.CommitUnknownError
    with pytest.raises(raised):
        cloudckpt.save({"t": numbered(5)}, storage_writer=writer)
    local.load(state := {"t": torch.zeros(5)})
    assert_same(state["t"], numbered(5))


# ---- a wrong beginning


class Sharded:
    """A Stateful whose state_dict() asks all ranks, as that of an FSDP module may."""

    def state_dict(self):
        seen = torch.tensor([dist.get_rank()])
        dist.all_reduce(seen)
        return {"t": numbered(int(seen))}

    def load_state_dict(self, state):
        raise NotImplementedError


def _checkpointer(place: Place, kind=THREAD):
    return make_async_checkpointer(CheckpointerConfig(kind=kind, config=place.config))


def _by_checkpointer(place: Place, *args, **kwargs) -> None:
    with _checkpointer(place) as checkpointer:
        checkpointer.save(*args, **kwargs)


def _without_a_process(place: Place) -> None:
    failing = mock.Mock(side_effect=errors.ConfigError("no processes here"))
    with mock.patch.object(process, "_start", failing if _is_last() else process._start):
        _checkpointer(place, PROCESS).close()


def _if_last(wrong, right):
    return wrong if _is_last() else right


STATE = {"t": numbered(5)}
SKIPS = cloudckpt.BackgroundOptions(when_busy="skip")
SAVES = (cloudckpt.save, cloudckpt.async_save)
WAYS = {  # to begin, of which the last rank takes a wrong turn: its location is not one
    **{
        f"{call.__name__} of {what}": lambda place, uri, call=call, make=make: call(
            make(), checkpoint_id=uri
        )
        for call in (*SAVES, cloudckpt.load)
        for what, make in (("tensors", lambda: STATE), ("what asks", lambda: {"m": Sharded()}))
    },
    **{
        f"{call.__name__} alone": lambda place, uri, call=call: call(
            STATE, checkpoint_id=place.uri, use_collectives=not _is_last()
        )
        for call in SAVES
    },
    "save by torch": lambda place, uri: cloudckpt.save(
        STATE, storage_writer=_if_last(FileSystemWriter(place.path), place.writer())
    ),
    "load by torch": lambda place, uri: cloudckpt.load(
        STATE, storage_reader=_if_last(FileSystemReader(place.path), place.reader())
    ),
    "async of another format": lambda place, uri: cloudckpt.async_save(
        STATE,
        storage_writer=_if_last(SafetensorsWriter(place.path), place.writer()),
        async_checkpointer_type=PROCESS,
    ),
    "async with other options": lambda place, uri: cloudckpt.async_save(
        STATE,
        checkpoint_id=place.uri,
        config=_if_last(place.having(background=SKIPS), place).config,
    ),
    "checkpointer": lambda place, uri: _by_checkpointer(place, uri, STATE),
    "checkpointer's arguments": lambda place, uri: _by_checkpointer(
        place, *_if_last((STATE, place.uri), (place.uri, STATE))
    ),
    "checkpointer loads": lambda place, uri: _checkpointer(place).load(uri),
    "checkpointer loads strictly": lambda place, uri: _checkpointer(place).load(
        place.uri, None, strict=_is_last()
    ),
    "checkpointers of two kinds": lambda place, uri: _checkpointer(
        place, _if_last(PROCESS, THREAD)
    ).close(),
    "no process": lambda place, uri: _without_a_process(place),
}


def _begin_wrongly(place: Place) -> dict[str, str]:
    told = {}
    for way, begin in WAYS.items():
        try:
            told[way] = _told(lambda: begin(place, "ftp://x" if _is_last() else place.uri))[0]  # noqa: B023
        finally:
            cloudckpt.checkpointer.close_async_savers()
    return told


def test_what_one_rank_begins_wrongly_is_told_to_all_at_once(local, ranks):
    cloudckpt.save({"t": numbered(5)}, checkpoint_id=local.uri, no_dist=True)
    before = local.names()
    first, second = ranks(2, _begin_wrongly, local, deadline=200.0)
    assert first == second
    assert set(first.values()) == {"InvalidURIError", "ConfigError"}
    assert local.names() == before


# ---- loads


UNREADABLE = [
    MemoryError("could not be allocated"),
    OSError("the disk is on fire"),
    errors.AccessDeniedError("not you", uri="file:///x"),
]


@contextlib.contextmanager
def _unreadable(error: Exception, name: str):
    """Reads of an object fail with an error that is not the store's answer."""

    def failing_at(read):
        def failing(store, key, *arguments, **options):
            if key.endswith(name):
                raise error
            return read(store, key, *arguments, **options)

        return failing

    with pytest.MonkeyPatch.context() as patched:
        for verb in ("get", "get_range", "head"):
            patched.setattr(LocalStore, verb, failing_at(getattr(LocalStore, verb)))
        yield


RECEIVING = ["set_up_planner", "create_local_plan", "resolve_tensor", "commit_tensor", "load_bytes"]
MISFITS = {
    "a key is missing": ({"evne": (3,)}, errors.MissingKeyError),
    "another shape": ({"uneven": (5, 7)}, errors.ShapeMismatchError),
}
LOADING: dict[tuple[str, str], Told] = {
    **{(stage, kind): (BECOMES[kind], None) for stage in RECEIVING for kind in KINDS},
    **{
        (who, name): (error.__name__, next(iter(wanted)))
        for name, (wanted, error) in MISFITS.items()
        for who in ("all", "the last")
    },
    ("state", "Stateful"): ("RanksFailedError", None),
    **{("load_state_dict", kind): (BECOMES[kind], None) for kind in KINDS},
    **dict.fromkeys(ODD, ("CheckpointError", None)),
    ("location", "no location"): ("InvalidURIError", None),
    ("location", "another"): ("DifferentCheckpointsError", None),
    ("location", "nothing is there"): ("CheckpointNotFoundError", None),
    ("data", "denied"): ("AccessDeniedError", None),
    ("data", "damaged"): ("CheckpointCorruptError", "large"),
    ("metadata", "no store's answer"): ("CheckpointError", None),
}


def _fail_to_load(stage: str, kind: str, place: Place) -> None:
    state, planner, last = {**_rows(full_state(), blank=True), "step": None}, None, _is_last()
    with contextlib.ExitStack() as stack:
        if stage in RECEIVING:
            planner = _failing(DefaultLoadPlanner, stage, kind)
        elif stage == "plan":
            planner = _planning_oddly(DefaultLoadPlanner, kind.split()[-1], "planner_data")
        elif kind in MISFITS and (last or stage == "all"):
            state |= {name: torch.zeros(shape) for name, shape in MISFITS[kind][0].items()}
        elif stage == "state":
            state["module"] = Stateful()
        elif stage == "load_state_dict":
            state["module"] = Stateful(load=kind)
        elif kind == "no location" and last:
            place = dataclasses.replace(place, uri="ftp://nowhere")
        elif kind == "another" and last:
            place = place.at("another")
        elif kind == "nothing is there":
            place = place.at("nothing")
        elif stage == "data" and kind == "denied" and last:
            error = errors.AccessDeniedError("the dog ate it", certain=True)
            stack.enter_context(_unreadable(error, ".distcp"))
        elif stage == "data" and kind == "damaged":
            place = place.at("damaged")
        elif stage == "metadata" and dist.get_rank() == 0:  # which reads for all
            stack.enter_context(_unreadable(KeyError("the dog ate it"), "/.metadata"))
        place.load(state, planner=planner)


def _save_for_loads(place: Place) -> None:
    for where in (place, place.at("another"), place.at("damaged")):
        state = {
            **_rows(full_state()),
            "step": 3,
            "module": Stateful(load=None),
            f"of {dist.get_rank()}": numbered(5),
        }
        _save("save", state, where)


def _damage(place: Place) -> None:
    """An object of the largest tensor, a byte in each kilobyte."""
    places = place.reader().read_metadata().storage_data.items()
    name = next(info.relative_path for index, info in places if index.fqn == "large")
    with open(os.path.join(place.path, name), "r+b") as file:
        data = bytearray(file.read())
        data[len(data) // 3 :: 1000] = bytes(255 ^ one for one in data[len(data) // 3 :: 1000])
        file.seek(0)
        file.write(data)


def _load_all(points: list, place: Place) -> dict:
    found = {}
    for stage, kind in points:
        found[stage, kind] = _told(lambda: _fail_to_load(stage, kind, place)), [], []  # noqa: B023
        place.load(state := {"step": None})  # the next one works
        assert state == {"step": 3}
    return found


def test_what_fails_on_one_rank_fails_the_load_on_all(local, ranks):
    ranks(2, _save_for_loads, local)
    _damage(local.at("damaged"))
    by_rank = ranks(2, _load_all, list(LOADING), local, deadline=200)
    for of_rank in by_rank:
        for point, (_, item, _) in ((point, told) for point, (told, *_) in of_rank.items()):
            assert item == LOADING[point][1], point
    told = [{point: one[0][0] for point, one in of_rank.items()} for of_rank in by_rank]
    expected = {point: error for point, (error, _) in LOADING.items()}
    interrupted = {p: "KeyboardInterrupt" for p in LOADING if p[1] == "interrupt"}
    assert told == [expected, expected | interrupted]


@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
@pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: type(error).__name__)
def test_metadata_that_can_not_be_read_are_not_called_missing(error, name, local):
    """Else a training script begins anew over a checkpoint that is good."""
    there, empty = local.at("there"), local.at("empty")
    there.save({"t": numbered(5)})
    os.rename(f"{there.path}/.metadata", f"{there.path}/{name}")
    for place in (there, empty):
        with _unreadable(error, f"/{name}"), pytest.raises(errors.CloudCheckpointError) as caught:
            place.load({"t": torch.zeros(5)})
        assert str(error) in str(caught.value)
        assert not isinstance(caught.value, (FileNotFoundError, errors.RanksFailedError))
        assert not isinstance(caught.value, errors.CheckpointCorruptError)
        if isinstance(error, errors.CloudCheckpointError):
            assert type(caught.value) is type(error)


class _Replaces(cloudckpt.CloudStorageReader):
    """Rank 1 goes on only when the checkpoint that rank 0 has seen was replaced."""

    replace = None

    def read_metadata(self, *args, **kwargs):
        if dist.get_rank() == 0:
            found = super().read_metadata(*args, **kwargs)
            self.replace()
            dist.barrier()
            return found
        dist.barrier()
        return super().read_metadata(*args, **kwargs)


def _load_replaced(place: Place) -> None:
    reader = _Replaces(place.uri, config=place.config)
    reader.replace = lambda: place.save({"t": numbered(100)}, no_dist=True)
    cloudckpt.load({"t": torch.zeros(100)}, storage_reader=reader)


def test_a_checkpoint_that_is_replaced_between_the_ranks_is_not_mixed(local, ranks):
    local.save({"t": numbered(100)})
    told = ranks.errors(2, _load_replaced, local)
    assert [type(error).__name__ for error in told] == ["CheckpointReplacedError"] * 2
