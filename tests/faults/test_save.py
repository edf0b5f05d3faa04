"""Saves while requests fail: for a while, and for good."""

import logging
from collections import Counter

import pytest

import cloudckpt
from cloudckpt import RetryPolicy
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    ConnectionLostError,
    ServerError,
    ThrottledError,
)
from support.emulators import free_port
from support.wire.faults import (
    Call,
    CorruptUpload,
    Delay,
    Reset,
    Stall,
    Truncate,
)

from .dialects import Endpoint
from .refusals import (
    Refusal,
    denied,
    internal_error,
    slow_down,
    too_many_requests,
)
from .selection import everywhere, on
from .states import (
    ATTEMPTS,
    BIG,
    SMALL,
    enough_tries,
    filled,
    impatient,
    load_step,
    silence,
)

# every kind of request that a save makes: operation, path, bytes of the state, and how many
# requests of another kind look the same and come before
STEPS = {
    "look": ("GetObject", "*/.metadata", BIG, 0),
    "begin": ("CreateMultipartUpload", "*", BIG, 0),
    "part": ("UploadPart", "*", BIG, 0),
    "complete": ("CompleteMultipartUpload", "*", BIG, 0),
    "whole": ("PutObject", "*.distcp", SMALL, 0),
    "replaced": ("GetObject", "*/.metadata", SMALL, 1),
    "commit": ("PutObject", "*/.metadata", SMALL, 0),
    "tidy": ("DeleteObject", "*", SMALL, 0),
}

FAULTS = {
    "reset": Reset("request"),
    "reset within the body": Reset("request", after=100),
    "lost answer": Reset("answer"),
    "cut answer": Truncate(after=5),
    "slow down": slow_down(retry_after=0),
    "internal error": internal_error(),
    "hidden success": internal_error(carry_out=True),
    "too many requests": too_many_requests(),
    "late answer": Delay(0.2),
}


# When to try again is decided in one place, the Retrier, whose own tests try all errors. Here every
# kind of request is seen to go through it, by the fault that is hardest to get right, and every
# fault to reach it. Other pairs are the soak's.
HARDEST = "lost answer"
EACH = [*((step, HARDEST) for step in STEPS), *(("part", f) for f in FAULTS if f != HARDEST)]


