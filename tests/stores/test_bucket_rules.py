"""What a bucket does by itself, as the doctor tells it."""

import json

import pytest

from cloudckpt import AzureOptions, Config, GCSOptions, S3Options
from cloudckpt.stores.azure import AzureStore
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.origins import BucketRules
from cloudckpt.stores.s3 import S3Store


def _s3_at(url: str) -> Config:
    return Config(s3=S3Options(endpoint_url=url, addressing_style="path"))


@pytest.fixture
def s3(bucket, s3_config):
    store = S3Store(bucket, s3_config)
    yield store
    store.close()


def test_a_plain_bucket_of_s3_keeps_nothing_and_ends_no_uploads(s3) -> None:
    assert s3.rules("run/") == BucketRules()


def test_versions_retention_and_rules_of_s3_are_read(s3_client, s3_config) -> None:
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
    store = S3Store("locked-bucket", s3_config)
    found = store.rules("run/")
    assert found.keeps == ("older versions", "everything for 30 days (object lock, COMPLIANCE)")
    assert (found.ends_uploads, store.rules("elsewhere/").ends_uploads) == (3, 7)
    store.close()


def test_what_may_not_be_read_is_told_and_no_failure(server) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    server.respond(lambda request: server.Answer(403, body=body))
    store = S3Store("bucket", _s3_at(server.url))
    assert store.rules("run/").unread == ("versioning", "object lock", "lifecycle rules")
    store.close()
    google = GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=server.url)))
    assert len(google.rules("run/").unread) == 1
    google.close()


def test_versions_retention_and_rules_of_google_are_read(server) -> None:
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
    store = GCSStore("bucket", Config(gcs=GCSOptions(endpoint_url=server.url)))
    found = store.rules("run/")
    assert found.keeps == (
        "older versions",
        "everything for 1 days (retention)",
        "what is deleted for 7 days (soft delete)",
    )
    assert (found.ends_uploads, store.rules("other/").ends_uploads) == (2, 9)
    store.close()


def test_holds_of_azure_are_read_and_its_blocks_end_after_a_week(server, monkeypatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", "c2VjcmV0")
    headers = {
        "ETag": '"0x1"',
        "Last-Modified": "Sat, 01 Aug 2026 00:00:00 GMT",
        "x-ms-has-immutability-policy": "true",
        "x-ms-has-legal-hold": "true",
    }
    server.respond(lambda request: server.Answer(200, headers))
    store = AzureStore(
        "container", Config(azure=AzureOptions(endpoint_url=server.url, account="account"))
    )
    found = store.rules("run/")
    assert [phrase.rpartition(" ")[2] for phrase in found.keeps] == ["policy", "hold"]
    assert found.ends_uploads == 7
    store.close()
