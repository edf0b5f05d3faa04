"""Places to save to."""

import uuid
from collections.abc import Callable

import pytest

import cloudckpt
from cloudckpt import Config, RetryPolicy, S3Options

from .places import Place


@pytest.fixture(scope="session")
def places(s3_url: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Place]:
    """Makes places of a kind: ``local``, a new folder, or ``s3``, a new prefix.

    All prefixes are in one bucket: a process opens a bucket once, which takes it a while.
    """
    retry = RetryPolicy(attempts=4, base=0.01, cap=0.05, deadline=20.0)
    options = S3Options(endpoint_url=s3_url, addressing_style="path")
    remote = Place(
        f"s3://bucket-{uuid.uuid4().hex[:12]}",
        Config(connections=4, retry=retry, s3=options),
    )
    remote.client().create_bucket(Bucket=remote.uri.removeprefix("s3://"))

    def make(kind: str) -> Place:
        if kind == "s3":
            return remote.at(f"{uuid.uuid4().hex[:12]}/run")
        folder = tmp_path_factory.mktemp("run").as_uri()
        return Place(folder, Config(connections=4, retry=retry))

    return make


@pytest.fixture
def local(places) -> Place:
    """A new folder."""
    return places("local")


@pytest.fixture
def s3(places) -> Place:
    """A new prefix in a bucket."""
    return places("s3")


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, places) -> Place:
    """Both, one after the other."""
    return places(request.param)


@pytest.fixture
def installed(s3_config, monkeypatch):
    """Stock torch takes URIs; the options come from the environment."""
    monkeypatch.setenv("CLOUDCKPT_S3_ENDPOINT_URL", s3_config.s3.endpoint_url)
    monkeypatch.setenv("CLOUDCKPT_S3_ADDRESSING_STYLE", "path")
    cloudckpt.install()
    yield
    cloudckpt.uninstall()
