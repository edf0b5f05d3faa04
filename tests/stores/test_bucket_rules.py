"""What a bucket does by itself, as the doctor tells it."""

import json

import pytest
from dialects import error_xml

from cloudckpt.stores.origins import BucketRules


@pytest.fixture
def s3(s3_url, open_s3):
    """Opens buckets of a server that has rules for them."""
    return lambda bucket: open_s3(bucket, endpoint_url=s3_url, addressing_style="path")


def test_a_plain_bucket_of_s3_keeps_nothing_and_ends_no_uploads(s3, bucket) -> None:
    assert s3(bucket).rules("run/") == BucketRules()


def test_versions_retention_and_rules_of_s3_are_read(s3_client, s3) -> None:
    s3_client.create_bucket(Bucket="locked-bucket", ObjectLockEnabledForBucket=True)
    s3_client.put_object_lock_configuration(
        Bucket="locked-bucket",
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 30}},
        },
    )
    rules = [
        {
            "ID": prefix or "all",
            "Status": "Enabled",
            "Filter": {"Prefix": prefix},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
        }
        for prefix, days in (("", 7), ("run/", 3), ("other/", 1))
    ]
    s3_client.put_bucket_lifecycle_configuration(
        Bucket="locked-bucket", LifecycleConfiguration={"Rules": rules}
    )
    store = s3("locked-bucket")
    found = store.rules("run/")
    assert found.keeps == ("older versions", "everything for 30 days (object lock, COMPLIANCE)")
    assert (found.ends_uploads, store.rules("elsewhere/").ends_uploads) == (3, 7)


def test_what_may_not_be_read_is_told_and_no_failure(server, open_s3, open_gcs) -> None:
    server.respond(lambda request: server.Answer(403, body=error_xml("AccessDenied")))
    unread = open_s3().rules("run/").unread
    assert unread == ("versioning", "object lock", "lifecycle rules")
    assert len(open_gcs().rules("run/").unread) == 1


def test_versions_retention_and_rules_of_google_are_read(server, open_gcs) -> None:
    """https://cloud.google.com/storage/docs/json_api/v1/buckets"""
    resource = {
        "name": "bucket",
        "versioning": {"enabled": True},
        "retentionPolicy": {"retentionPeriod": "86400"},
        "softDeletePolicy": {"retentionDurationSeconds": "604800"},
        "lifecycle": {
            "rule": [
                {"action": {"type": "Delete"}, "condition": {"age": 1}},
                {
                    "action": {"type": "AbortIncompleteMultipartUpload"},
                    "condition": {"age": 2, "matchesPrefix": ["run/"]},
                },
                {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 9}},
            ]
        },
    }
    headers = {"Content-Type": "application/json"}
    server.respond(lambda request: server.Answer(200, headers, json.dumps(resource).encode()))
    store = open_gcs()
    found = store.rules("run/")
    assert found.keeps == (
        "older versions",
        "everything for 1 days (retention)",
        "what is deleted for 7 days (soft delete)",
    )
    assert (found.ends_uploads, store.rules("other/").ends_uploads) == (2, 9)


def test_holds_of_azure_are_read_and_its_blocks_end_after_a_week(server, open_azure) -> None:
    headers = {
        "ETag": '"0x1"',
        "Last-Modified": "Sat, 01 Aug 2026 00:00:00 GMT",
        "x-ms-has-immutability-policy": "true",
        "x-ms-has-legal-hold": "true",
    }
    server.respond(lambda request: server.Answer(200, headers))
    found = open_azure().rules("run/")
    assert [phrase.rpartition(" ")[2] for phrase in found.keeps] == ["policy", "hold"]
    assert found.ends_uploads == 7
