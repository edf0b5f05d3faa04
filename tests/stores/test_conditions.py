"""Conditions are tried at every endpoint whose vendor does not document them."""

import pytest

from cloudckpt.checkpoint.commit import conditions_work
from cloudckpt.config import RetryPolicy
from cloudckpt.errors import ConfigError
from cloudckpt.transfer.retry import Retrier
from support.dialects import resource


@pytest.fixture(params=["other", "minio", "aws", "r2", "azure", "google"])
def ignoring(request, server, open_s3, open_azure, open_gcs):
    """A store at a server that carries out every write, whatever its conditions are."""
    kind = request.param
    written = {"body": resource(size=0)} if kind == "google" else {"headers": {"ETag": '"tag"'}}
    deleted = {"status": 202 if kind == "azure" else 204}
    server.respond(lambda asked: server.Answer(**deleted if asked.method == "DELETE" else written))
    if kind == "azure":
        return open_azure(anonymous=True)
    return open_gcs() if kind == "google" else open_s3(dialect=kind, anonymous=True)


def test_a_server_that_ignores_conditions_is_refused_by_name_after_one_trial(ignoring, server):
    retrier = Retrier(RetryPolicy(deadline=1))
    for _ in range(2):
        with pytest.raises(ConfigError, match="ignores conditional writes") as caught:
            conditions_work(ignoring, "auto", "run/trial", retrier)
        assert caught.value.uri == ignoring.root
    asked = [request.method for request in server.requests]
    assert asked == [asked[0], asked[0], "DELETE"]  # the object, and a write that should fail


def test_who_knows_that_conditions_hold_says_so_and_nothing_is_tried(ignoring, server):
    assert conditions_work(ignoring, "on", "run/trial", Retrier(RetryPolicy(deadline=1)))
    assert server.requests == []
