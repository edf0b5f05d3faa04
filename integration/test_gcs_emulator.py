"""What is special about gcp-storage-emulator, with what it lacks in front of it."""

import pytest
import requests

import cloudckpt
from cloudckpt import Config, GCSOptions, RetryPolicy
from cloudckpt.checkpoint.commit import conditions_work
from cloudckpt.errors import ConfigError
from cloudckpt.runs import find_leftovers
from cloudckpt.transfer.retry import Retrier
from dcp.values import assert_same, blank_like, numbered
from gcs_front import GcsFront
from support.emulators import gcs_emulator

pytestmark = pytest.mark.only_on("gcp-storage-emulator")
URI = "gs://alone/run/step-1"
MIB = 1024**2


@pytest.mark.parametrize("cloud", ["gcs"], indirect=True)
def test_that_it_ignores_preconditions_is_found_out(store, place):
    retrier = Retrier(RetryPolicy(attempts=1))
    with pytest.raises(ConfigError, match="ignores conditional writes"):
        conditions_work(store, "auto", f"{place.key}/probe", retrier)


@pytest.fixture(scope="module")
def config(needs):
    """Options for the emulator, with what it lacks."""
    needs("gcp-storage-emulator")
    with gcs_emulator() as emulator, GcsFront(emulator) as front:
        url = front.url
        requests.post(f"{url}/storage/v1/b", params={"project": "p"}, json={"name": "alone"})
        yield lambda **options: Config(
            conditional_writes="off",
            retry=RetryPolicy(attempts=2),
            gcs=GCSOptions(endpoint_url=url),
            **options,
        )


def state_of():
    return {"large": numbered(5 * MIB), "strided": numbered(3 * MIB, 2).T, "step": 7}


def test_objects_that_are_sent_whole_are_saved_loaded_and_swept(config):
    whole = config(part_size=5 * 1024 * MIB, memory_budget=512 * MIB)
    cloudckpt.save(state_of(), checkpoint_id=URI, config=whole)
    state = blank_like(state_of())
    cloudckpt.load(state, checkpoint_id=URI, config=whole)
    assert_same(state, state_of())
    assert not find_leftovers("gs://alone/run", older_than=0, config=whole).objects
