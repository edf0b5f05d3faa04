"""The command ``cloudckpt``: looks at runs and checkpoints, verifies them, and deletes them."""

from cloudckpt.cli import (
    converting,
    doctor,
    looking,
    moving,
    runs,
)  # each adds its commands to the app
from cloudckpt.cli.app import main

__all__ = ["converting", "doctor", "looking", "main", "moving", "runs"]
