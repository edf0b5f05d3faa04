"""Saves and loads amid faults of all kinds at once: right, or refused by name."""

import logging

import pytest

import cloudckpt
from cloudckpt.errors import CheckpointCorruptError, CloudCheckpointError, CommitUnknownError
from faults import test_load, test_save
from faults.states import BIG, SMALL, filled, load_step
from support.wire.faults import Corrupt

DIALECTS = ["s3", "plain s3", "google", "azure"]
pytestmark = pytest.mark.parametrize("dialect", DIALECTS, indirect=True)


def _quick(faults):
    """Those that need no time limit to pass, and that every request may meet."""
    return {name: fault for name, fault in faults.items() if not {"stall", "200"} & {*name.split()}}


def inject(proxy, rng, steps, faults) -> str:
    """One to three faults of some requests; returns what they are."""
    told = []
    for _ in range(rng.randint(1, 3)):
        operation, path = rng.choice(steps)
        fault, skip, times = rng.choice(list(faults)), rng.randrange(3), rng.randint(1, 6)
        proxy.inject(faults[fault], operation=operation, path=path, skip=skip, times=times)
        told.append(f"{fault} of {operation} {path} behind {skip}, {times} times")
    return "; ".join(told)


@pytest.mark.parametrize("nbytes", [SMALL, BIG], ids=["small", "big"])
def test_a_save_leaves_its_own_step_or_the_last_one(
    store, proxy, shaky, direct, rng, rounds, nbytes
):
    uri, last = store.uri("run/latest"), 0
    steps = [(operation, path) for operation, path, *_ in test_save.STEPS.values()]
    cloudckpt.save(filled(0, nbytes), checkpoint_id=uri, config=direct)
    for step in rounds():
        story = inject(proxy, rng, steps, _quick(test_save.FAULTS))
        error = None
        try:
            config = shaky
            cloudckpt.save(filled(step, nbytes), checkpoint_id=uri, config=config)
        except CloudCheckpointError as exc:
            error = exc
        assert proxy.wait_idle(), story
        proxy.clear()
        found = load_step(uri, direct, nbytes)
        if error is None:
            assert found == step, story
        elif isinstance(error, CommitUnknownError):
            assert found in (last, step), story
        else:
            assert found == last, (story, error)
        last = found
    cloudckpt.save(filled(-2, nbytes), checkpoint_id=uri, config=direct)
    assert load_step(uri, direct, nbytes) == -2


def test_a_load_is_right_or_fails_by_name(store, proxy, shaky, direct, rng, rounds, caplog):
    caplog.set_level(logging.ERROR)  # what is tried again need not be kept
    uri = store.uri("run/latest")
    cloudckpt.save(filled(1), checkpoint_id=uri, config=direct)
    reads = [("GetObject", path) for path in test_load.READS.values()]
    faults = {**_quick(test_load.FAULTS), **{f"damage at {at}": Corrupt(at) for at in (0, 300)}}
    for _ in rounds():
        story = inject(proxy, rng, reads, faults)
        try:
            assert load_step(uri, shaky) == 1, story
        except CheckpointCorruptError:
            assert story.count("damage") > 0, story
        except CloudCheckpointError:
            pass
        proxy.clear()
        assert load_step(uri, direct) == 1, story
