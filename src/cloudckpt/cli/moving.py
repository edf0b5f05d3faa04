"""Commands that verify or copy the data of a checkpoint: verify, cp and unshare."""

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

    Lists every damaged range: item, object, what is wrong, its first byte, and the byte after its
    last. If torchrun starts the command, the ranks divide the work.

    Args:
        call: The options that all commands share.
        checkpoint: The checkpoint, e.g. s3://bucket/run/step-1000.
        ranks: Share the work with other ranks, as given by RANK, WORLD_SIZE, MASTER_ADDR and
            MASTER_PORT. [default: yes if torchrun has started the command, else no]
    """
    with together(ranks) as joined:
        try:
            with progress_bar("verifying", shown=joined.prints and call.shows_progress) as progress:
                verified = cloudckpt.verify(
                    checkpoint, config=call.config, process_group=joined.group, progress=progress
                )
        except CheckpointCorruptError as error:
            if joined.prints:
                damages = [
                    {"item": damage.item, **dataclasses.asdict(damage)} for damage in error.damages
                ]
                call.show(damages, {"checkpoint": checkpoint, "damages": damages})
            raise
        if joined.prints:
            row = {
                "state": "intact" if verified.has_checksums else "exists, without checksums",
                "items": verified.items,
                "nbytes": Size(verified.nbytes),
                "checkpoint": checkpoint,
            }
            call.show([row], {**row, "has_checksums": verified.has_checksums, "damages": []})


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
    """Copy a checkpoint or a whole run, within a cloud, across clouds, or from and to disks.

    The bytes are compared with their checksums, and a copy becomes visible when it is complete. A
    checkpoint that is copied to an existing run is put into it. If torchrun starts the command, the
    ranks divide the checkpoints of a run.

    Args:
        call: The options that all commands share.
        source: A checkpoint, or the folder of a run.
        target: Location of the copy; for a checkpoint also the folder of an existing run.
        overwrite: Replace an existing target. [default: as CLOUDCKPT_OVERWRITE says, else yes]
        step_name: Copy only checkpoints of a run whose folder names match this pattern, e.g.
            'step-{step}'. [default: all]
        ranks: Share the work with other ranks, as given by RANK, WORLD_SIZE, MASTER_ADDR and
            MASTER_PORT. [default: yes if torchrun has started the command, else no]
    """
    if call.dry_run:
        from cloudckpt.runs.copying import planned

        copies = planned(source, target, step_name=step_name, config=call.having(overwrite))
        rows = [{"size": Size(size), "source": origin, "target": to} for origin, to, size in copies]
        call.done(rows, {"copies": rows})
        return
    with together(ranks) as joined:
        with progress_bar("copying", shown=joined.prints and call.shows_progress) as progress:
            copied = cloudckpt.copy(
                source,
                target,
                overwrite=overwrite,
                step_name=step_name,
                config=call.config,
                process_group=joined.group,
                progress=progress,
            )
        if joined.prints:
            row = dataclasses.asdict(copied) | {"target": target}
            row |= {name: Size(row[name]) for name in ("nbytes", "by_store")}
            call.done([row], row)


@command(CHECKPOINTS, writes=True)
def unshare(call: Call, checkpoint: str) -> None:
    """Make a checkpoint independent of the other checkpoints of its run that share bytes with it.

    The shared data is copied into its own folder.

    Args:
        call: The options that all commands share.
        checkpoint: The checkpoint, e.g. s3://bucket/run/step-1000.
    """
    if call.dry_run:
        shared = sum(cloudckpt.inspect(checkpoint, config=call.config).shared.values())
        row = {"nbytes": Size(shared), "checkpoint": checkpoint}
        call.done([row], row)
        return
    with progress_bar("copying", shown=call.shows_progress) as progress:
        copied = cloudckpt.runs.detach(checkpoint, config=call.config, progress=progress)
    state = "unshared" if copied.checkpoints else "already self-contained"
    row = {"state": state, "nbytes": Size(copied.nbytes), "checkpoint": checkpoint}
    call.done([row], row)
