"""Buckets that are missing, closed or elsewhere, credentials that fail, and disks that are full."""

import errno
import logging
import os

import pytest

import cloudckpt
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    StorageFullError,
    WrongRegionError,
)
from support.wire.faults import Reset

from .dialects import AZURITE
from .refusals import Refusal
from .selection import everywhere, on
from .states import SMALL, filled, load_step

SECRET = "s3cr3t/KEY+of-this-test"
TOKEN = "t0k3n//of+this-session=="

# what the store answers -> the error, and what it tells the user to look at
REFUSALS = {
    "missing bucket": (BucketNotFoundError, "check its name"),
    "denied": (AccessDeniedError, "check the policies|Storage Blob Data Contributor"),
    "expired token": (CredentialsError, "renew them|does not accept these|has expired"),
    "unknown key": (CredentialsError, "does not accept these"),
    "wrong secret": (CredentialsError, "does not accept these|key belongs to another account"),
    "wrong clock": (CredentialsError, "clock"),
    "wrong region": (WrongRegionError, "AWS_REGION=eu-north-1"),
}

VERBS = {
    "save": lambda uri, config: cloudckpt.save(filled(1, SMALL), checkpoint_id=uri, config=config),
    "load": lambda uri, config: load_step(uri, config, SMALL),
}


@pytest.fixture
def secrets(dialect, monkeypatch):
    """Credentials that can be told apart from everything else; returns them."""
    if dialect == "azure":  # Azurite knows no others
        return (AZURITE.key, "sig=")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTHISTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    return (SECRET, TOKEN, "Signature=", "AWS4-HMAC-SHA256")


@pytest.fixture
def fresh(secrets, unshared):
    """Options of this test alone, so that its credentials are not those of another."""
    return unshared()


def assert_discreet(error: BaseException, caplog, secrets) -> None:
    """Neither the error and what is beneath it, nor our log at any level shows a secret."""
    texts = [record.getMessage() for record in caplog.records if record.name == "cloudckpt"]
    texts += [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    seen: BaseException | None = error
    while seen is not None:
        texts += [str(seen), repr(seen), repr(vars(seen))]
        seen = seen.__cause__ or seen.__context__
    for text in texts:
        for secret in secrets:
            assert secret not in text


class TestRefusals:
    # what each answer of a vendor means is asked of its store, in tests/stores
    @everywhere(refusal=["denied", "expired token", "wrong secret"])
    @pytest.mark.parametrize(
        ("verb", "refusal"),
        [
            *(("save", refusal) for refusal in REFUSALS),
            *(("load", refusal) for refusal in ("missing bucket", "denied", "expired token")),
        ],
    )
    def test_a_refusal_says_what_is_wrong_and_what_to_do(
        self, store, proxy, fresh, secrets, caplog, verb, refusal
    ):
        kind, advice = REFUSALS[refusal]
        proxy.inject(Refusal(refusal))
        uri = store.uri("run/refused")
        with caplog.at_level(logging.DEBUG), pytest.raises(kind, match=advice) as caught:
            VERBS[verb](uri, fresh)
        assert caught.value.uri.startswith(uri)
        assert caught.value.cause
        assert len(proxy.requests()) <= 4, "a refusal is not worth many tries"
        assert_discreet(caught.value, caplog, secrets)

    @everywhere(operation=["CompleteMultipartUpload"])
    @pytest.mark.parametrize(
        ("operation", "refusal"),
        [
            ("CreateMultipartUpload", "wrong region"),
            ("UploadPart", "expired token"),
            ("CompleteMultipartUpload", "denied"),
        ],
    )
    def test_a_refusal_in_the_middle_is_told_and_leaves_no_trace(
        self, store, proxy, fresh, direct, secrets, caplog, operation, refusal
    ):
        kind, advice = REFUSALS[refusal]
        uri = store.uri("run/refused")
        cloudckpt.save(filled(1), checkpoint_id=uri, config=direct)
        before = store.objects()
        proxy.inject(Refusal(refusal), operation=operation)
        with caplog.at_level(logging.DEBUG), pytest.raises(kind, match=advice) as caught:
            cloudckpt.save(filled(2), checkpoint_id=uri, config=fresh)
        assert caught.value.uri.startswith(uri)
        assert_discreet(caught.value, caplog, secrets)
        assert store.objects() == before
        assert store.uploads() == []
        assert load_step(uri, direct) == 1

    @on("s3")
    def test_a_save_and_a_load_follow_the_bucket_to_its_region(self, store, proxy, fresh, unshared):
        uri = store.uri("run/elsewhere")
        first = proxy.inject(Refusal("wrong region"), times=1)
        cloudckpt.save(filled(1), checkpoint_id=uri, config=fresh)
        second = proxy.inject(Refusal("wrong region"), times=1)
        assert load_step(uri, unshared()) == 1
        assert (first.injected, second.injected) == (1, 1)

    @everywhere()
    def test_a_bucket_that_does_not_exist_is_named_by_the_server(self, store, direct):
        uri = f"{store.root}-that-does-not-exist/run"
        with pytest.raises(BucketNotFoundError) as caught:
            cloudckpt.save(filled(1, SMALL), checkpoint_id=uri, config=direct)
        assert caught.value.uri.startswith(uri)
        with pytest.raises(BucketNotFoundError) as caught:
            load_step(uri, direct, SMALL)
        assert caught.value.uri.startswith(uri)

    @everywhere()
    def test_a_secret_in_a_failing_request_stays_secret(self, store, proxy, fresh, secrets, caplog):
        """Errors of the connection name host and port; what was sent they must not show."""
        proxy.inject(Reset("request"))
        with (
            caplog.at_level(logging.DEBUG),
            pytest.raises(cloudckpt.errors.ConnectionLostError) as caught,
        ):
            cloudckpt.save(filled(1, SMALL), checkpoint_id=store.uri("run"), config=fresh)
        assert_discreet(caught.value, caplog, secrets)


class TestFullDisks:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
    @pytest.mark.parametrize("after", [0, 3])
    def test_a_full_disk_is_told_and_leaves_the_old_checkpoint(
        self, tmp_path, direct, monkeypatch, number, after
    ):
        uri = str(tmp_path / "run")
        cloudckpt.save(filled(1), checkpoint_id=uri, config=direct)
        before = sorted(os.listdir(uri))
        written = os.pwritev
        calls = []

        def full(*args):
            calls.append(args)
            if len(calls) > after:
                raise OSError(number, os.strerror(number))
            return written(*args)

        monkeypatch.setattr(os, "pwritev", full)
        with pytest.raises(StorageFullError, match="free space") as caught:
            cloudckpt.save(filled(2), checkpoint_id=uri, config=direct)
        monkeypatch.undo()
        assert caught.value.uri.startswith(f"file://{uri}")
        assert sorted(os.listdir(uri)) == before
        assert load_step(uri, direct) == 1
