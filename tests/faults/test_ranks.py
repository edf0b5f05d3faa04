"""Two ranks over gloo: what befalls one is heard by both."""

import os
import queue
import signal
from dataclasses import dataclass

import pytest

import cloudckpt
from cloudckpt.errors import CheckpointNotFoundError, CloudCheckpointError
from support.forks import child
from support.wire.faults import Reset
from support.wire.hop import Fault, Hop

from . import jobs
from .refusals import GATEWAYS, AnswerFirst, Refusal
from .selection import everywhere
from .states import BIG, filled, impatient, load_step, step_of


@pytest.fixture
def run(store, endpoint, tmp_path):
    """Saves with two ranks; ``meanwhile`` gets the children. Returns statuses, outcomes, URI."""

    def run(meanwhile=lambda ranks: None, **options):
        uri = store.uri("run/ranks")
        arguments = {
            "rendezvous": str(tmp_path / "rendezvous"),
            "uri": uri,
            "config": impatient(endpoint),
            "step": 1,
            "nbytes": BIG,
            **options,
        }
        with (
            child(jobs.save_as_rank, rank=0, **arguments) as zero,
            child(jobs.save_as_rank, rank=1, **arguments) as one,
        ):
            meanwhile({0: zero, 1: one})
            ends = [zero.wait(), one.wait()]
        return [status for status, _ in ends], [outcome for _, outcome in ends], uri

    return run


def load_ranks(uri: str, config) -> list[dict]:
    """The states of both ranks."""
    state = {f"{name}.{rank}": value for rank in (0, 1) for name, value in filled(-1).items()}
    cloudckpt.load(state, checkpoint_id=uri, config=config)
    names = ("weight", "bias", "step")
    return [{name: state[f"{name}.{rank}"] for name in names} for rank in (0, 1)]


class TestFaults:
    @everywhere(rank=[1])
    @pytest.mark.parametrize("background", [False, True])
    @pytest.mark.parametrize(
        ("rank", "operation", "path"),
        [
            (0, "CompleteMultipartUpload", "*/__0_*"),
            (1, "UploadPart", "*/__1_*"),
            (0, "PutObject", "*/.metadata"),
        ],
    )
    def test_all_ranks_raise_the_error_of_one_and_leave_no_trace(
        self, run, store, proxy, rank, operation, path, background
    ):
        proxy.inject(Refusal("denied"), operation=operation, path=path)
        statuses, outcomes, _ = run(background=background)
        assert statuses == [0, 0]
        assert [outcome["error"] for outcome in outcomes] == ["AccessDeniedError"] * 2
        assert (store.objects(), store.uploads()) == (set(), [])

    @everywhere()
    def test_a_commit_that_a_gateway_refuses_and_then_forwards_has_the_data_of_all(
        self, run, store, proxy, endpoint, direct
    ):
        kept: list[Hop] = []
        fault = AnswerFirst(GATEWAYS["envoy"], kept)
        proxy.inject(fault, operation="PutObject", path="*/.metadata")
        statuses, outcomes, uri = run(config=impatient(endpoint))
        assert statuses == [0, 0]
        assert [outcome["error"] for outcome in outcomes] == ["CommitUnknownError"] * 2
        kept[0].forward()
        assert [step_of(state) for state in load_ranks(uri, direct)] == [1, 1]
        store.assert_tidy()


@dataclass(frozen=True)
class Kill(Fault):
    """Kills a rank when a request arrives: before it is carried out, or when it was, unanswered.

    What is not carried out never will be.
    """

    ranks: "queue.Queue[dict]"
    victim: int
    carried_out: bool

    def inflict(self, hop: Hop) -> None:
        hop.body()
        answer = hop.forward() if self.carried_out else None
        os.kill(self.ranks.get(timeout=30)[self.victim].pid, signal.SIGKILL)
        if answer is None or self.victim == 0:
            hop.reset()
        else:
            hop.send(answer)


COMMIT = ("PutObject", "*/.metadata")


@pytest.fixture
def survive(run, proxy):
    """Kills the victim at a request; returns what came of the other rank, and the URI."""

    def survive(victim: int, operation: str, path: str, *, carried_out: bool = False, **options):
        ranks: queue.Queue = queue.Queue()
        fault = Kill(ranks, victim, carried_out)
        proxy.inject(fault, operation=operation, path=path, times=1)
        statuses, outcomes, uri = run(ranks.put, **options)
        assert statuses[victim] == -signal.SIGKILL
        assert statuses[1 - victim] == 0, "the surviving rank must raise, not hang"
        return outcomes[1 - victim], uri

    return survive


class TestCommitsOfRanksThatLostEachOther:
    @everywhere(background=[False])
    @pytest.mark.parametrize("background", [False, True])
    @pytest.mark.parametrize(
        ("victim", "carried_out", "known"), [(0, True, True), (1, True, True), (0, False, None)]
    )
    def test_the_other_rank_says_what_it_knows_of_the_commit(
        self, survive, store, direct, background, victim, carried_out, known
    ):
        outcome, uri = survive(victim, *COMMIT, carried_out=carried_out, background=background)
        if victim == 0 or outcome["error"]:  # who has committed may not notice
            assert (outcome["error"], outcome["committed"]) == ("ProcessGroupError", known)
        if carried_out:
            assert [step_of(state) for state in load_ranks(uri, direct)] == [1, 1]
            store.assert_tidy()
        else:
            assert any("/__1_" in key for key in store.objects()), "the commit may need them"
            with pytest.raises(CheckpointNotFoundError):
                load_step(uri, direct)

    def test_a_rank_to_which_the_store_does_not_answer_does_not_know(self, survive, proxy):
        # the first one belongs to the look at what is there when the save begins
        proxy.inject(Reset("answer"), operation="GetObject", path="*/.metadata", skip=1)
        outcome, _ = survive(0, *COMMIT, carried_out=True)
        assert (outcome["error"], outcome["committed"]) == ("ProcessGroupError", None)
        assert "or will be later" in outcome["text"]

    def test_the_checkpoint_of_another_save_is_not_taken_for_this_one(
        self, survive, run, store, direct
    ):
        cloudckpt.save(filled(7), checkpoint_id=store.uri("run/ranks"), config=direct)
        outcome, _ = survive(0, *COMMIT)
        assert (outcome["error"], outcome["committed"]) == ("ProcessGroupError", None)
        assert load_step(store.uri("run/ranks"), direct) == 7


class TestKilledRanks:
    @everywhere(victim=[1])
    @pytest.mark.parametrize(
        ("victim", "operation"),
        [(0, "CreateMultipartUpload"), (0, "UploadPart"), (1, "UploadPart")],
    )
    def test_the_survivor_fails_soon_by_name_and_leaves_nothing_of_its_own(
        self, survive, store, direct, victim, operation
    ):
        outcome, uri = survive(victim, operation, f"*/__{victim}_*")
        assert issubclass(getattr(cloudckpt.errors, outcome["error"]), CloudCheckpointError)
        assert uri in outcome["text"]
        assert outcome["threads"] == []
        assert [key for key in store.uploads() if f"/__{1 - victim}_" in key] == []
        with pytest.raises(CheckpointNotFoundError):
            load_step(uri, direct)
        if victim == 1:  # nobody but the survivor can commit: its objects are not needed
            assert (outcome["error"], outcome["committed"]) == ("ProcessGroupError", False)
            assert [key for key in store.objects() if "/__0_" in key] == []
