"""Real frameworks, on moto as S3; `make integration-frameworks` has what they need."""

import json
import os
import signal
import urllib.request
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from launched import launched
from results import Job
from support.emulators import DUMMY_AWS, moto_server

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, so that no worker begins with one when the others have ended."""
    items.sort(key=lambda item: item.path.name not in ("test_ray.py", "test_torchtitan.py"))


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
    """What a job needs to reach an S3 that has a bucket."""
    with moto_server() as url:
        made = urllib.request.Request(f"{url}/frameworks", method="PUT")
        urllib.request.urlopen(made).close()
        here = {**DUMMY_AWS, "AWS_ENDPOINT_URL_S3": url, "OMP_NUM_THREADS": "1"}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in here.items():
                patch.setenv(name, value)
            yield dict(os.environ)


@pytest.fixture(autouse=True)
def nothing_local(tmp_path: Path) -> Iterator[None]:
    """No test leaves a local folder that is named as the scheme of a URI, nor do its jobs."""
    here = Path.cwd()
    yield
    assert not [*here.glob("s3:"), *tmp_path.rglob("s3:")]


@pytest.fixture
def run(environment: dict[str, str]) -> str:
    """The URI of a run that nobody else has."""
    return f"s3://frameworks/{uuid.uuid4().hex}"


@pytest.fixture
def job(environment: dict[str, str], tmp_path: Path) -> Job:
    """Runs a script of this folder on some ranks, each of which tells something at its end.

    Returns what they have told, in the order of ranks, but for those that are ``killed``. The
    working folder is empty, and it is the job's own: what is found there afterwards was written to
    the local disk.
    """

    def start(
        script: str, *arguments: object, ranks: int = 1, killed: Collection[int] = ()
    ) -> list[dict[str, Any]]:
        ended = launched(
            HERE / script,
            [str(argument) for argument in arguments],
            ranks=ranks,
            environment={**environment, "RESULTS": str(tmp_path / "results")},
            folder=_folder(tmp_path),
            timeout=240,
        )
        wrong = []
        for rank, (code, printed) in enumerate(ended):
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            if code != (-signal.SIGKILL if rank in killed else 0):
                wrong.append(f"rank {rank}: {how}\n{printed[-4000:]}")
        assert not wrong, "\n".join(wrong)
        left = [rank for rank in range(ranks) if rank not in killed]
        return [json.loads((tmp_path / f"results{rank}").read_text()) for rank in left]

    return start


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cwd"
    folder.mkdir(exist_ok=True)
    return folder
