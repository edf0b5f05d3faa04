"""What a saving process logs: as much as the trainer would, and each event once."""

import logging

from cloudckpt.background.sender import forward_logs
from cloudckpt.events import Event, emit
from dcp.children import in_a_child


class Speaker:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    def send(self, kind: str, record: logging.LogRecord) -> None:
        self.sent.append((record.name, record.getMessage()))


def _forwarded(levels: dict[str, int]) -> list[tuple[str, str]]:
    speaker = Speaker()
    forward_logs(speaker, levels)
    logging.getLogger("cloudckpt").debug("a detail")
    logging.getLogger("other").debug("noise")
    logging.getLogger("other").warning("look")
    emit(Event(phase="upload", uri="s3://bucket/run", rank=0, began=1.0, seconds=2.0))
    return speaker.sent


def test_each_logger_has_its_level_of_the_trainer_which_alone_logs_events():
    found = in_a_child("fork", _forwarded, {"": logging.WARNING, "cloudckpt": logging.DEBUG})
    assert found == [("cloudckpt", "a detail"), ("other", "look")]
