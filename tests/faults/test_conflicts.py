"""Several writers of one checkpoint: one wins, the others are told and leave nothing behind."""

import logging
import signal
import threading
import time
from dataclasses import dataclass

import pytest

import cloudckpt
from cloudckpt.checkpoint.objects import CLAIM
from cloudckpt.errors import CheckpointConflictError, CheckpointExistsError, ConfigError
from cloudckpt.runs import Preemption
from support.forks import child
from support.wire.faults import Call, StripHeaders, StripQuery
from support.wire.hop import Fault, Hop
from support.wire.request import Request

from . import jobs
from .selection import everywhere, on
from .states import SMALL, filled, impatient, load_step

CONDITIONS = ("If-Match", "If-None-Match", "ifGenerationMatch")  # headers, and Google's parameter


def is_conditional(request: Request) -> bool:
    return any(request.header(name) or name in request.query for name in CONDITIONS)


def ignoring(dialect: str) -> Fault:
    """A store that takes no notice of conditions."""
    return StripQuery(CONDITIONS[2:]) if dialect == "google" else StripHeaders(CONDITIONS[:2])


@pytest.fixture
def uri(store) -> str:
    return store.uri("run/latest")


@pytest.fixture(params=["new", "replaced"])
def place(request, uri, direct) -> str:
    """A URI, without and with a checkpoint of step 1."""
    if request.param == "replaced":
        cloudckpt.save(filled(1, SMALL), checkpoint_id=uri, config=direct)
    return uri


@pytest.fixture
def unprobed(unshared):
    """Options whose store has not been tried out yet."""
    return unshared(conditional_writes="auto")


class TestRaces:
    @everywhere()
    @pytest.mark.parametrize(
        ("path", "is_lost"),
        [("*.distcp", False), ("*/.metadata", False), ("*/.metadata", True)],
        ids=["while data is sent", "before the commit", "between two tries of the commit"],
    )
    def test_who_commits_second_is_told_and_cleans_up(
        self, place, store, proxy, shaky, direct, path, is_lost
    ):
        @dataclass(frozen=True)
        class Overtake(Fault):
            def inflict(self, hop: Hop) -> None:
                cloudckpt.save(filled(3, SMALL), checkpoint_id=place, config=direct)
                if is_lost:
                    hop.reset()
                else:
                    hop.send(hop.forward())

        rule = proxy.inject(Overtake(), operation="PutObject", path=path, times=1)
        with pytest.raises(CheckpointConflictError) as caught:
            cloudckpt.save(filled(2, SMALL), checkpoint_id=place, config=shaky)
        assert rule.injected == 1
        assert caught.value.uri == f"{place}/.metadata"
        assert load_step(place, direct, SMALL) == 3
        store.assert_tidy()

    @everywhere()
    @pytest.mark.parametrize("path", ["*.distcp", "*/.metadata"])
    def test_a_checkpoint_that_is_deleted_meanwhile_is_a_conflict(
        self, uri, store, proxy, shaky, direct, path
    ):
        cloudckpt.save(filled(1, SMALL), checkpoint_id=uri, config=direct)
        key = store.key(".metadata")
        proxy.inject(Call(lambda _: store.delete(key)), operation="PutObject", path=path, times=1)
        with pytest.raises(CheckpointConflictError):
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=shaky)
        assert key not in store.objects()

    @everywhere()
    def test_a_writer_that_must_not_overwrite_does_not(self, uri, store, proxy, endpoint, direct):
        careful = impatient(endpoint, overwrite=False)

        def overtake(_) -> None:
            cloudckpt.save(filled(3, SMALL), checkpoint_id=uri, config=direct)

        proxy.inject(Call(overtake), operation="PutObject", path="*/.metadata", times=1)
        with pytest.raises(CheckpointConflictError):
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=careful)
        with pytest.raises(CheckpointExistsError):
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=careful)
        assert load_step(uri, direct, SMALL) == 3
        store.assert_tidy()


