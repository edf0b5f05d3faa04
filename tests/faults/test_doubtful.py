"""Saves of which the store has perhaps carried out a request that seemed to fail."""

import dataclasses
from urllib.parse import unquote

import pytest

import cloudckpt
from cloudckpt.errors import CommitUnknownError, ConnectionLostError, PreconditionFailedError
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from support.emulators import free_port
from support.wire.faults import Call, Reset, Respond, s3_error

from .refusals import GATEWAYS, AnswerFirst, Refusal
from .selection import everywhere, on
from .states import SMALL, filled, load_step
from .test_save import STEPS

FEW = ["envoy", "corporate proxy", "precondition"]  # of the gateways: passing, denying, lying


class TestDoubtfulCommits:
    @everywhere()
    def test_the_same_bytes_of_somebody_else_are_no_proof_of_a_commit(
        self, saved, store, proxy, shaky, direct
    ):
        uri = saved()
        key = f"{store.key_of(uri)}/.metadata"
        copied = Call(lambda request: store.put(key, store.get(key)))
        rules = [
            proxy.inject(fault, operation="PutObject", path="*/.metadata", times=1)
            for fault in (Reset("answer"), copied)
        ]
        with pytest.raises(CommitUnknownError):
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=shaky)
        assert [rule.injected for rule in rules] == [1, 1]
        assert load_step(uri, direct, SMALL) == 2  # nothing was deleted

    @everywhere()
    def test_a_commit_that_nobody_can_confirm_is_called_unknown_and_can_be_loaded(
        self, saved, proxy, shaky, direct
    ):
        uri = saved()
        proxy.inject(Reset("answer"), operation="PutObject", path="*/.metadata")
        # nor can anybody see it, behind the looks of the beginning and at what is replaced
        looks = [
            proxy.inject(Refusal("internal error"), operation=look, path="*/.metadata", skip=skip)
            for look, skip in (("GetObject", 2), ("HeadObject", 1))
        ]
        with pytest.raises(CommitUnknownError) as caught:
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=shaky)
        assert "check whether" in str(caught.value)
        assert any(look.injected for look in looks)
        assert load_step(uri, direct, SMALL) == 2

    @everywhere(gateway=FEW)
    @pytest.mark.parametrize("gateway", GATEWAYS)
    def test_a_commit_that_a_gateway_refuses_and_then_forwards_has_its_data(
        self, saved, store, proxy, shaky, direct, gateway
    ):
        """All tries are answered in the store's place, and reach it when the save has ended."""
        uri, kept = saved(), []
        fault = AnswerFirst(GATEWAYS[gateway], kept)
        proxy.inject(fault, operation="PutObject", path="*/.metadata")
        with pytest.raises(CommitUnknownError) as caught:
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=shaky)
        assert caught.value.cause
        assert load_step(uri, direct, SMALL) == 1
        statuses = [hop.forward().status for hop in kept]
        assert statuses[0] in (200, 201)
        assert statuses[1:] == [412] * (len(kept) - 1)
        assert load_step(uri, direct, SMALL) == 2

    @everywhere(gateway=["precondition"])
    @pytest.mark.parametrize("gateway", FEW)
    def test_a_commit_that_a_gateway_refuses_and_forwards_at_once_is_found_out(
        self, saved, store, proxy, shaky, direct, gateway
    ):
        uri = saved()
        fault = Respond(GATEWAYS[gateway], carry_out=True)
        proxy.inject(fault, operation="PutObject", path="*/.metadata")
        cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=shaky)
        assert load_step(uri, direct, SMALL) == 2
        store.assert_tidy()

    @everywhere()
    def test_a_commit_without_a_connection_leaves_no_trace(
        self, dialect, saved, store, proxy, shaky, direct, monkeypatch
    ):
        """No try has reached anybody, which is as certain as an answer of the store."""
        uri = saved()
        before = store.objects()
        http = open_store(CheckpointURI.parse(uri), shaky)._http
        send = http.send

        def refused(method, url, headers, body=(), progress=None, **others):
            if method in ("PUT", "POST") and ".metadata" in unquote(url):
                url = url.replace(proxy.url, f"http://127.0.0.1:{free_port()}")
            return send(method, url, headers, body, progress, **others)

        monkeypatch.setattr(http, "send", refused)
        with pytest.raises(ConnectionLostError):
            cloudckpt.save(filled(2, SMALL), checkpoint_id=uri, config=shaky)
        assert store.objects() == before


