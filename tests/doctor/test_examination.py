"""What the doctor finds, and that it leaves nothing behind and shows no credentials."""

from __future__ import annotations

import os
import signal
import time

import pytest

from cloudckpt import AzureOptions, Config, GCSOptions, RetryPolicy, S3Options, sweep
from cloudckpt.doctor import Finding, examine, surroundings, trials
from cloudckpt.errors import ConfigError, InvalidURIError
from cloudckpt.stores.s3.store import S3Store
from support.emulators import free_port
from support.forwarding import forward_proxy
from support.memory_store import MemoryStore
from support.stubs.gcs import GcsStub
from support.wire.faults import Stall, StripHeaders, s3_error
from support.wire.proxy import FaultyProxy

MIB = 1024 * 1024
DENIED = s3_error(403, "AccessDenied")
ELSEWHERE = s3_error(301, "PermanentRedirect", headers=(("x-amz-bucket-region", "eu-west-3"),))
BUSY = s3_error(503, "SlowDown", headers=(("Retry-After", "1"),))
NO_CONDITIONS = StripHeaders(("If-None-Match", "If-Match"))


@pytest.fixture
def end(s3_url, authority, monkeypatch):
    """A server of S3 that speaks TLS, and can be broken."""
    monkeypatch.setenv("AWS_CA_BUNDLE", authority.bundle)
    with FaultyProxy(s3_url, tls=authority.server()) as proxy:
        yield proxy


def config_of(url: str, **options) -> Config:
    s3 = S3Options(endpoint_url=url, addressing_style="path")
    return Config(
        s3=s3, **options, retry=RetryPolicy(attempts=2, base=0.01, cap=0.02, deadline=5.0)
    )


def examined(location, config=None, **options) -> dict[str, Finding]:
    found = examine(location, config=config, **{"size": MIB, **options})
    for one in found:
        assert one.advice or one.outcome in ("ok", "skipped"), one.found
    return {one.check: one for one in found}


def outcomes(found: dict[str, Finding], outcome: str) -> list[str]:
    return [name for name, one in found.items() if one.outcome == outcome]


def everything(s3_client, bucket) -> list[str]:
    keys = [one["Key"] for one in s3_client.list_objects_v2(Bucket=bucket).get("Contents", ())]
    uploads = s3_client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())
    return keys + [one["Key"] for one in uploads]


def test_a_store_that_works_is_found_to_work_and_nothing_is_left(end, bucket, s3_client) -> None:
    for operation in ("PutObject", "GetObject"):
        end.inject(BUSY, operation=operation, path="*.speed*", times=1)
    found = examined(f"s3://{bucket}/run", config_of(end.url))
    assert outcomes(found, "failed") == []
    assert outcomes(found, "skipped") == ["checksums"]  # none are sent to a store of one's own
    assert found["endpoint"].values["endpoint"] == end.url
    assert "AWS_REGION" in found["endpoint"].found
    speed = found["speed"]
    assert MIB / speed.values["up"] + MIB / speed.values["down"] < speed.seconds - 2  # the pauses
    assert abs(found["connection"].values["skew_seconds"]) < 60
    assert list(found)[-1] == "clean-up"
    assert everything(s3_client, bucket) == []


@pytest.mark.parametrize(
    ("operation", "check", "permission"),
    [
        ("ListObjects*", "list", "s3:ListBucket"),
        ("PutObject", "write", "s3:PutObject"),
        ("GetObject", "read", "s3:GetObject"),
        ("CreateMultipartUpload", "multipart", "s3:PutObject"),
        ("ListMultipartUploads", "multipart", "s3:ListBucketMultipartUploads"),
        ("AbortMultipartUpload", "multipart", "s3:AbortMultipartUpload"),
    ],
)
def test_a_missing_permission_is_named_and_the_rest_is_tried(
    end, bucket, operation, check, permission
) -> None:
    end.inject(DENIED, operation=operation)
    found = examined(f"s3://{bucket}/run", config_of(end.url))
    assert found[check].outcome == "failed"
    assert permission in found[check].advice
    assert "multipart" in found
    assert "connection" in outcomes(found, "ok")


def test_what_can_not_be_deleted_is_told_and_can_be_swept(end, bucket, s3_client) -> None:
    end.inject(DENIED, operation="DeleteObject")
    config = config_of(end.url)
    found = examined(f"s3://{bucket}/run", config)
    left = everything(s3_client, bucket)
    assert (left != [], found["clean-up"].outcome) == (True, "failed")
    assert all(f"s3://{bucket}/{key}" in found["clean-up"].found for key in left)
    assert f"s3://{bucket}/run/.cloudckpt-doctor." in found["clean-up"].advice
    end.clear()
    sweep(f"s3://{bucket}/run", older_than=-1.0, config=config)
    end.inject(DENIED, operation="*Object")  # what was not written need not be deleted
    assert examined(f"s3://{bucket}/run", config)["clean-up"].outcome == "ok"
    assert everything(s3_client, bucket) == []


