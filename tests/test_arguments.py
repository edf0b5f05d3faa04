"""A keyword argument that does not exist is refused with the one that was meant."""

from functools import partial

import pytest

import cloudckpt

SAVE = partial(cloudckpt.save, {}, checkpoint_id="folder", no_dist=True)


@pytest.mark.parametrize(
    ("call", "unknown", "suggested"),
    [
        (SAVE, "thread_count", "connections"),
        (SAVE, "checkpoint_ids", "checkpoint_id"),
        (partial(cloudckpt.load, {}), "trust_pikle", "trust_pickle"),
        (partial(cloudckpt.async_save, {}), "plannr", "planner"),
        (partial(cloudckpt.CloudStorageWriter, "folder"), "single_file_per_rank", "leave it out"),
        (partial(cloudckpt.CloudStorageReader, "folder"), "confg", "config"),
        (partial(cloudckpt.CheckpointManager, "folder"), "max_to_kep", "max_to_keep"),
        (cloudckpt.Config, "conections", "connections"),
        (cloudckpt.S3Options, "endpoint", "endpoint_url"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_one_that_was_meant(call, unknown, suggested):
    with pytest.raises(TypeError) as refused:
        call(**{unknown: 1})
    assert f"'{unknown}'" in str(refused.value)
    assert suggested in str(refused.value)