WRITES = {
    **{step: STEPS[step] for step in ("complete", "commit")},
    "whole": ("PutObject", "*/__0_0.*", SMALL, 0),
}
S3_REFUSALS = {
    "locked": (403, "AccessDenied"),  # Object Lock, as AWS answers
    "write-once": (400, "ObjectLocked"),  # as MinIO does
    "exists": (412, "PreconditionFailed"),
    "conflict": (409, "ConditionalRequestConflict"),
    "gone": (404, "NoSuchUpload"),
}


@pytest.mark.parametrize("checksum", ["on", "off"])
@pytest.mark.parametrize(
    ("step", "refusal"),
    [
        *(("complete", refusal) for refusal in S3_REFUSALS),
        *(("whole", "locked"), ("whole", "conflict"), ("commit", "exists")),
    ],
)
def test_a_write_whose_answer_was_lost_is_found_by_its_refused_repetition(
    store, proxy, shaky, direct, step, refusal, checksum
):
    operation, path, nbytes, _ = WRITES[step]
    uri, config = store.uri("run/new"), dataclasses.replace(shaky, checksum=checksum)
    proxy.inject(Reset("answer"), operation=operation, path=path, times=1)
    refused = proxy.inject(s3_error(*S3_REFUSALS[refusal]), operation=operation, path=path)
    cloudckpt.save(filled(1, nbytes), checkpoint_id=uri, config=config)
    assert refused.injected
    assert load_step(uri, direct, nbytes) == 1


@pytest.fixture
def as_azure(store, shaky):
    """Azurite is trusted as Azure is: data are written on the condition that none is there."""
    opened = open_store(CheckpointURI.parse(store.uri("run")), shaky)
    before = opened.capabilities
    opened.capabilities = dataclasses.replace(before, create_only=True)
    yield
    opened.capabilities = before


@on("azure")
@pytest.mark.usefixtures("as_azure")
@pytest.mark.parametrize("step", WRITES)
def test_a_write_that_arrives_twice_is_one_though_azurite_refuses_the_second(
    store, proxy, shaky, direct, step
):
    operation, path, nbytes, _ = WRITES[step]
    uri = store.uri("run/new")
    proxy.inject(Reset("answer"), operation=operation, path=path, times=1)
    cloudckpt.save(filled(1, nbytes), checkpoint_id=uri, config=shaky)
    assert load_step(uri, direct, nbytes) == 1
    tries = [
        exchange.carried_out
        for exchange in proxy.exchanges
        if exchange.request in proxy.requests(operation, path)
    ]
    assert tries == [201, 409]


@on("azure")
@pytest.mark.usefixtures("as_azure")
@pytest.mark.parametrize(("step", "size"), [("complete", 7), ("whole", 7), ("whole", None)])
def test_a_blob_of_somebody_else_is_not_taken_for_our_own(store, proxy, shaky, step, size):
    """Keys are random, so nobody else has them; who has put something there keeps it."""
    operation, path, nbytes, _ = WRITES[step]
    proxy.inject(Reset("request"), operation=operation, path=path, times=1)

    def intrude(request):
        _, _, key = request.path.split("/", 2)
        same = int(request.header("Content-Length"))
        store.put(unquote(key), b"x" * (same if size is None else size))

    intrusion = proxy.inject(Call(intrude), operation=operation, path=path, times=1)
    with pytest.raises(PreconditionFailedError, match="BlobAlreadyExists"):
        cloudckpt.save(filled(1, nbytes), checkpoint_id=store.uri("run/new"), config=shaky)
    assert intrusion.injected
