"""Nothing is left behind in a bucket, and what is left is told."""

import uuid

import pytest
from azure.storage.blob import BlobBlock

from clouds import opened
from looks import S3Look


@pytest.mark.only_on("moto")
@pytest.mark.parametrize("cloud", ["s3"], indirect=True)
def test_old_versions_marks_and_open_uploads_are_left_until_they_are_removed(cloud):
    look = S3Look(f"bucket-{uuid.uuid4().hex[:12]}")
    bucket = {"Bucket": look._bucket}
    look.client.create_bucket(**bucket)
    look.client.put_bucket_versioning(**bucket, VersioningConfiguration={"Status": "Enabled"})
    look.put("run/a", b"1")
    look.put("run/a", b"2")
    look.client.delete_object(**bucket, Key="run/a")
    look.client.create_multipart_upload(**bucket, Key="run/b")
    assert look.keys("run/") == []
    assert len(look.left("run/")) == 4
    look.remove("run/")
    assert look.left("run/") == []


@pytest.mark.parametrize("cloud", ["azure"], indirect=True)
def test_blocks_that_were_never_committed_are_left_until_they_are_removed(cloud, place):
    keys = [f"{place.key}/{name}" for name in ("alone", "over a blob", "whole")]
    look = cloud.look
    look.put(keys[1], b"1")
    for key in keys:
        look.client.get_blob_client(key).stage_block("block", b"2")
    look.client.get_blob_client(keys[2]).commit_block_list([BlobBlock("block")])
    assert len(look.left(f"{place.key}/")) == 3
    look.remove(f"{place.key}/")
    assert look.left(f"{place.key}/") == []


@pytest.mark.only_on("moto")
def test_what_tests_leave_behind_fails_the_run(needs):
    needs("moto")
    with pytest.raises(AssertionError, match="left behind"), opened("s3") as cloud:
        cloud.look.put("of a test", b"data")