class TestPassingFaults:
    @everywhere(fault=[HARDEST])
    @pytest.mark.parametrize(("step", "fault"), EACH)
    def test_a_save_outlives_a_fault_of_any_request(
        self, saved, store, proxy, shaky, direct, step, fault
    ):
        operation, path, nbytes, skip = STEPS[step]
        uri = saved(nbytes)
        rule = proxy.inject(FAULTS[fault], operation=operation, path=path, skip=skip, times=2)
        cloudckpt.save(filled(2, nbytes), checkpoint_id=uri, config=shaky)
        assert rule.injected == 2 or (rule.injected and fault in ("late answer", "cut answer"))
        assert load_step(uri, direct, nbytes) == 2
        store.assert_tidy()

    @on("s3", "google")
    @pytest.mark.parametrize("carry_out", [False, True], ids=["failed", "succeeded"])
    @pytest.mark.parametrize("trouble", ["internal error", "slow down"])
    def test_a_completion_that_answers_200_with_an_error_is_tried_again(
        self, saved, store, proxy, shaky, direct, trouble, carry_out
    ):
        uri = saved(BIG)
        fault = Refusal(trouble, status=200, carry_out=carry_out)
        rule = proxy.inject(fault, operation="CompleteMultipartUpload", times=2)
        cloudckpt.save(filled(2), checkpoint_id=uri, config=shaky)
        assert rule.injected == 2
        assert load_step(uri, direct) == 2
        store.assert_tidy()

    @everywhere(step=["commit"])
    @pytest.mark.parametrize("fault", [HARDEST])
    @pytest.mark.parametrize("step", ["look", "part", "complete", "commit"])
    def test_a_first_checkpoint_outlives_it_too(self, store, proxy, shaky, direct, step, fault):
        operation, path, nbytes, skip = STEPS[step]
        uri = store.uri("run/first")
        rule = proxy.inject(FAULTS[fault], operation=operation, path=path, skip=skip, times=2)
        cloudckpt.save(filled(1, nbytes), checkpoint_id=uri, config=shaky)
        assert rule.injected == 2
        assert load_step(uri, direct, nbytes) == 1
        store.assert_tidy()

    @everywhere(step=["commit"])
    @pytest.mark.parametrize(
        ("step", "fault"),
        [("part", Stall("request", after=1000)), ("commit", Stall("answer"))],
        ids=["in the body of a part", "before the answer to the commit"],
    )
    def test_a_stalled_request_is_sent_again(
        self, saved, store, proxy, endpoint, direct, step, fault
    ):
        operation, path, nbytes, skip = STEPS[step]
        uri = saved(nbytes)
        config = impatient(endpoint, **silence())
        rule = proxy.inject(fault, operation=operation, path=path, skip=skip, times=1)
        cloudckpt.save(filled(2, nbytes), checkpoint_id=uri, config=config)
        assert rule.injected == 1
        assert load_step(uri, direct, nbytes) == 2
        store.assert_tidy()

    @everywhere(moment=["request"])
    @pytest.mark.parametrize("moment", ["request", "answer"])
    @pytest.mark.parametrize("step", ["part", "commit"])
    def test_a_request_that_arrives_after_its_repetition_does_no_harm(
        self, saved, store, proxy, endpoint, direct, step, moment
    ):
        """The server gets the first one, or answers it, when the second one has long succeeded."""
        operation, path, nbytes, skip = STEPS[step]
        uri = saved(nbytes)
        config = impatient(endpoint, read_timeout=1.0)
        rule = proxy.inject(Delay(2.0, moment), operation=operation, path=path, skip=skip, times=1)
        cloudckpt.save(filled(2, nbytes), checkpoint_id=uri, config=config)
        cloudckpt.save(filled(3, nbytes), checkpoint_id=uri, config=direct)
        assert proxy.wait_idle(), proxy.under_way
        assert rule.injected == 1
        assert load_step(uri, direct, nbytes) == 3

    @everywhere()
    def test_a_server_that_closes_every_connection_is_no_trouble(
        self, saved, store, proxy, endpoint, direct, caplog
    ):
        uri = saved(BIG)
        proxy.inject(Truncate(after=10**9))  # the whole answer, and then the end
        # each that is kept may turn out to be closed, as soon as the machine gets around to it
        config = impatient(endpoint, retry=RetryPolicy(attempts=50, base=0.01, cap=0.2))
        cloudckpt.save(filled(2), checkpoint_id=uri, config=config)
        assert load_step(uri, config) == 2
        store.assert_tidy()

    @everywhere()
    def test_a_storm_of_slow_downs_is_sat_out(self, saved, store, proxy, endpoint, direct):
        uri = saved(BIG)
        policy = RetryPolicy(attempts=20, base=0.01, cap=0.05, deadline=60.0)
        config = impatient(endpoint, retry=policy)
        storm = proxy.inject(slow_down(retry_after=0), probability=0.5)
        cloudckpt.save(filled(2), checkpoint_id=uri, config=config)
        assert storm.injected >= 3
        assert load_step(uri, config) == 2
        proxy.clear()
        assert load_step(uri, direct) == 2
        store.assert_tidy()

    @everywhere()
    def test_a_store_that_asks_for_a_pause_gets_it(self, saved, proxy, shaky, direct, caplog):
        uri = saved()
        proxy.inject(slow_down(retry_after=1), operation="PutObject", times=1)
        with caplog.at_level(logging.INFO, logger="cloudckpt"):
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=shaky)
        [record] = [r for r in caplog.records if "trying again" in r.getMessage()]
        assert "trying again in 1.00 s" in record.getMessage()
        assert "HTTP 503" in record.getMessage()
        assert load_step(uri, direct, SMALL) == 2

    def test_an_async_save_outlives_it_too(self, saved, store, proxy, shaky, direct):
        uri = saved(BIG)
        proxy.inject(Reset("request", after=1000), operation="UploadPart", times=2)
        cloudckpt.async_save(filled(2), checkpoint_id=uri, config=shaky).result(150)
        assert load_step(uri, direct) == 2
        store.assert_tidy()


