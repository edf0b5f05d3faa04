"""Save and load PyTorch distributed checkpoints straight to and from object stores.

>>> import cloudckpt
>>> cloudckpt.save(state_dict, checkpoint_id="s3://bucket/run/step-1000")  # doctest: +SKIP
>>> cloudckpt.load(state_dict, checkpoint_id="s3://bucket/run/step-1000")  # doctest: +SKIP

Public are the names in ``__all__`` of this package, and those in ``__all__`` of these modules:

- :mod:`cloudckpt.errors`: all exceptions
- :mod:`cloudckpt.checkpointer`: checkpointers, futures, stagers and hooks around the commit
- :mod:`cloudckpt.runs`: results of the functions that examine checkpoints; preemption
- :mod:`cloudckpt.hf`: models in safetensors files
- :mod:`cloudckpt.files`: single files of any kind
- :mod:`cloudckpt.format_utils`: conversion from and to files of ``torch.save``
- :mod:`cloudckpt.experimental`: torch's experimental checkpointers on URIs
- :mod:`cloudckpt.doctor`: checks of whether a location can be saved to and loaded from
- :mod:`cloudckpt.events`: events reported during saves and loads
- :mod:`cloudckpt.aio`: coroutines
- :mod:`cloudckpt.uri`: parsed locations
- :mod:`cloudckpt.integrations`: a module for each framework that the documentation names

and so are ``import cloudckpt.auto``, ``python -m cloudckpt.run`` and the command ``cloudckpt``.
Everything else is private, whether or not its name begins with an underscore: other modules, and
names of these modules that are not in their ``__all__``. It may change in any version.

Modules that need torch are imported on first use: a command that only lists a run starts in a
fraction of the time that importing torch takes. If torch was imported before, the modules for
saving are imported at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cloudckpt import errors, events
from cloudckpt._lazy import imported_later
from cloudckpt._version import __version__
from cloudckpt.config import (
    AzureOptions,
    BackgroundOptions,
    Config,
    GCSOptions,
    RetryPolicy,
    S3Options,
)

if TYPE_CHECKING:  # for readers and type checkers; at run time, names are imported on first use
    from cloudckpt import aio, format_utils, hf, integrations
    from cloudckpt.api import exists, load, save
    from cloudckpt.background.async_save import async_save
    from cloudckpt.dcp.content import PerRank, per_rank
    from cloudckpt.dcp.reader import CloudStorageReader
    from cloudckpt.dcp.report import LoadReport
    from cloudckpt.dcp.writer import CloudStorageWriter
    from cloudckpt.integrations.install import install, uninstall
    from cloudckpt.runs.catalog import latest, list_checkpoints
    from cloudckpt.runs.comparing import diff
    from cloudckpt.runs.contents import inspect
    from cloudckpt.runs.copying import copy
    from cloudckpt.runs.deleting import delete
    from cloudckpt.runs.manager import CheckpointManager
    from cloudckpt.runs.sweeping import sweep
    from cloudckpt.runs.verifying import verify
    from cloudckpt.runs.watching import watch

__all__ = [
    "AzureOptions",
    "BackgroundOptions",
    "CheckpointManager",
    "CloudStorageReader",
    "CloudStorageWriter",
    "Config",
    "GCSOptions",
    "LoadReport",
    "PerRank",
    "RetryPolicy",
    "S3Options",
    "__version__",
    "aio",
    "async_save",
    "copy",
    "delete",
    "diff",
    "errors",
    "events",
    "exists",
    "format_utils",
    "hf",
    "inspect",
    "install",
    "integrations",
    "latest",
    "list_checkpoints",
    "load",
    "per_rank",
    "save",
    "sweep",
    "uninstall",
    "verify",
    "watch",
]

if not TYPE_CHECKING:  # type checkers would otherwise accept any name
    __getattr__, __dir__ = imported_later(
        __name__,
        {
            "api": "exists load save",
            "background.async_save": "async_save",
            "dcp.content": "PerRank per_rank",
            "dcp.reader": "CloudStorageReader",
            "dcp.report": "LoadReport",
            "dcp.writer": "CloudStorageWriter",
            "integrations.install": "install uninstall",
            "runs.catalog": "latest list_checkpoints",
            "runs.comparing": "diff",
            "runs.contents": "inspect",
            "runs.copying": "copy",
            "runs.deleting": "delete",
            "runs.manager": "CheckpointManager",
            "runs.sweeping": "sweep",
            "runs.verifying": "verify",
            "runs.watching": "watch",
        },
        modules=[
            "aio",
            "checkpointer",
            "experimental",
            "files",
            "format_utils",
            "hf",
            "integrations",
            "runs",
            "uri",
        ],
    )

    if "torch" in sys.modules:  # a training job: its first save does not wait for imports
        __getattr__("async_save")
