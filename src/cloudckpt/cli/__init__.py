"""The command ``cloudckpt``: looks at runs and checkpoints, verifies them, and deletes them."""

# each adds its commands to the app, in the order of the help
from cloudckpt.cli import runs, looking, moving, converting, doctor  # noqa: I001
from cloudckpt.cli.app import main

__all__ = ["converting", "doctor", "looking", "main", "moving", "runs"]
