"""What terraform/aws/README.md says of buckets that lock, that demand conditions, or that expire.

Requests for Amazon's host pass a proxy and reach moto. moto keeps versions and denies the deletion
of locked ones, but locks no objects that were sent in parts, deletes nothing by age, and does not
look at conditions of policies: the proxy denies what they would, and the test deletes what would
expire.
"""

import uuid

import pytest
import torch

import cloudckpt
from cloudckpt import Config, RetryPolicy, S3Options
from cloudckpt.config import MIB
from cloudckpt.doctor import examine
from cloudckpt.errors import AccessDeniedError
from support.wire.faults import Reset, s3_error
from support.wire.proxy import FaultyProxy

AWS = Config(
    connections=4,
    part_size=5 * MIB,
    retry=RetryPolicy(attempts=3, base=0.01, cap=0.05, deadline=5.0),
    s3=S3Options(endpoint_url="http://s3.us-east-1.amazonaws.com", addressing_style="path"),
)
WRITES = ("PutObject", "CompleteMultipartUpload")


@pytest.fixture
def proxy(s3_url, monkeypatch):
    with FaultyProxy(s3_url) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # for boto3 itself
        yield proxy


def state(step, nbytes=6 * MIB):
    return {"weight": torch.full((nbytes // 4,), float(step)), "small": torch.ones(7), "step": step}


def save(uri, step, config=AWS):
    cloudckpt.save(state(step), checkpoint_id=uri, config=config)


def loaded_step(uri):
    found = state(0)
    cloudckpt.load(found, checkpoint_id=uri, config=AWS)
    assert torch.equal(found["weight"], state(found["step"])["weight"])
    return found["step"]


def keys(s3_client, bucket):
    listed = s3_client.list_objects_v2(Bucket=bucket).get("Contents", ())
    return {entry["Key"] for entry in listed}


# Object Lock


@pytest.fixture
def locked(s3_client):
    """A bucket whose objects can't be deleted for a day."""
    name = f"locked-{uuid.uuid4().hex[:12]}"
    s3_client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    retention = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    s3_client.put_object_lock_configuration(
        Bucket=name, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": retention}
    )
    return name


def test_a_locked_bucket_takes_checkpoints_and_their_replacements(proxy, locked, s3_client):
    uri = f"s3://{locked}/run"
    for step in (1, 2):
        save(uri, step)
        assert loaded_step(uri) == step
    versions = s3_client.list_object_versions(Bucket=locked)
    hidden = {marker["Key"] for marker in versions["DeleteMarkers"]}
    kept = [entry for entry in versions["Versions"] if not entry["IsLatest"]]
    assert hidden == {entry["Key"] for entry in kept} - {"run/.metadata"}
    assert "run/.metadata" in {entry["Key"] for entry in kept}
    [commit] = [entry for entry in kept if entry["Key"] == "run/.metadata"]
    place = {"Bucket": locked, "Key": "run/.metadata", "VersionId": commit["VersionId"]}
    with pytest.raises(s3_client.exceptions.ClientError, match="AccessDenied"):
        s3_client.delete_object(**place)


@pytest.mark.parametrize("operation", WRITES)
def test_a_lost_answer_makes_no_second_version_that_is_locked(proxy, locked, s3_client, operation):
    proxy.inject(Reset("answer"), operation=operation, times=2)
    save(f"s3://{locked}/run", 1)
    assert loaded_step(f"s3://{locked}/run") == 1
    versions = [entry["Key"] for entry in s3_client.list_object_versions(Bucket=locked)["Versions"]]
    assert len(versions) == len(set(versions))


# policies: https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes-enforce.html


def demand(proxy, *headers):
    """Denies what writes an object without one of these conditions, as the policies there do."""
    for operation in WRITES:
        proxy.inject(
            s3_error(403, "AccessDenied"),
            operation=operation,
            where=lambda request: not any(request.header(name) for name in headers),
        )


@pytest.mark.parametrize("demanded", [("If-None-Match",), ("If-None-Match", "If-Match")])
def test_a_bucket_may_demand_that_nothing_is_replaced(proxy, bucket, demanded):
    demand(proxy, *demanded)
    save(f"s3://{bucket}/run", 1)
    assert loaded_step(f"s3://{bucket}/run") == 1


def test_a_bucket_may_demand_a_condition_of_a_replacement(proxy, bucket):
    demand(proxy, "If-None-Match", "If-Match")
    for step in (1, 2):
        save(f"s3://{bucket}/run", step)
        assert loaded_step(f"s3://{bucket}/run") == step


def test_a_bucket_may_demand_conditions_of_runs_and_of_the_doctor(proxy, bucket, s3_client):
    demand(proxy, "If-None-Match", "If-Match")
    run = f"s3://{bucket}/run"
    for step in (1, 2):  # the second job replaces the claim of the first
        with cloudckpt.CheckpointManager(
            run,
            max_to_keep=1,
            asynchronous=False,
            preemption=cloudckpt.runs.Preemption(signals=()),
            checkpointer=cloudckpt.checkpointer.CheckpointerConfig(config=AWS),
        ) as manager:
            manager.restore(state(0))
            manager.save(step, state(step))
    assert loaded_step(f"{run}/step-2") == 2
    cloudckpt.sweep(run, config=AWS)
    found = examine(run, config=AWS, size=MIB)
    assert [one.check for one in found if one.outcome == "failed"] == ["checksums"]  # moto
    assert {key.split("/")[1] for key in keys(s3_client, bucket)} == {
        "step-2", ".cloudckpt-job.json",
    }  # fmt: skip


def test_a_replacement_that_a_policy_denies_changes_nothing(proxy, bucket, s3_client):
    demand(proxy, "If-None-Match")
    uri = f"s3://{bucket}/run"
    save(uri, 1)
    before = keys(s3_client, bucket)
    with pytest.raises(AccessDeniedError) as caught:
        save(uri, 2)
    assert caught.value.uri == f"{uri}/.metadata"
    assert keys(s3_client, bucket) == before
    assert loaded_step(uri) == 1


# expiration
