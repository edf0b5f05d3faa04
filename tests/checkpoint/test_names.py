"""What objects are called, and that names from the bucket lead nowhere else."""

import pytest

from cloudckpt.checkpoint.objects import checked, data_name, is_drawn_name, probe_name, trial_name
from cloudckpt.errors import CheckpointCorruptError

DRAWN = "0123456789abcdef"
GOOD = ["__0_0.distcp", f"__0_0.{DRAWN}.distcp", ".metadata", ".conditions.ab", "a..b", "..."]
GOOD += ["folder/__0_0.distcp", "with spaces and ünïcode", f"../step-1/__0_0.{DRAWN}.distcp"]
BAD = ["", "..", ".", "../other/__0_0.distcp", "a/../../other", "a/./b", "a/..", "/etc/passwd"]
BAD += ["//bucket/key", "a//b", "a/", "a\x00b", "a\nb", "a\x7fb", "a\ud800b"]
BAD += [None, 7, b"__0_0.distcp", ["a"], f"../../__0_0.{DRAWN}.distcp"]


@pytest.mark.parametrize("name", GOOD)
def test_a_name_beneath_the_checkpoint_is_accepted(name):
    assert checked(name, "s3://bucket/run") == name


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_a_name_that_leads_elsewhere_or_is_no_text_is_refused(name):
    with pytest.raises(CheckpointCorruptError) as caught:
        checked(name, "s3://bucket/run")
    assert caught.value.uri == "s3://bucket/run"


@pytest.mark.parametrize(
    "name",
    [
        *(data_name(12, 3, DRAWN), trial_name(DRAWN)),
        *(probe_name("sweep", DRAWN), f"{probe_name('doctor', DRAWN)}.speed{DRAWN}"),
    ],
)
def test_names_that_were_drawn_are_known_and_those_of_others_are_not(name):
    assert is_drawn_name(name)
    for other in (f"{name}-gz", f"a{name}", name.replace(DRAWN, DRAWN[1:]), name.replace("a", "A")):
        assert not is_drawn_name(other)