# what becomes of a save whose every request of a kind fails: fault -> error
LASTING = {
    "reset": ConnectionLostError,
    "slow down": ThrottledError,
    "internal error": ServerError,
    "too many requests": ThrottledError,
    "denied": AccessDeniedError,
}
LASTING_FAULTS = {**FAULTS, "denied": denied()}


class TestLastingFaults:
    @everywhere(fault=["internal error"])
    @pytest.mark.parametrize(
        ("step", "fault"),
        [
            *((step, "internal error") for step in STEPS if step not in ("tidy", "commit")),
            *(("part", fault) for fault in LASTING if fault != "internal error"),
        ],
    )
    def test_the_save_fails_by_name_and_leaves_no_trace(
        self, saved, store, proxy, shaky, direct, step, fault
    ):
        operation, path, nbytes, skip = STEPS[step]
        uri = saved(nbytes)
        before = store.objects()
        proxy.inject(LASTING_FAULTS[fault], operation=operation, path=path, skip=skip)
        with pytest.raises(LASTING[fault]) as caught:
            cloudckpt.save(filled(2, nbytes), checkpoint_id=uri, config=shaky)
        assert caught.value.uri.startswith(uri)
        assert caught.value.cause
        tries = Counter(request.target for request in proxy.requests(operation, path)[skip:])
        assert enough_tries(tries)
        assert store.objects() == before
        assert store.uploads() == []
        assert load_step(uri, direct, nbytes) == 1

    @everywhere()
    @pytest.mark.parametrize("step", ["begin", "part"])
    def test_answers_that_always_get_lost_leave_no_trace_either(
        self, saved, store, proxy, endpoint, direct, step
    ):
        operation, path, nbytes, skip = STEPS[step]
        uri = saved(nbytes)
        before = store.objects()
        proxy.inject(Reset("answer"), operation=operation, path=path, skip=skip)
        # one request at a time: a part that is under way when another one fails may arrive behind
        # the clean-up, and Azure, where nothing ends an upload, keeps it for a week
        one_by_one = impatient(endpoint, connections=1)
        with pytest.raises(ConnectionLostError):
            cloudckpt.save(filled(2, nbytes), checkpoint_id=uri, config=one_by_one)
        assert store.objects() == before
        assert store.uploads() == []
        assert load_step(uri, direct, nbytes) == 1

    @everywhere()
    @pytest.mark.parametrize("step", ["complete", "whole"])
    def test_an_object_whose_answers_always_get_lost_is_found_in_the_store(
        self, saved, store, proxy, shaky, direct, step
    ):
        operation, path, nbytes, skip = STEPS[step]
        uri = saved(nbytes)
        proxy.inject(Reset("answer"), operation=operation, path=path, skip=skip)
        cloudckpt.save(filled(2, nbytes), checkpoint_id=uri, config=shaky)
        assert load_step(uri, direct, nbytes) == 2
        store.assert_tidy()

    @on("s3", "google")
    def test_a_completion_that_always_answers_200_with_an_error_leaves_no_trace(
        self, saved, store, proxy, shaky, direct
    ):
        uri = saved(BIG)
        before = store.objects()
        fault = Refusal("internal error", status=200)
        proxy.inject(fault, operation="CompleteMultipartUpload")
        with pytest.raises(ServerError) as caught:
            cloudckpt.save(filled(2), checkpoint_id=uri, config=shaky)
        assert caught.value.uri.startswith(uri)
        assert "InternalError" in caught.value.cause
        assert len(proxy.requests("CompleteMultipartUpload")) <= ATTEMPTS
        assert store.objects() == before
        assert store.uploads() == []
        assert load_step(uri, direct) == 1

    @everywhere()
    def test_nothing_is_visible_where_no_checkpoint_was(self, store, proxy, shaky, direct):
        uri = store.uri("run/first")
        proxy.inject(internal_error(), operation="UploadPart", skip=1)
        with pytest.raises(ServerError):
            cloudckpt.save(filled(1), checkpoint_id=uri, config=shaky)
        with pytest.raises(CheckpointNotFoundError):
            load_step(uri, direct)
        assert store.objects() == set()
        assert store.uploads() == []

    def test_an_async_save_fails_by_name_too(self, saved, store, proxy, shaky, direct):
        uri = saved(BIG)
        before = store.objects()
        proxy.inject(internal_error(), operation="UploadPart")
        future = cloudckpt.async_save(filled(2), checkpoint_id=uri, config=shaky)
        with pytest.raises(ServerError):
            future.result(150)
        assert store.objects() == before
        assert store.uploads() == []
        assert load_step(uri, direct) == 1

    @everywhere()
    def test_a_failed_tidying_up_is_logged_and_does_not_fail_the_save(
        self, saved, proxy, shaky, direct, caplog
    ):
        uri = saved()
        proxy.inject(internal_error(), operation="DeleteObject")
        with caplog.at_level(logging.WARNING, logger="cloudckpt"):
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=shaky)
        assert "unneeded objects were left behind" in caplog.text
        assert load_step(uri, direct, SMALL) == 2

    @everywhere()
    @pytest.mark.timeout(200)
    def test_a_store_that_dies_for_good_ends_the_save(self, saved, proxy, shaky, direct):
        uri = saved(BIG)
        proxy.inject(Reset("request"), skip=4)
        with pytest.raises(ConnectionLostError):
            cloudckpt.save(filled(2), checkpoint_id=uri, config=shaky)
        assert load_step(uri, direct) == 1

    @everywhere()
    @pytest.mark.timeout(200)
    def test_an_endpoint_that_refuses_connections_ends_the_save(self, dialect, store):
        config = impatient(Endpoint(dialect, f"http://127.0.0.1:{free_port()}"))
        with pytest.raises(ConnectionLostError) as caught:
            cloudckpt.save(filled(1, SMALL), checkpoint_id=store.uri("run"), config=config)
        assert "refused" in caught.value.cause


