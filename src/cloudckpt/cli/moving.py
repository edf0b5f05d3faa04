"""Commands that read all bytes of a checkpoint: ``verify``, ``cp`` and ``unshare``."""

# no `from __future__ import annotations`: typer reads the annotations of functions

import dataclasses

import cloudckpt
from cloudckpt.cli.call import CHECKPOINTS, Call, command
from cloudckpt.cli.output import Size, progress_bar
from cloudckpt.cli.ranks import together
from cloudckpt.errors import CheckpointCorruptError


@command(CHECKPOINTS)
def verify(call: Call, checkpoint: str, *, ranks: bool | None = None) -> None:
    """Read all of a checkpoint and compare each block with its checksum.

    Lists every damaged range: item, object, the first byte and the one after the last, and what is
    wrong. Started by torchrun, the ranks divide the work.

    Args:
        call: As it was called.
        checkpoint: The checkpoint, e.g. s3://bucket/run/step-1000.
        ranks: Share the work with the other ranks of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
            [default: if torchrun has started the command]
    """
    with together(ranks) as joined:
        try:
            with progress_bar("verifying", shown=joined.speaks and call.talks) as progress:
                found = cloudckpt.verify(
                    checkpoint, config=call.config, process_group=joined.group, progress=progress
                )
        except CheckpointCorruptError as error:
            if joined.speaks:
                damages = [{"item": one.item, **dataclasses.asdict(one)} for one in error.damages]
                call.show(damages, {"checkpoint": checkpoint, "damages": damages})
            raise
        if joined.speaks:
            row = {
                "state": "intact" if found.has_checksums else "exists, without checksums",
                "items": found.items,
                "nbytes": Size(found.nbytes),
                "checkpoint": checkpoint,
            }
            call.show([row], {**row, "has_checksums": found.has_checksums, "damages": []})


@command(CHECKPOINTS, writes=True)
def cp(
    call: Call,
    source: str,
    target: str,
    *,
    overwrite: bool | None = None,
    step_name: str | None = None,
    ranks: bool | None = None,
) -> None:
    """Copy a checkpoint, or all of a run, to another place, within a cloud or across clouds.

    It is compared with its checksums on the way, and becomes visible when all of it is there. A
    checkpoint that is copied to a run goes beneath it. Started by torchrun, the ranks divide the
    checkpoints of a run.

    Args:
        call: As it was called.
        source: A checkpoint, or the folder of a run.
        target: Where to copy it.
        overwrite: Replace what is there. [default: as CLOUDCKPT_OVERWRITE says, else yes]
        step_name: Of a run, copy only checkpoints with such names, e.g. 'step-{step}'.
        ranks: Share the work with the other ranks of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
            [default: if torchrun has started the command]
    """
    config = call.having(overwrite)
    if call.dry_run:
        from cloudckpt.runs.copying import planned

        copies = planned(source, target, step_name=step_name, config=config)
        rows = [{"size": Size(size), "source": one, "target": to} for one, to, size in copies]
        call.done(rows, {"copies": rows})
        return
    with together(ranks) as joined:
        with progress_bar("copying", shown=joined.speaks and call.talks) as progress:
            copied = cloudckpt.copy(
                source,
                target,
                step_name=step_name,
                config=config,
                process_group=joined.group,
                progress=progress,
            )
        if joined.speaks:
            row = dataclasses.asdict(copied) | {"target": target}
            row |= {name: Size(row[name]) for name in ("nbytes", "by_store")}
            call.done([row], row)


@command(CHECKPOINTS, writes=True)
def unshare(call: Call, checkpoint: str) -> None:
    """Make a checkpoint self-contained that shares bytes with others of its run.

    What it shares is copied into its own folder.

    Args:
        call: As it was called.
        checkpoint: The checkpoint, e.g. s3://bucket/run/step-1000.
    """
    if call.dry_run:
        shared = sum(cloudckpt.inspect(checkpoint, config=call.config).shared.values())
        row = {"nbytes": Size(shared), "checkpoint": checkpoint}
        call.done([row], row)
        return
    with progress_bar("copying", shown=call.talks) as progress:
        copied = cloudckpt.runs.detach(checkpoint, config=call.config, progress=progress)
    state = "unshared" if copied.checkpoints else "already self-contained"
    row = {"state": state, "nbytes": Size(copied.nbytes), "checkpoint": checkpoint}
    call.done([row], row)