@pytest.mark.parametrize(
    ("fault", "options", "check", "outcome", "advice"),
    [
        (NO_CONDITIONS, {}, "conditions", "failed", "_CONDITIONAL_WRITES=off"),
        (NO_CONDITIONS, {"conditional_writes": "off"}, "conditions", "warning", ""),
        (StripHeaders(("x-amz-meta-cloudckptattempt",)), {}, "read", "warning", ""),
        (StripHeaders(()), {"checksum": "on"}, "checksums", "failed", "_CHECKSUM=off"),  # by moto
        (ELSEWHERE, {}, "list", "warning", "AWS_REGION=eu-west-3"),
    ],
)
def test_a_store_that_ignores_what_it_is_sent_or_is_elsewhere_is_found_out(
    end, bucket, fault, options, check, outcome, advice
) -> None:
    end.inject(fault, skip=fault is ELSEWHERE, times=1 if fault is ELSEWHERE else None)
    found = examined(f"s3://{bucket}/run", config_of(end.url, **options))
    assert found[check].outcome == outcome
    assert advice in (found[check].advice or "")
    assert outcomes(found, "failed") == ([check] if outcome == "failed" else [])


def test_missing_credentials_are_named_and_nothing_is_tried(end, bucket, monkeypatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found = examined(f"s3://{bucket}/run", config_of(end.url))
    assert outcomes(found, "failed") == ["credentials"]
    assert "AWS_WEB_IDENTITY_TOKEN_FILE" in found["credentials"].found
    assert found["list"].outcome == "skipped"
    assert end.requests() == []


@pytest.mark.parametrize("code", ["NoSuchBucket", "ExpiredToken", "InvalidAccessKeyId"])
def test_where_nobody_is_let_in_the_reason_is_told_once(end, bucket, code) -> None:
    end.inject(s3_error(404 if code == "NoSuchBucket" else 403, code))
    found = examined(f"s3://{bucket}/run", config_of(end.url))
    assert outcomes(found, "failed") == ["list"]
    assert found["speed"].outcome == "skipped"
    assert "clean-up" not in found


def test_a_server_that_is_not_there_is_told_once_also_by_a_check_that_is_broken_off(bucket) -> None:
    config = config_of(f"http://127.0.0.1:{free_port()}")
    assert outcomes(examined(f"s3://{bucket}/run", config), "failed") == ["connection"]
    found = examined(f"s3://{bucket}/run", config, patience=0.3, read_only=True)
    assert ["refused" in found[name].found for name in outcomes(found, "failed")] == [True]


def test_a_certificate_that_is_not_trusted_is_named(end, bucket, monkeypatch) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE")
    found = examined(f"s3://{bucket}/run", config_of(end.url))
    assert outcomes(found, "failed") == ["connection"]
    assert "AWS_CA_BUNDLE" in found["connection"].found


@pytest.mark.parametrize(
    ("ahead", "outcome"), [(30, "ok"), (-300, "warning"), (3600, "failed"), (-3600, "failed")]
)
def test_a_clock_that_is_wrong_is_told(end, bucket, monkeypatch, ahead, outcome) -> None:
    class Clock:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def time() -> float:
            return time.time() + ahead

    monkeypatch.setattr(surroundings, "time", Clock)
    found = examined(f"s3://{bucket}/run", config_of(end.url), read_only=True)
    assert found["connection"].outcome == outcome
    assert abs(found["connection"].values["skew_seconds"] - ahead) <= 5


def test_a_check_that_hangs_is_broken_off_and_the_rest_goes_on(end, bucket, s3_client) -> None:
    end.inject(Stall("answer"), operation="CreateMultipartUpload", path="*.parts*")
    found = examined(f"s3://{bucket}/run", config_of(end.url), patience=8)
    assert outcomes(found, "failed") == ["multipart"]
    assert "not finished within 8 s" in found["multipart"].found
    assert found["speed"].outcome == "ok"
    assert everything(s3_client, bucket) == []  # also the uploads whose answers did not come


def test_an_interrupt_leaves_nothing(end, bucket, s3_client, monkeypatch) -> None:
    put_part, told = S3Store.put_part, []

    def interrupted(self, upload, number, *arguments, **options):
        part = put_part(self, upload, number, *arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return part

    monkeypatch.setattr(S3Store, "put_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        examine(f"s3://{bucket}/run", config=config_of(end.url), tell=told.append)
    assert everything(s3_client, bucket) == []
    assert (told[-1].check, told[-1].outcome) == ("clean-up", "ok")


def test_a_second_interrupt_tells_what_is_left(monkeypatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    told: list[Finding] = []
    monkeypatch.setattr(trials, "delete_each", interrupted)
    with pytest.raises(KeyboardInterrupt):
        examine("memory://twice/run", size=MIB, tell=told.append)
    assert told[-1].outcome == "failed"
    assert "memory://twice/run/.cloudckpt-doctor." in told[-1].advice


def test_reading_only_writes_nothing(end, bucket, s3_client) -> None:
    empty = examined(f"s3://{bucket}/run", config_of(end.url), read_only=True)
    assert outcomes(empty, "skipped") == ["read"]
    s3_client.put_object(Bucket=bucket, Key="run/somebody's", Body=b"x" * 10_000)
    found = examined(f"s3://{bucket}/run", config_of(end.url), read_only=True)
    assert outcomes(found, "ok") == list(found)
    assert "run/somebody's" in found["read"].found
    assert {request.method for request in end.requests()} <= {"GET", "HEAD"}


def test_a_limit_of_requests_is_no_finding() -> None:
    """Google lets nobody write an object more than once a second."""
    with GcsStub("bucket") as stub:
        stub.state.mutation_interval = 1.0
        options = GCSOptions(endpoint_url=stub.url)
        found = examined("gs://bucket/run", Config(gcs=options, checksum="on"))
        assert stub.state.keys("bucket") == []
    assert outcomes(found, "warning") == []
    assert outcomes(found, "failed") == []
    assert found["checksums"].outcome == "ok"


def test_a_local_folder_is_tried_and_not_left_behind(tmp_path) -> None:
    found = examined(tmp_path / "new" / "run")
    assert outcomes(found, "failed") == []
    assert list(tmp_path.iterdir()) == []


def test_a_location_or_an_option_that_is_not_valid_is_refused(monkeypatch) -> None:
    with pytest.raises(InvalidURIError, match="s3://bucket/run"):
        examine("s3:/bucket/run")
    with pytest.raises(ConfigError, match="size"):
        examine("memory://x/run", size=0)
    with pytest.raises(ConfigError, match="patience"):
        examine("memory://x/run", patience=0)
    monkeypatch.setenv("CLOUDCKPT_CONNECTIONS", "many")
    with pytest.raises(ConfigError, match="CLOUDCKPT_CONNECTIONS"):
        examine("memory://x/run")


def test_a_defect_hides_no_other_finding(monkeypatch) -> None:
    def defect(*arguments: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(MemoryStore, "list_uploads", defect)
    found = examined("memory://defect/run")
    assert "bug" in found["multipart"].advice
    assert found["speed"].outcome == "ok"


SECRET = "CANARY0wJalrXUtnFEMIK7MDENG"


def test_no_secret_of_aws_is_shown(end, bucket, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAPUBLIC0000000END")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"token-{SECRET}")
    end.inject(s3_error(403, "SignatureDoesNotMatch", f"AKIAPUBLIC0000000END {SECRET}"), skip=3)
    text = repr(examined(f"s3://{bucket}/run", config_of(end.url)))
    assert "access key …0END" in text
    assert "CANARY" not in text


def test_no_password_of_a_proxy_is_shown(end, bucket, monkeypatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{SECRET}@127.0.0.1:{free_port()}")
    text = repr(examined(f"s3://{bucket}/run", config_of(end.url)))
    assert "CANARY" not in text
    assert "proxy" in text


def test_no_key_or_signature_of_azure_is_shown(monkeypatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    config = Config(azure=AzureOptions(endpoint_url=url))
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=1&se=2020-01-01T00:00:00Z&sig={SECRET}")
    found = examined("az://container/run", config)
    assert "AZURE_STORAGE_SAS_TOKEN" in found["credentials"].found
    assert "expired" in found["credentials"].found
    monkeypatch.delenv("AZURE_STORAGE_SAS_TOKEN")
    monkeypatch.setenv("AZURE_STORAGE_KEY", f"{SECRET}=")
    keyed = examined("az://container/run", config)
    assert "CANARY" not in repr(found) + repr(keyed)


def test_a_proxy_on_the_way_is_told(end, bucket, monkeypatch) -> None:
    with forward_proxy() as forward:
        monkeypatch.setenv("HTTPS_PROXY", forward.url)
        found = examined(f"s3://{bucket}/run", config_of(end.url), read_only=True)
    assert "through a proxy" in found["connection"].found
    assert outcomes(found, "failed") == []
