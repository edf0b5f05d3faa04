"""Writers that are killed at random moments, and before each system call of a writer to a disk."""

import pytest

import cloudckpt
from cloudckpt.errors import CheckpointNotFoundError
from faults.states import BIG, SMALL, filled, load_step
from faults.test_kills import Moment, killed_before, saved_until_killed

CALLS = 128
"""System calls that change the disk: those of some saves, one after the other."""

LANES = 4
dialects = pytest.mark.parametrize("dialect", ["s3", "plain s3", "google", "azure"], indirect=True)
sizes = pytest.mark.parametrize("nbytes", [SMALL, BIG], ids=["small", "big"])


def drawn(rng, nbytes: int) -> Moment:
    """Any request, at any moment of it."""
    moment = rng.choice(["request", "request", "answer"])
    return Moment("*", "*", rng.randrange(24), moment, rng.choice([0, rng.randrange(1, nbytes)]))


@dialects
@sizes
@pytest.mark.parametrize("in_background", [False, True], ids=["save", "background"])
def test_a_killed_writer_leaves_the_last_checkpoint_of_its_uri(
    store, proxy, endpoint, direct, rng, rounds, nbytes, in_background
):
    uri, step = store.uri("run/latest"), 0
    cloudckpt.save(filled(step, nbytes), checkpoint_id=uri, config=direct)
    for _ in rounds():
        moment = drawn(rng, nbytes)
        step += saved_until_killed(
            proxy, endpoint, moment, uri, step + 1, nbytes, in_background=in_background
        )
        assert load_step(uri, direct, nbytes) == step, moment
    cloudckpt.save(filled(step + 1, nbytes), checkpoint_id=uri, config=direct)
    assert load_step(uri, direct, nbytes) == step + 1


@dialects
@sizes
def test_a_killed_writer_leaves_no_half_of_a_new_checkpoint(
    store, proxy, endpoint, direct, rng, rounds, nbytes
):
    for number in rounds():
        uri, moment = store.uri(f"run-{number}/step-{{step}}"), drawn(rng, nbytes)
        done = saved_until_killed(proxy, endpoint, moment, uri, 1, nbytes)
        for there in range(1, done + 1):
            assert load_step(uri.format(step=there), direct, nbytes) == there, moment
        with pytest.raises(CheckpointNotFoundError):
            load_step(uri.format(step=done + 1), direct, nbytes)


@pytest.mark.parametrize("lane", range(LANES))
def test_a_writer_to_a_disk_that_is_killed_before_any_call_leaves_its_last_checkpoint(
    tmp_path, direct, lane
):
    for call in range(lane, CALLS, LANES):
        folder = tmp_path / str(call)
        folder.mkdir()
        killed_before(call, folder, direct)
