"""Saves while requests fail: for a while, and for good."""

import errno
import itertools
import os
from collections import Counter

import pytest

import cloudckpt
from cloudckpt import RetryPolicy, errors
from support.wire.faults import Call, CorruptUpload, Delay, Reset, Stall, Truncate

from .refusals import COMMON, Refusal
from .selection import everywhere, on
from .states import BIG, SMALL, enough_tries, filled, impatient, load_step, silence

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
    **COMMON,
    "reset within the body": Reset("request", after=100),
    "cut answer": Truncate(after=5),
    "hidden success": Refusal("internal error", carry_out=True),
    "error behind 200": Refusal("internal error", status=200),
    "slow down behind 200": Refusal("slow down", status=200),
    "success behind an error behind 200": Refusal("slow down", status=200, carry_out=True),
    "stall in the body": Stall("request", after=1000),
    "expired token": Refusal("expired token"),
}
VAGUE = ("late answer", "cut answer")  # which the client may not notice

# When to try again is decided in one place, the Retrier, whose own tests try all errors. Here every
# kind of request is seen to go through it, by the fault that is hardest to get right, and every
# fault to reach it. Other pairs are the soak's.
HARDEST = "lost answer"
LASTING = ("denied", "expired token")
BRIEF = [f for f in FAULTS if f not in (HARDEST, *LASTING) and "200" not in f and "stall" not in f]
FOR_GOOD = None

# which request fails, how, how often, what becomes of the save, and whose it is
MATRIX = [
    *((step, HARDEST, 2, None, "save") for step in STEPS),
    *((step, HARDEST, 2, None, "first") for step in ("look", "part", "complete", "commit")),
    *(("part", fault, 2, None, "save") for fault in BRIEF),
    *(("complete", fault, 2, None, "save") for fault in FAULTS if "200" in fault),
    ("part", "stall in the body", 1, None, "save"),
    ("commit", "stall before the answer", 1, None, "save"),
    ("part", "reset within the body", 2, None, "background"),
    *(
        (step, "internal error", FOR_GOOD, errors.ServerError, "save")
        for step in STEPS
        if step not in ("tidy", "commit")
    ),
    ("part", "reset", FOR_GOOD, errors.ConnectionLostError, "save"),
    ("part", "slow down", FOR_GOOD, errors.ThrottledError, "save"),
    ("part", "too many requests", FOR_GOOD, errors.ThrottledError, "save"),
    ("part", "denied", FOR_GOOD, errors.AccessDeniedError, "save"),
    ("part", "expired token", FOR_GOOD, errors.CredentialsError, "save"),
    ("begin", HARDEST, FOR_GOOD, errors.ConnectionLostError, "save"),
    ("part", HARDEST, FOR_GOOD, errors.ConnectionLostError, "save"),
    ("part", "internal error", FOR_GOOD, errors.ServerError, "first"),
    ("part", "internal error", FOR_GOOD, errors.ServerError, "background"),
    ("complete", "error behind 200", FOR_GOOD, errors.ServerError, "save"),
    ("complete", HARDEST, FOR_GOOD, None, "save"),  # it is found in the store
    ("whole", HARDEST, FOR_GOOD, None, "save"),
    ("commit", HARDEST, FOR_GOOD, None, "save"),
    ("commit", "reset", FOR_GOOD, errors.CommitUnknownError, "save"),  # it may yet arrive
    ("commit", "internal error", FOR_GOOD, errors.CommitUnknownError, "save"),
    ("commit", "internal error", FOR_GOOD, errors.CommitUnknownError, "background"),
    ("commit", "slow down", FOR_GOOD, errors.ThrottledError, "save"),
    ("commit", "too many requests", FOR_GOOD, errors.ThrottledError, "save"),
    ("commit", "denied", FOR_GOOD, errors.AccessDeniedError, "save"),
    ("tidy", "internal error", FOR_GOOD, None, "save"),
]
ELSEWHERE = (HARDEST, "internal error", "slow down", "reset", "denied", "error behind 200")


