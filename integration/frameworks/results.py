"""How the ranks of a job tell its test what they have seen."""

import json
import os
from collections.abc import Callable
from typing import Any

Job = Callable[..., list[dict[str, Any]]]
"""Runs a script on some ranks, and returns what each has told."""


def tell(**seen: Any) -> None:
    with open(f"{os.environ['RESULTS']}{os.environ['RANK']}", "w") as file:
        json.dump(seen, file)
