"""Commands that convert checkpoints: ``convert``, ``export`` and ``import``."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Literal

import typer

from cloudckpt import events
from cloudckpt.cli.call import CHECKPOINTS, Call, command
from cloudckpt.cli.output import Size
from cloudckpt.config import Config
from cloudckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from cloudckpt.uri import CheckpointURI

Kind = Literal["dcp", "torch"]

_FILES = frozenset({".bin", ".ckpt", ".pt", ".pth"})  # the usual extensions of torch.save files


@command(CHECKPOINTS, writes=True)
def convert(
    call: Call,
    source: str,
    target: str,
    *,
    to: Kind | None = None,
    overwrite: bool | None = None,
    trust_pickle: bool = False,
) -> None:
    """Convert a torch.save file to a checkpoint, or a checkpoint to a file or a new checkpoint.

    The content of SOURCE decides whether it is a checkpoint or a file. The command needs memory for
    one copy of the state. TARGET becomes visible when it is complete.

    Args:
        call: The options that all commands share.
        source: A checkpoint of cloudckpt or torch, or a torch.save file.
        target: Location of the checkpoint or file to write.
        to: Format of TARGET: a checkpoint (dcp) or a torch.save file (torch). [default: a
            checkpoint for a file; for a checkpoint, by the extension of TARGET]
        overwrite: Replace an existing target. [default: as CLOUDCKPT_OVERWRITE says, else yes]
        trust_pickle: Allow pickles in SOURCE to run code. Use it only for sources that you trust.
    """
    from cloudckpt import format_utils

    config = call.having(overwrite)
    source_kind = format_utils.kind_of(source, config=config)
    wanted = _wanted(source_kind, target, to)
    convert = {
        ("dcp", "dcp"): format_utils.dcp_to_dcp,
        ("dcp", "torch"): format_utils.dcp_to_torch_save,
        ("torch", "dcp"): format_utils.torch_save_to_dcp,
    }[source_kind, wanted]
    with _writing(call, target, config):
        if not call.dry_run:
            convert(source, target, config=config, trust_pickle=trust_pickle)
    row = {"from": source_kind, "to": wanted, "source": source, "target": target}
    call.done([row], row)


def _wanted(source_kind: Kind, target: str, to: Kind | None) -> Kind:
    """Returns whether to write a checkpoint (``dcp``) or a ``torch.save`` file (``torch``).

    Raises:
        typer.BadParameter: If neither ``to`` nor the name of the target decides, or a file would be
            converted to another file.
    """
    suffix = PurePosixPath(target).suffix.lower()
    if source_kind == to == "torch":
        raise typer.BadParameter("SOURCE is a torch.save file already: copy the file instead")
    if to is not None:
        return to
    if suffix == ".safetensors":
        raise typer.BadParameter(
            "convert writes no safetensors files: run cloudckpt export on the checkpoint (of a "
            "file of torch.save, make one by convert with --to dcp)"
        )
    if source_kind == "dcp" and suffix in _FILES:
        return "torch"
    if source_kind == "dcp" and suffix:
        raise typer.BadParameter(
            f"{suffix} names no kind of TARGET: give --to torch (a file) or --to dcp (a checkpoint)"
        )
    return "dcp"


@command(CHECKPOINTS, writes=True)
def export(
    call: Call,
    checkpoint: str,
    target: str,
    *,
    prefix: str = "",
    max_shard_size: str = "5GB",
    dtype: str | None = None,
    overwrite: bool | None = None,
) -> None:
    """Write the tensors of a checkpoint as a model in safetensors files.

    Within a cloud the store copies most bytes itself. The model becomes visible when it is
    complete.

    Args:
        call: The options that all commands share.
        checkpoint: A checkpoint of cloudckpt or torch.
        target: The folder of the model, e.g. s3://bucket/model.
        prefix: Export only tensors whose names begin with this prefix and a dot, e.g. model, and
            remove both from the names.
        max_shard_size: Maximum file size, e.g. 5GB or 4GiB.
        dtype: Convert floating-point tensors to this type, e.g. bfloat16. [default: no conversion]
        overwrite: Replace an existing target. [default: as CLOUDCKPT_OVERWRITE says, else yes]
    """
    import torch

    from cloudckpt.hf import export_checkpoint
    from cloudckpt.runs.contents import inspect

    torch_type = getattr(torch, dtype, None) if dtype else None
    if dtype and not (isinstance(torch_type, torch.dtype) and torch_type.is_floating_point):
        raise typer.BadParameter(
            f"torch has no floating-point type {dtype}: give a type such as bfloat16",
            param_hint="--dtype",
        )
    beneath = f"{prefix.rstrip('.')}." if prefix else ""

    def renamed(name: str) -> str | None:
        return name.removeprefix(beneath) if name.startswith(beneath) else None

    config = call.having(overwrite)
    with _writing(call, target, config):
        if call.dry_run:
            items = inspect(checkpoint, config=config).items
            chosen = [item for item in items if item.dtype and item.name.startswith(beneath)]
            nbytes = Size(sum(item.nbytes for item in chosen))
            row = {"tensors": len(chosen), "nbytes": nbytes, "target": target}
            call.done([row], row)
            return
        done = export_checkpoint(
            checkpoint,
            target,
            max_shard_size=max_shard_size,
            dtype=torch_type,
            key_mapping=renamed,
            config=config,
        )
    counts = {"files": len(done.files), "left_out": len(done.left_out)}
    row = counts | {"nbytes": Size(done.nbytes), "moved": Size(done.moved), "target": target}
    call.done([row], {"checkpoint": checkpoint, "target": target, **dataclasses.asdict(done)})


@command(CHECKPOINTS, "import", writes=True)
def import_(call: Call, source: str, checkpoint: str, *, overwrite: bool | None = None) -> None:
    """Save a model in safetensors files as a checkpoint.

    The command needs memory for one copy of the model. The checkpoint becomes visible when it is
    complete.

    Args:
        call: The options that all commands share.
        source: The folder of a model in safetensors files, or one such file.
        checkpoint: Location of the checkpoint to write, e.g. s3://bucket/run/step-0.
        overwrite: Replace an existing target. [default: as CLOUDCKPT_OVERWRITE says, else yes]
    """
    from cloudckpt.api import exists
    from cloudckpt.format_utils import dcp_to_dcp
    from cloudckpt.runs.contents import inspect

    config = call.having(overwrite)
    if exists(source, config=config):
        raise typer.BadParameter(
            "SOURCE is already a checkpoint: use cloudckpt cp, or cloudckpt convert"
        )
    with _writing(call, checkpoint, config):
        if call.dry_run:
            count = len(inspect(source, config=config).items)
        else:
            count = len(dcp_to_dcp(source, checkpoint, config=config).state_dict_metadata)
    row = {"tensors": count, "source": source, "checkpoint": checkpoint}
    call.done([row], row)


@contextmanager
def _writing(call: Call, target: str, config: Config) -> Iterator[None]:
    """Checks a target before the block writes to it, and shows progress during the block.

    Raises:
        ConfigError: If the target is the folder of a run.
        CheckpointExistsError: In a dry run, if the target exists and must not be replaced.
    """
    from cloudckpt.checkpoint.baseline import refuse_run
    from cloudckpt.format_utils import kind_of
    from cloudckpt.transfer.view import View

    refuse_run(View(CheckpointURI.parse(target), config), looks_inside=True)
    if call.dry_run and not config.overwrite:
        with contextlib.suppress(CheckpointNotFoundError):
            kind_of(target, config=config)
            raise CheckpointExistsError(
                "the target already exists, and overwrite is off: choose another target, or give "
                "--overwrite",
                uri=target,
            )
    bar = events.progress_bar() if call.shows_progress else contextlib.nullcontext()
    with bar, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be here
        yield
