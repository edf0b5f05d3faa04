"""A rank that is killed in the middle of a save: the last checkpoint stays, and nothing else shows.

The rank that is to die kills itself at a call of its store, so that the moment is the same in every
run and on every server.
"""

import signal
import time

import pytest

import cloudckpt
from cloudckpt.errors import CheckpointNotFoundError
from clouds import PART_SIZE
from support.forks import context
from victims import REFUSED, of_step, run

NBYTES = 2 * PART_SIZE + 1000  # of each rank: three parts
PATIENCE = 200.0  # seconds

MOMENTS = {
    "before anything is sent": ("create_upload", 0, ""),
    "between two parts": ("put_part", 1, ""),
    "before its upload is completed": ("complete_upload", 0, ""),
    "before the commit": ("put", 0, "/.metadata"),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Saves on two ranks, one of which may die; returns their exit codes."""

    def save(cloud, place, step, victim=None, moment=None):
        meeting = str(tmp_path_factory.mktemp("meeting") / "store")
        what = (place.uri, place.config, step, NBYTES)
        processes = []
        for rank in (0, 1):
            death = MOMENTS[moment] if rank == victim else None
            arguments = (dict(cloud.environment), rank, meeting, *what, death)
            processes.append(context.Process(target=run, args=arguments))
            processes[-1].start()
        deadline = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()  # one that is over already keeps its exit code
            process.join()
        return [process.exitcode for process in processes]

    return save


def step_at(place):
    """The one step that all of a checkpoint is of."""
    state = of_step(0, NBYTES)
    cloudckpt.load(state, checkpoint_id=place.uri, config=place.config)
    steps = {value for tensor in state.values() for value in tensor.unique().tolist()}
    assert len(steps) == 1, f"a mix of steps: {steps}"
    return steps.pop()


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        ("before anything is sent", 1),
        ("between two parts", 0),
        ("between two parts", 1),
        ("before its upload is completed", 1),
        ("before the commit", 0),
    ],
)
def test_a_killed_rank_leaves_the_last_checkpoint(cloud, place, two_ranks, moment, victim):
    assert two_ranks(cloud, place, 1) == [0, 0]
    codes = two_ranks(cloud, place, 2, victim, moment)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == REFUSED, "the other rank must be told"
    assert step_at(place) == 1
    assert two_ranks(cloud, place, 3) == [0, 0]
    assert step_at(place) == 3


@pytest.mark.parametrize("moment", ["between two parts", "before the commit"])
def test_a_killed_rank_leaves_no_half_of_a_new_checkpoint(cloud, place, two_ranks, moment):
    codes = two_ranks(cloud, place, 1, 0, moment)
    assert codes == [-signal.SIGKILL, REFUSED]
    assert ".metadata" not in cloud.names(place)
    with pytest.raises(CheckpointNotFoundError):
        step_at(place)