# where a trainer stands still: amid its data, at its commit, or just when it asks what is there;
# and whether a checkpoint is there before
FROZEN_AT = {
    "data": ("PutObject", "*/step-2/*.distcp", False),
    "commit": ("PutObject", "*/step-2/.metadata", True),
    "beginning": ("GetObject", "*/step-2/.metadata", False),
}
_SECONDS = 2.5  # the store's times tell in seconds what came first


@everywhere(road=["save", "PROCESS"], at=["commit"])
@pytest.mark.parametrize(
    ("road", "at"),
    [("save", "data"), ("save", "commit"), ("PROCESS", "commit")]
    + [(road, "beginning") for road in jobs.ROADS],
)
def test_a_trainer_that_was_stopped_and_comes_back_late_cannot_overwrite(
    store, proxy, endpoint, direct, road, at
):
    run = store.uri("run")
    place = f"{run}/step-2"
    operation, path, replaces = FROZEN_AT[at]
    if replaces:
        cloudckpt.save(filled(2, SMALL), checkpoint_id=place, config=direct)
    born, stopped, successor = threading.Event(), threading.Event(), threading.Event()

    def stop(_) -> None:
        assert born.wait(30)
        trainer.signal(signal.SIGSTOP)
        stopped.set()
        assert successor.wait(30)

    rule = proxy.inject(Call(stop), operation=operation, path=path, times=1)
    patient = impatient(endpoint, read_timeout=60.0, stall_timeout=60.0)
    arguments = {"road": road, "run": run, "config": patient, "step": 2, "nbytes": SMALL}
    with child(jobs.save_by, **arguments) as trainer:
        born.set()
        assert stopped.wait(60)
        if at == "beginning":
            time.sleep(_SECONDS)
        cloudckpt.save(filled(3, SMALL), checkpoint_id=place, config=direct)
        successor.set()
        trainer.signal(signal.SIGCONT)
        status, outcome = trainer.wait()
    assert (rule.injected, status) == (1, 0)
    assert outcome["error"] == "CheckpointConflictError"
    assert load_step(place, direct, SMALL) == 3


def saved_by(road: str, place: str, config: cloudckpt.Config) -> None:
    if road == "save":
        cloudckpt.save(filled(2, SMALL), checkpoint_id=place, config=config)
        return
    options = {"asynchronous": False, "preemption": Preemption(signals=())}
    run = place.rpartition("/")[0]
    with cloudckpt.CheckpointManager(run, config=config, **options) as manager:
        manager.save(1, filled(1, SMALL))


class TestStoresWithoutConditions:
    # which conditions there are is tried in tests/checkpoint/test_commit
    @on("s3", "google")
    @pytest.mark.parametrize("road", ["save", "manager"])
    def test_a_store_that_ignores_conditions_is_found_out(
        self, dialect, place, store, proxy, unprobed, road
    ):
        before = store.objects()
        proxy.inject(ignoring(dialect), operation="PutObject")
        with pytest.raises(ConfigError, match=r"conditional_writes='off'") as caught:
            saved_by(road, place, unprobed)
        assert caught.value.uri == store.root
        assert store.objects() == before
        for name in (".metadata", CLAIM):
            assert proxy.requests("PutObject", f"*/{name}") == []

    @on("s3", "google")
    def test_without_conditions_a_save_works_and_says_what_is_given_up(
        self, place, store, dialect, proxy, endpoint, direct, caplog
    ):
        proxy.inject(ignoring(dialect), operation="PutObject")
        config = impatient(endpoint, conditional_writes="off")
        with caplog.at_level(logging.WARNING, logger="cloudckpt"):
            cloudckpt.save(filled(2, SMALL), checkpoint_id=place, config=config)
        assert "conditional writes are off" in caplog.text
        assert load_step(place, direct, SMALL) == 2
        store.assert_tidy()
        sent = proxy.requests("PutObject")
        assert not any(map(is_conditional, sent))