@everywhere(fault=ELSEWHERE)
@pytest.mark.parametrize(("step", "fault", "times", "error", "road"), MATRIX)
def test_a_save_ends_whole_or_by_a_name_and_without_a_trace(
    saved, store, proxy, endpoint, direct, step, fault, times, error, road
):
    operation, path, nbytes, skip = STEPS[step]
    uri = store.uri("run/first") if road == "first" else saved(nbytes)
    before, options = store.objects(), silence() if "stall" in fault else {}
    if (fault, times) == (HARDEST, FOR_GOOD):
        # a part that is under way when another one fails may arrive after the clean-up, and Azure,
        # where nothing ends an upload, keeps it for a week
        options = {"connections": 1}
    rule = proxy.inject(FAULTS[fault], operation=operation, path=path, skip=skip, times=times)

    def save():
        given = {"checkpoint_id": uri, "config": impatient(endpoint, **options)}
        if road == "background":
            cloudckpt.async_save(filled(2, nbytes), **given).result(150)
        else:
            cloudckpt.save(filled(2, nbytes), **given)

    if error is None:
        save()
        assert rule.injected == times or (rule.injected and (times is None or fault in VAGUE))
        assert load_step(uri, direct, nbytes) == 2
        if (step, times) != ("tidy", FOR_GOOD):
            store.assert_tidy()
        return
    with pytest.raises(error) as caught:
        save()
    assert caught.value.uri.startswith(uri)
    assert caught.value.cause
    tries = Counter(request.target for request in proxy.requests(operation, path)[skip:])
    assert enough_tries(tries)
    if error is errors.CommitUnknownError:  # no data are deleted that it needs
        assert {key.rpartition(".")[2] for key in store.objects() - before} == {"distcp"}
    else:
        assert (store.objects(), store.uploads()) == (before, [])
    if road == "first":
        with pytest.raises(errors.CheckpointNotFoundError):
            load_step(uri, direct, nbytes)
    else:
        assert load_step(uri, direct, nbytes) == 1


@everywhere(moment=["request"])
@pytest.mark.parametrize("moment", ["request", "answer"])
@pytest.mark.parametrize("step", ["part", "commit"])
def test_a_request_that_arrives_after_its_repetition_does_no_harm(
    saved, store, proxy, endpoint, direct, step, moment
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
def test_a_storm_of_slow_downs_is_sat_out(saved, store, proxy, endpoint, direct):
    uri = saved(BIG)
    policy = RetryPolicy(attempts=20, base=0.01, cap=0.05, deadline=60.0)
    config = impatient(endpoint, retry=policy)
    storm = proxy.inject(Refusal("slow down", retry_after=0), probability=0.5)
    cloudckpt.save(filled(2), checkpoint_id=uri, config=config)
    assert storm.injected >= 3
    assert load_step(uri, config) == 2
    proxy.clear()
    assert load_step(uri, direct) == 2
    store.assert_tidy()


@on("s3")
def test_a_save_and_a_load_follow_the_bucket_to_its_region(store, proxy, unshared):
    uri = store.uri("run/elsewhere")
    for act in (
        lambda config: cloudckpt.save(filled(1), checkpoint_id=uri, config=config),
        lambda config: load_step(uri, config),
    ):
        rule = proxy.inject(Refusal("wrong region"), times=1)
        act(unshared())
        assert rule.injected == 1


@everywhere()
def test_a_bucket_that_does_not_exist_is_named_by_the_server(store, direct):
    uri = f"{store.root}-that-does-not-exist/run"
    for act in (cloudckpt.save, cloudckpt.load):
        with pytest.raises(errors.BucketNotFoundError) as caught:
            act(filled(1, SMALL), checkpoint_id=uri, config=direct)
        assert caught.value.uri.startswith(uri)


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_full_disk_is_named_and_leaves_the_old_checkpoint(
    tmp_path, direct, monkeypatch, number, after
):
    uri = str(tmp_path / "run")
    cloudckpt.save(filled(1), checkpoint_id=uri, config=direct)
    before, written, calls = sorted(os.listdir(uri)), os.pwritev, itertools.count()

    def full(*args):
        if next(calls) >= after:
            raise OSError(number, os.strerror(number))
        return written(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(errors.StorageFullError) as caught:
            cloudckpt.save(filled(2), checkpoint_id=uri, config=direct)
    assert caught.value.uri.startswith(f"file://{uri}")
    assert sorted(os.listdir(uri)) == before
    assert load_step(uri, direct) == 1
