"""``python -m cloudckpt.run train.py …`` runs an unchanged script after :func:`cloudckpt.install`.

With torchrun, write the module in place of the script, which each rank then runs as usual::

    torchrun --nproc-per-node 8 -m cloudckpt.run train.py --folder s3://bucket/run
    torchrun --nproc-per-node 8 -m cloudckpt.run -m torchtitan.train --checkpoint.folder s3://…

In processes that the script forks, cloudckpt is installed as well; those that it spawns must import
``cloudckpt.auto``.
"""

from __future__ import annotations

import os
import runpy
import sys

__all__ = ["main"]

_USAGE = "usage: python -m cloudckpt.run (script.py | -m module) [argument ...]"


def main(arguments: list[str]) -> None:
    """Installs cloudckpt, and runs a script, or the module after ``-m``, with its arguments.

    Args:
        arguments: The script, or ``-m`` and the module; and its arguments.

    Raises:
        SystemExit: If there is no script or module.
    """
    is_module = arguments[:1] == ["-m"]
    command = arguments[1:] if is_module else arguments
    if not command or command[0].startswith("-"):
        raise SystemExit(_USAGE)
    import cloudckpt.auto  # noqa: F401 - which installs

    sys.argv = list(command)
    if is_module:  # sys.path begins with this folder, as with python -m
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.path.dirname(os.path.realpath(command[0]))
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
