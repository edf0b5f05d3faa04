"""What all tests share: clean surroundings, a real S3 server, and a pool of ranks."""

import os
import signal
import uuid
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from cloudckpt import Config, RetryPolicy, S3Options
from support.economy import (  # noqa: F401 - fixtures, a hook
    cheap_sessions_of_boto,
    memory_is_given_back,
    one_thread_of_torch,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_runtestloop,
)
from support.emulators import DUMMY_AWS, moto_server

collect_ignore = ["soak"]  # unless it is named

# examples are drawn by chance, but no machine is too slow for them; fixtures that they share are
# meant to be shared
settings.register_profile(
    "without a clock",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("without a clock")


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings() -> Iterator[None]:
    """No test sees the user's credentials, endpoints, proxies or options."""
    prefixes = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_", "CLOUDCKPT_", "HTTP", "http")
    before = dict(os.environ)
    for name in before:
        if name.startswith(prefixes):
            del os.environ[name]
    os.environ.update(DUMMY_AWS)
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heeded() -> None:
    """A script that starts the tests in the background has SIGINT ignored, for all of them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def request_size(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes this process asks for in a request."""
    from cloudckpt.transfer import parts

    return lambda nbytes: monkeypatch.setattr(parts, "_REQUESTS", (nbytes, nbytes))


@pytest.fixture(scope="session")
def ranks(_own_surroundings: None):
    """Up to four gloo ranks, see there."""
    from support.ranks import Ranks

    pool = Ranks(4)
    yield pool
    pool.kill()


@pytest.fixture(scope="session")
def s3_url(_own_surroundings: None) -> Iterator[str]:
    """The endpoint of a moto server in a process of its own."""
    with moto_server() as url:
        yield url


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    """Signs the certificates of servers at 127.0.0.1."""
    from support.authority import Authority

    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def s3_config(s3_url: str) -> Config:
    """Options that lead to the server, and that give up soon."""
    return Config(
        connections=4,
        retry=RetryPolicy(attempts=4, base=0.01, cap=0.05, deadline=20.0),
        s3=S3Options(endpoint_url=s3_url, addressing_style="path"),
    )


@pytest.fixture
def s3_client(s3_url: str):
    """boto3 on the server, to look at it without cloudckpt."""
    from dcp.places import boto_client

    return boto_client(s3_url)


@pytest.fixture
def bucket(s3_client) -> str:
    """A new bucket."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3_client.create_bucket(Bucket=name)
    return name