@everywhere(nbytes=[BIG])
@pytest.mark.parametrize("nbytes", [SMALL, BIG])
def test_a_tensor_that_changes_on_its_way_up_fails_the_save_by_name(
    store, proxy, endpoint, direct, nbytes
):
    """These stores verify no checksum: they take what no load would accept."""
    uri, state = store.uri("run/changed"), filled(2, nbytes)
    cloudckpt.save(filled(1, nbytes), checkpoint_id=uri, config=direct)
    before = store.objects()
    operation = "UploadPart" if nbytes == BIG else "PutObject"
    change = Call(lambda _: state["weight"].add_(1), after=1000)
    proxy.inject(change, operation=operation, path="*.distcp*", times=1)
    one_by_one = impatient(endpoint, connections=1)  # no part arrives behind the clean-up
    with pytest.raises(cloudckpt.errors.TensorChangedError) as caught:
        cloudckpt.save(state, checkpoint_id=uri, config=one_by_one)
    assert caught.value.item == "weight"
    assert store.objects() == before
    assert store.uploads() == []
    assert load_step(uri, direct, nbytes) == 1


@everywhere()
@pytest.mark.parametrize(
    ("path", "at"),
    [("*.distcp", 20_000), ("*/.metadata", 1000)],  # amid the weight's elements; anywhere
    ids=["*.distcp", "*.metadata"],
)
def test_what_was_damaged_on_its_way_up_is_not_loaded(store, proxy, shaky, direct, path, at):
    """A store without checksums takes it; the load has to notice."""
    uri = store.uri("run/damaged")
    rule = proxy.inject(CorruptUpload(at=at), operation="PutObject", path=path)
    cloudckpt.save(filled(1, SMALL), checkpoint_id=uri, config=shaky)
    assert rule.injected
    with pytest.raises(cloudckpt.errors.CheckpointCorruptError):
        load_step(uri, direct, SMALL)
