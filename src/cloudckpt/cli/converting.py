"""Commands that write a checkpoint in another form."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.filesize import decimal as as_size

from cloudckpt import events
from cloudckpt.cli.app import Json, Quiet, app, print_json, safe
from cloudckpt.config import Config

if TYPE_CHECKING:
    from cloudckpt.format_utils import Kind

_FILES = frozenset({".bin", ".ckpt", ".pt", ".pth"})  # what files of torch.save are called
_NAMES: dict["Kind", str] = {"dcp": "checkpoint", "torch": "file of torch.save"}


_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


class To(str, Enum):
    """What is to be written."""

    dcp = "dcp"
    torch = "torch"


@app.command(rich_help_panel="Checkpoints")
def convert(
    source: Annotated[
        str, typer.Argument(help="A checkpoint, of cloudckpt or torch, or a file of torch.save.")
    ],
    target: Annotated[str, typer.Argument(help="Where to write.")],
    to: Annotated[
        Optional[To],  # noqa: UP045 - typer reads it, on Python 3.10 too
        typer.Option(
            help="A checkpoint (dcp) or a file of torch.save (torch); by default the "
            "other one, or what TARGET is named like."
        ),
    ] = None,
    overwrite: _Overwrite = False,
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle", help="Let pickles in SOURCE run any code; only if you trust it."
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn a file of torch.save into a checkpoint, or a checkpoint into a file or a new checkpoint.

    The content of SOURCE tells which of them it is. This needs memory for one copy of the state.
    TARGET appears when it is complete.
    """
    from cloudckpt import format_utils

    config = Config(overwrite=overwrite)
    found = format_utils.kind_of(source, config=config)
    wanted = _wanted(found, target, to)
    convert = {
        ("dcp", "dcp"): format_utils.dcp_to_dcp,
        ("dcp", "torch"): format_utils.dcp_to_torch_save,
        ("torch", "dcp"): format_utils.torch_save_to_dcp,
    }[found, wanted]
    if wanted == "dcp":
        _check_is_no_run(target, config)
    with _shown(not (quiet or as_json)):
        convert(source, target, config=config, trust_pickle=trust_pickle)
    if as_json:
        print_json({"source": source, "from": found, "target": target, "to": wanted})
    elif not quiet:
        print(f"{source} ({_NAMES[found]}) is now {target} ({_NAMES[wanted]})")


def _wanted(found: "Kind", target: str, to: Optional[To]) -> "Kind":  # noqa: UP045 - as above
    """What is to be written.

    Raises:
        typer.BadParameter: If nobody can tell.
    """
    suffix = PurePosixPath(target).suffix.lower()
    if found == "torch":
        if to is To.torch:
            raise typer.BadParameter("SOURCE is a file of torch.save already: copy it")
        if to is None and suffix == ".safetensors":
            raise typer.BadParameter(
                "a file of torch.save becomes a checkpoint; for a model, then export that "
                "(cloudckpt export), or give --to dcp"
            )
        return "dcp"
    if to is not None:
        return to.value
    if suffix in _FILES:
        return "torch"
    if suffix:
        raise typer.BadParameter(
            "SOURCE is a checkpoint, and TARGET may be another one or a file: give --to"
        )
    return "dcp"


@app.command(rich_help_panel="Checkpoints")
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, of cloudckpt or torch.")],
    target: Annotated[str, typer.Argument(help="The folder of the model.")],
    prefix: Annotated[
        str,
        typer.Option(
            help="Export only what is beneath this name, such as model, and drop the name."
        ),
    ] = "",
    max_shard_size: Annotated[
        str, typer.Option(help="Most bytes of tensors in a file: 5GB, 4GiB.")
    ] = "5GB",
    dtype: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option(help="What floating-point tensors become: bfloat16, float16, float32, ..."),
    ] = None,
    overwrite: _Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the tensors of a checkpoint as a model in safetensors files.

    Where the store can, it copies them itself. The model appears when all of it is there.
    """
    import torch

    from cloudckpt.hf import export_checkpoint

    kind = getattr(torch, dtype, None) if dtype else None
    if dtype and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise typer.BadParameter(f"torch has no floating-point type {dtype}", param_hint="--dtype")
    beneath = f"{prefix.rstrip('.')}." if prefix else ""

    def renamed(name: str) -> Optional[str]:  # noqa: UP045 - as above
        return name.removeprefix(beneath) if name.startswith(beneath) else None

    config = Config(overwrite=overwrite)
    _check_is_no_run(target, config)
    with _shown(not (quiet or as_json)):
        done = export_checkpoint(
            checkpoint,
            target,
            max_shard_size=max_shard_size,
            dtype=kind,
            key_mapping=renamed,
            config=config,
        )
    if as_json:
        print_json({"checkpoint": checkpoint, "target": target, **dataclasses.asdict(done)})
    elif not quiet:
        print(
            f"{checkpoint} is now the model {target}: {as_size(done.nbytes)} in "
            f"{len(done.files)} {'file' if len(done.files) == 1 else 'files'}, of which "
            f"{as_size(done.moved)} went through here" + _left_out(done.left_out)
        )


@app.command("import", rich_help_panel="Checkpoints")
def import_(
    source: Annotated[
        str, typer.Argument(help="A model in safetensors files: its folder, or one file.")
    ],
    checkpoint: Annotated[str, typer.Argument(help="Where to save.")],
    overwrite: _Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Save a model in safetensors files as a checkpoint.

    This needs memory for one copy of the model. The checkpoint appears when it is complete.
    """
    from cloudckpt.api import exists
    from cloudckpt.format_utils import dcp_to_dcp

    config = Config(overwrite=overwrite)
    if exists(source, config=config):
        raise typer.BadParameter("SOURCE is a checkpoint already: use cp, or convert")
    _check_is_no_run(checkpoint, config)
    with _shown(not (quiet or as_json)):
        metadata = dcp_to_dcp(source, checkpoint, config=config)
    count = len(metadata.state_dict_metadata)
    if as_json:
        print_json({"source": source, "checkpoint": checkpoint, "tensors": count})
    elif not quiet:
        print(f"{source} is now the checkpoint {checkpoint}, of {count} tensors")


def _check_is_no_run(target: str, config: Config) -> None:
    from cloudckpt.runs.catalog import check_is_no_run
    from cloudckpt.uri import CheckpointURI

    check_is_no_run(CheckpointURI.parse(target), config)


def _left_out(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"; left out: {', '.join(map(safe, names[:3]))}{more}"


@contextmanager
def _shown(progress: bool) -> Iterator[None]:
    bar = events.progress_bar() if progress else contextlib.nullcontext()
    with bar, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be here
        yield
