"""Jobs of several ranks as torchrun starts them, forked from a process that has imported it all.

Importing torch and a framework takes a process ten seconds, and torchrun is one more of them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

__all__ = ["launched"]

_GRACE = 20.0  # seconds that other ranks have left once one has failed

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(  # those that are not there are left out
    [
        "boto3",
        "accelerate",
        "lightning.pytorch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "cloudckpt.stores.s3.store",
        "cloudckpt.integrations.fabric",
        "cloudckpt.integrations.transformers",
    ]
)


def launched(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    environment: Mapping[str, str],
    folder: Path,
    timeout: float,
) -> list[tuple[int, str]]:
    """Runs a script on some ranks, in a folder.

    Returns:
        How each rank has ended, and what it has printed; killed ones by the number of the signal,
        negative. When one has failed, the others are killed in a while.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    as_torchrun = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": script.stem,
    }
    processes, outputs = [], []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        outputs.append(folder.parent / f"output{rank}")
        surroundings = ({**environment, **as_torchrun, **own}, folder, outputs[-1])
        processes.append(_context.Process(target=_run, args=(surroundings, script, arguments)))
        processes[-1].start()
    try:
        deadline = time.monotonic() + timeout
        while any(one.exitcode is None for one in processes):
            alive = [one.sentinel for one in processes if one.exitcode is None]
            if not wait(alive, deadline - time.monotonic()):
                break
            if any(one.exitcode for one in processes):
                deadline = min(deadline, time.monotonic() + _GRACE)
    finally:
        for one in processes:
            one.kill()
            one.join()
    return [(one.exitcode, out.read_text()) for one, out in zip(processes, outputs, strict=True)]


def _run(
    surroundings: tuple[Mapping[str, str], Path, Path], script: Path, arguments: Sequence[str]
) -> None:
    environment, folder, output = surroundings
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with open(output, "wb", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
