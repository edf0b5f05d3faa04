"""How the ranks of a job tell its test what they have seen."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

from cloudckpt import events

Job = Callable[..., list[dict[str, Any]]]
"""Runs a script on some ranks, and returns what each has told."""


def die_in_save(name: str) -> None:
    """Has this rank be killed in the middle of a save: its data is sent, and nothing committed."""

    def listen(event: events.Event) -> None:
        if event.phase == "upload" and event.uri.endswith(f"/{name}"):
            os.kill(os.getpid(), signal.SIGKILL)

    events.subscribe(listen, progress=False)


def tell(**seen: Any) -> None:
    with open(f"{os.environ['RESULTS']}{os.environ['RANK']}", "w") as file:
        json.dump(seen, file)
