"""Events reach the logger of torch's own checkpointing, as records of the same kind."""

import logging
import sys
import time

import pytest
import torch

import cloudckpt
from cloudckpt import events
from cloudckpt.checkpoint.torch_private import dcp_logger
from cloudckpt.config import S3Options

from .values import numbered

OURS = "cloudckpt."


class Notebook(logging.Handler):
    """As a platform team installs it: keeps what it is told, as it was at that time."""

    def __init__(self, fail_on: str | None = None) -> None:
        super().__init__()
        self.fail_on = fail_on
        self.records: list[logging.LogRecord] = []
        self.messages: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = dict(record.msg)  # torch goes on to change its dict
        if self.fail_on is not None and message["func_name"].startswith(self.fail_on):
            raise ArithmeticError("no room in the notebook")
        self.records.append(record)
        self.messages.append(message)

    def of(self, name: str) -> list[dict[str, object]]:
        return [message for message in self.messages if message["func_name"] == name]


@pytest.fixture
def notebook():
    handler = Notebook()
    dcp_logger().addHandler(handler)
    yield handler
    dcp_logger().removeHandler(handler)


def test_torchs_handlers_see_a_save_and_a_load_beside_torchs_own_records(place, notebook):
    began = time.time_ns()
    cloudckpt.save({"t": numbered(1000)}, checkpoint_id=place.uri, config=place.config)
    cloudckpt.load({"t": torch.zeros(1000)}, checkpoint_id=place.uri, config=place.config)
    ended = time.time_ns()
    names = [message["func_name"] for message in notebook.messages]
    assert [name for name in names if name.startswith(OURS)] == [
        f"{OURS}{phase}" for phase in ("plan", "upload", "commit", "load", "verify")
    ]
    assert (
        names.index("write_data") < names.index(f"{OURS}upload") < names.index("finish_checkpoint")
    )
    (upload,), (torchs,) = notebook.of(f"{OURS}upload"), notebook.of("write_data")[1:]
    assert upload["checkpoint_id"] == torchs["checkpoint_id"] == place.uri
    assert upload["event"] == torchs["event"] == "end"
    assert upload["local_rank"] == "0"
    assert upload["bytes"] >= 4000
    assert 0 < upload["times_spent"] <= torchs["times_spent"]
    assert began <= upload["time"] <= ended
    assert set(torchs) - set(upload) <= {"log_exceptions"}
    ours = [one for one in notebook.records if one.msg["func_name"].startswith(OURS)]
    assert {record.levelno for record in ours} == {logging.DEBUG}
    assert ours[1].cloudckpt_event.phase == "upload"


def test_no_record_holds_a_secret(s3, notebook, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIDENTITY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-key")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-session-token")
    options = S3Options(endpoint_url=s3.config.s3.endpoint_url, addressing_style="path", region="x")
    config = s3.having(s3=options).config  # a store of its own, which looks for credentials
    cloudckpt.save({"t": numbered(10)}, checkpoint_id=s3.uri, config=config)
    told = str(notebook.messages)
    assert f"{OURS}upload" in told
    assert not [word for word in ("AKIA", "secret", "token", "127.0.0.1") if word in told]


@pytest.mark.parametrize("missing", ["module", "name"])
def test_a_torch_that_keeps_its_logger_elsewhere_is_no_obstacle(missing, monkeypatch, caplog):
    name = "torch.distributed.checkpoint.logger"
    if missing == "module":
        monkeypatch.setitem(sys.modules, name, None)
    else:
        monkeypatch.delattr(sys.modules[name], "_dcp_logger")
    assert dcp_logger() is None
    event = events.Event(phase="upload", uri="memory://x/run", rank=0, began=time.time(), seconds=1)
    events.emit(event)
    assert caplog.text == ""
