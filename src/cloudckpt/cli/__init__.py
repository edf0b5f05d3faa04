"""The command ``cloudckpt``: lists, verifies, copies, converts and deletes checkpoints."""

# each module adds its commands to the app; the order is that of the help
from cloudckpt.cli import runs, looking, moving, converting, doctor  # noqa: I001
from cloudckpt.cli.app import main

__all__ = ["converting", "doctor", "looking", "main", "moving", "runs"]
