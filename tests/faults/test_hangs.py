"""Servers that fall silent, and users who lose patience: nothing waits for ever, or leaves threads.

What might hang runs in a child that is ended when its patience is: its status then is -SIGALRM.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import pytest
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import RetryPolicy, waiting
from cloudckpt.checkpointer import SaveFuture
from cloudckpt.errors import ServerError
from support.forks import child
from support.logs import warnings_of_ours
from support.wire.faults import Call, Stall
from support.wire.hop import Fault, Hop

from . import jobs
from .refusals import Refusal
from .selection import everywhere
from .states import BIG, SMALL, filled, impatient, load_step, silence

PATIENCE = 150.0  # seconds, many times what the options below allow
LONG = {
    "retry": RetryPolicy(attempts=2, base=0.01, cap=0.05, deadline=2.0),
    "read_timeout": 600.0,
    "stall_timeout": 600.0,
}


@dataclass(frozen=True)
class NeverAnswered(Fault):
    """The store does what it is asked; nobody hears of it."""

    done: threading.Event

    def inflict(self, hop: Hop) -> None:
        hop.forward()
        self.done.set()
        hop.stall()


@dataclass(frozen=True)
class Held(Fault):
    """The store does what it is asked so many seconds after an event."""

    event: threading.Event
    after: float = 0.0

    def inflict(self, hop: Hop) -> None:
        hop.body()
        assert self.event.wait(PATIENCE)
        hop.pause(self.after)
        hop.send(hop.forward())


@pytest.fixture
def hasty(endpoint):
    limits = silence()
    twice = 2 * limits["read_timeout"]
    retry = RetryPolicy(attempts=2, base=0.01, cap=0.05, deadline=twice)
    return impatient(endpoint, **limits, retry=retry)


@pytest.fixture
def lines(monkeypatch):
    """What is said of a store that is waited for, soon, and an event for the first line."""
    monkeypatch.setattr(waiting, "FIRST_LINE", 0.2)
    said, found = threading.Event(), []

    def note(text: str) -> None:
        found.append(text)
        said.set()

    with warnings_of_ours(note):
        yield found, said


class TestWaiting:
    @everywhere()
    @pytest.mark.parametrize("read", [False, True], ids=["save", "load"])
    def test_a_request_that_nobody_answers_is_named_while_it_is_waited_for(
        self, saved, proxy, endpoint, direct, lines, read
    ):
        uri, (found, said) = saved(), lines
        operation = "GetObject" if read else "PutObject"
        proxy.inject(Held(said), operation=operation, path="*.distcp", times=1)
        config = impatient(endpoint, read_timeout=60.0)
        if read:
            assert load_step(uri, config, SMALL) == 1
        else:
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=config)
            assert load_step(uri, direct, SMALL) == 2
        assert f" {uri}/" in found[0]
        assert "no byte has moved" in found[0]
        assert "failed tries: 0" in found[0]


class TestSilence:
    @everywhere(road=["PROCESS"])
    @pytest.mark.parametrize("road", ["THREAD", "PROCESS", "incremental"])
    def test_a_save_in_the_background_returns_while_the_store_answers_nothing(
        self, store, proxy, endpoint, road
    ):
        config = impatient(endpoint, read_timeout=60.0, stall_timeout=60.0)
        config = replace(config, incremental=road == "incremental")
        kind = AsyncCheckpointerType[road if road == "THREAD" else "PROCESS"]

        def save(step: int) -> SaveFuture:
            place = store.uri(f"run/step-{step}")
            return cloudckpt.async_save(
                filled(step, SMALL),
                checkpoint_id=place,
                config=config,
                async_checkpointer_type=kind,
            )

        save(1).result(150)
        answers = threading.Event()
        proxy.inject(Call(lambda request: answers.wait(150)))
        future = save(2)
        assert not future.done()
        answers.set()
        future.result(150)
        assert load_step(store.uri("run/step-2"), config, SMALL) == 2

    @everywhere(operation=["PutObject", "CompleteMultipartUpload", "*"])
    @pytest.mark.parametrize(
        ("operation", "path", "nbytes", "stall", "error"),
        [
            ("GetObject", "*/.metadata", BIG, Stall("answer"), "ConnectionLostError"),
            ("UploadPart", "*", BIG, Stall("request"), "ConnectionLostError"),
            ("CompleteMultipartUpload", "*", BIG, Stall("answer"), None),  # the store holds it
            ("PutObject", "*/.metadata", SMALL, Stall("request"), "CommitUnknownError"),
            ("*", "*", BIG, Stall("answer"), "ConnectionLostError"),
        ],
    )
    def test_a_save_gives_up_on_whatever_stalls_for_good(
        self, saved, store, proxy, hasty, direct, operation, path, nbytes, stall, error
    ):
        uri = saved(nbytes)
        before = store.objects()
        proxy.inject(stall, operation=operation, path=path, skip=2 if operation == "*" else 0)
        arguments = {"config": hasty, "step": 2, "nbytes": nbytes}
        with child(jobs.save, patience=PATIENCE, uri=uri, **arguments) as running:
            status, outcome = running.wait()
        assert status == 0, "it hangs"
        assert outcome["error"] == error
        assert outcome["threads"] == []
        assert load_step(uri, direct, nbytes) == (2 if error is None else 1)
        if error == "ConnectionLostError" and operation != "*":
            assert (store.objects(), store.uploads()) == (before, [])


class TestInterrupts:
    """SIGINT, as Ctrl-C sends it, while the store says nothing."""

    @pytest.fixture
    def interrupt(self, saved, store, proxy, endpoint):
        """Interrupts a child's job at a request; returns its status and outcome, and the URI."""

        def interrupt(job: str, fault, nbytes: int, options: dict, **where):
            uri = saved(nbytes)
            arguments = {"config": impatient(endpoint, **options), "nbytes": nbytes}
            if job == "save":
                arguments["step"] = 2
            # of this test: a request of the one before may still arrive
            where["path"] = f"*{store.key_of(uri)}{where['path']}"
            proxy.inject(fault, **where)
            with child(getattr(jobs, job), patience=PATIENCE, uri=uri, **arguments) as running:
                if isinstance(fault, NeverAnswered):
                    assert fault.done.wait(PATIENCE)
                while not proxy.requests(where["operation"], where["path"]):
                    time.sleep(0.01)
                running.signal(signal.SIGINT)
                if isinstance(fault, Held):
                    fault.event.set()
                # Python misses one that comes right before a system call: a user tries again
                again = threading.Timer(60, running.signal, (signal.SIGINT,))
                again.start()
                try:
                    status, outcome = running.wait()
                finally:
                    again.cancel()
            assert outcome is not None, f"the child ended with {status}"
            assert proxy.wait_idle(), proxy.under_way
            return status, outcome, uri

        return interrupt

    @everywhere(path=["*.distcp"])
    @pytest.mark.parametrize(
        ("operation", "path", "nbytes"),
        [
            ("GetObject", "*/.metadata", SMALL),
            ("CreateMultipartUpload", "*", BIG),
            ("UploadPart", "*", BIG),
            ("CompleteMultipartUpload", "*", BIG),
            ("PutObject", "*.distcp", SMALL),
        ],
        ids=["look", "begin", "part", "complete", "whole"],
    )
    def test_an_interrupted_save_ends_soon_and_cleans_up(
        self, interrupt, store, direct, operation, path, nbytes
    ):
        alone = {**LONG, "connections": 1}
        where = {"operation": operation, "path": path, "times": 1}
        # a request that is carried out behind the clean-up can't be helped: see the last test
        fault = NeverAnswered(threading.Event())
        status, outcome, uri = interrupt("save", fault, nbytes, alone, **where)
        assert status == 0, "it goes on waiting"
        assert (outcome["error"], outcome["threads"]) == ("KeyboardInterrupt", [])
        assert load_step(uri, direct, nbytes) == 1
        store.assert_tidy()

    def test_an_interrupt_of_a_load_stays_an_interrupt(self, interrupt):
        """A training loop that survives any Exception must not survive Ctrl-C."""
        where = {"operation": "GetObject", "path": "*.distcp"}
        status, outcome, _ = interrupt("load", Stall("answer"), SMALL, LONG, **where)
        assert (status, outcome["error"]) == (0, "KeyboardInterrupt")

    @everywhere()
    def test_what_arrives_after_the_clean_up_does_no_harm(self, interrupt, store, direct):
        """Nobody can call back a request: its object may stay behind, but belongs to nothing."""
        where = {"operation": "PutObject", "path": "*.distcp", "times": 1}
        late = Held(threading.Event(), after=1.0)
        status, outcome, uri = interrupt("save", late, SMALL, LONG, **where)
        assert (status, outcome["threads"]) == (0, [])
        assert load_step(uri, direct, SMALL) == 1
        cloudckpt.save(filled(3, SMALL), checkpoint_id=uri, config=direct)
        assert load_step(uri, direct, SMALL) == 3


class TestThreads:
    def test_failures_leak_no_sockets(self, saved, proxy, shaky):
        def sockets() -> int:
            links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
            return sum(os.path.islink(p) and os.readlink(p).startswith("socket") for p in links)

        uri = saved(BIG)
        proxy.inject(Refusal("internal error"), operation="UploadPart")
        before, rounds = sockets(), 20
        for _ in range(rounds):
            with pytest.raises(ServerError):
                cloudckpt.save(filled(2), checkpoint_id=uri, config=shaky)
        assert proxy.wait_idle(), proxy.under_way
        # both ends of four connections of ours and of four of boto3's may be kept for the next save
        assert sockets() - before <= 16 < rounds
