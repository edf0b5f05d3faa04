"""Runs as they are found: what docs/runs.md says of each is held here.

Where another test holds it, it is named in the table there by what it does: a step that exists and
``max_to_keep=0`` in test_manager, a policy that demands conditions in
tests/terraform.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import replace

import pytest

import cloudckpt
from cloudckpt import Config
from cloudckpt.errors import AccessDeniedError, InvalidURIError
from cloudckpt.runs import prune, sweeping
from runs.managed import fill, managed, restored, save
from support import memory_store
from support.memory_store import MemoryStore
from support.wire.faults import s3_error
from support.wire.proxy import FaultyProxy

DENIED = s3_error(403, "AccessDenied")


def listed(run, config: Config | None = None, **options) -> list[tuple[str, bool]]:
    found = cloudckpt.list_checkpoints(str(run), config=config, **options)
    return [(one.uri.rpartition("/")[2], one.is_committed) for one in found]


# what strangers have put in between

STRANGE = [
    "logs/events",
    "what?/.metadata",
    "a#b/.metadata",
    "100%/x",
    "step-007/notes",
    "step--1/x",
]


def test_folders_of_strangers_are_passed_over_whatever_they_are_called(
    bucket, s3_client, s3_config
) -> None:
    run = f"s3://{bucket}/run"
    fill(run, 1, 2, config=s3_config)
    strange = [*STRANGE, "../x", "./x", "/x", "step-3", "step-4/"]  # that disks don't have
    for name in strange:
        s3_client.put_object(Bucket=bucket, Key=f"run/{name}", Body=b"mine")
    assert listed(run, s3_config) == [("step-1", True), ("step-2", True)]
    assert cloudckpt.latest(run, config=s3_config) == f"{run}/step-2"
    assert restored(run, s3_config) == (2, 2)
    assert prune(run, dry_run=True, max_to_keep=1, config=s3_config) == [f"{run}/step-1"]
    cloudckpt.delete(f"{run}/step-1", config=s3_config)
    assert cloudckpt.sweep(run, older_than=0, config=s3_config).objects == ()
    for name in strange:
        s3_client.head_object(Bucket=bucket, Key=f"run/{name}")  # is still there


# a clock that is wrong


@pytest.mark.parametrize("wrong_by", [-30 * 3600, 30 * 3600])
@pytest.mark.parametrize("whose", ["ours", "the store's"])
def test_a_clock_that_is_wrong_by_hours_changes_nothing(monkeypatch, whose, wrong_by) -> None:
    real = time.time
    store = MemoryStore(f"clock-{uuid.uuid4().hex}")
    run = f"{store.root}/run"

    class Clock:
        time = staticmethod(lambda: real() + wrong_by)

    if whose == "ours":
        monkeypatch.setattr(time, "time", Clock.time)
        Clock.time = staticmethod(real)
    monkeypatch.setattr(memory_store, "time", Clock)
    fill(run, 1, 2, 3, max_to_keep=2)
    leftover = "run/step-4/__0_0.0123456789abcdef.distcp"
    store.put(leftover, [memoryview(b"of a save under way")], checksum=0)
    assert cloudckpt.sweep(run).objects == ()  # it is young, by the clock that has written it
    assert listed(run) == [("step-2", True), ("step-3", True), ("step-4", False)]
    assert restored(run) == (3, 3)
    assert cloudckpt.sweep(run, older_than=-1.0).objects == (f"{store.root}/{leftover}",)


# what may not be deleted, or not be replaced


def test_under_a_policy_that_lets_nothing_be_replaced_or_deleted_a_job_goes_on(
    bucket, s3_url, s3_client, s3_config, caplog
) -> None:
    """As Google's retention policies and Azure's immutability."""
    run = f"s3://{bucket}/run"

    def is_there(request) -> bool:
        path = request.target.partition("?")[0].removeprefix(f"/{bucket}/")
        return "Contents" in s3_client.list_objects_v2(Bucket=bucket, Prefix=path)

    with FaultyProxy(s3_url) as proxy:
        s3 = replace(s3_config.s3, endpoint_url=proxy.url)
        config = replace(s3_config, s3=s3, conditional_writes="on")  # known, as on these two
        proxy.inject(DENIED, operation="DeleteObject")
        proxy.inject(DENIED, operation="PutObject", where=is_there)
        fill(run, 1, config=config, max_to_keep=1)
        fill(run, 2, 3, config=config, max_to_keep=1)  # the next job
        assert "would go unnoticed" in caplog.text
        assert restored(run, config) == (3, 3)
        with pytest.raises(AccessDeniedError, match=r"\.metadata"), managed(run, config) as manager:
            save(manager, 2, force=True)
        assert cloudckpt.verify(f"{run}/step-2", config=config).items == 2


@pytest.mark.parametrize("locked", [False, True])
def test_a_bucket_with_versions_or_a_lock_is_used_like_any_other(
    s3_client, s3_config, caplog, locked
) -> None:
    name = f"versions-{uuid.uuid4().hex[:12]}"
    s3_client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=locked)
    s3_client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    if locked:
        rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
        lock = {"ObjectLockEnabled": "Enabled", "Rule": rule}
        s3_client.put_object_lock_configuration(Bucket=name, ObjectLockConfiguration=lock)
    s3_config = replace(s3_config, checksum="on")  # locks demand one
    run = f"s3://{name}/run"
    fill(run, 1, 2, config=s3_config, max_to_keep=1)
    fill(run, 3, config=s3_config, max_to_keep=1)  # another job begins anew
    assert listed(run, s3_config) == [("step-2", True), ("step-3", True)]
    assert restored(run, s3_config) == (3, 3)
    fill(run, 1, config=s3_config)  # where a deleted one was
    assert listed(run, s3_config)[::2] == [("step-1", True), ("step-3", True)]
    cloudckpt.delete(f"{run}/step-1", config=s3_config)
    assert not cloudckpt.exists(f"{run}/step-1", config=s3_config)
    assert cloudckpt.sweep(run, older_than=0, config=s3_config).objects == ()
    kept = s3_client.list_object_versions(Bucket=name, Prefix="run/step-1/")["Versions"]
    assert len(kept) >= 2 * 2  # twice saved and deleted: their bytes are billed on
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# names

NAMES = [
    ("mein Lauf/Größe ü+%20&=é'\"<>", "step-{step}"),
    ("a+b,c;d=e@f!(g)*[h]{i}|~/モデル", "époque {step} (a)"),
]


@pytest.mark.parametrize(("name", "pattern"), NAMES)
def test_names_with_spaces_and_other_letters_live_a_whole_life(
    bucket, s3_client, s3_config, name, pattern
) -> None:
    run = f"s3://{bucket}/{name}"
    fill(run, 1, 2, 3, config=s3_config, step_name=pattern, max_to_keep=2)
    newest = pattern.format(step=3)
    found = {"config": s3_config, "step_name": pattern}
    assert listed(run, **found) == [(pattern.format(step=2), True), (newest, True)]
    assert cloudckpt.latest(run, **found) == f"{run}/{newest}"
    assert restored(run, s3_config, step_name=pattern) == (3, 3)
    assert cloudckpt.inspect(f"{run}/{newest}", config=s3_config).notes.metrics == {"loss": 1 / 4}
    assert cloudckpt.verify(f"{run}/{newest}", config=s3_config).items == 2
    cloudckpt.delete(f"{run}/{newest}", config=s3_config)
    cloudckpt.delete(f"{run}/{pattern.format(step=2)}", config=s3_config)
    keys = [one["Key"] for one in s3_client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys == [f"{name}/.cloudckpt-job.json"]


@pytest.mark.parametrize("name", ["run?", "run#1", "a//b", "a/../b", "tab\there"])
def test_a_name_that_no_location_has_is_refused(name) -> None:
    for look in (cloudckpt.list_checkpoints, cloudckpt.latest, sweeping.sweep, managed):
        with pytest.raises(InvalidURIError):
            look(f"s3://bucket/{name}")
