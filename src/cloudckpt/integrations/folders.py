"""Saves and loads the files of a local folder as items of a checkpoint.

Each item is a memory-mapped uint8 tensor of a file's bytes: sending it reads the file, and loading
into it writes the file.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable

import torch

from cloudckpt.checksum import CRC32C
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import ConfigError
from cloudckpt.transfer.memory import bytes_of

__all__ = ["chosen_for", "files_of", "part_unlike", "put_chosen", "room_for"]

logger = logging.getLogger("cloudckpt")

_OF_RANK = re.compile(r"cloudckpt_rank_(\d+)/(.+)", re.DOTALL)


def files_of(folder: str, meeting: Meeting) -> dict[str, torch.Tensor]:
    """Maps the files beneath a folder that this rank has to save; a collective call.

    Ranks on one machine see the same files; other machines have their own. Of several files with
    one name, that of the lowest rank is saved. The files are divided among the ranks that see them.

    Args:
        folder: The folder on each rank's disk.
        meeting: The meeting of the ranks that save.

    Returns:
        The content of each file as a uint8 tensor, by path in the folder.

    Raises:
        ConfigError: If no rank has a file in the folder.
        CloudCheckpointError: If a rank can't read its folder.
    """
    sizes = meeting.gathered(meeting.begin(lambda: _sizes(folder)))
    if not any(sizes):
        raise ConfigError(
            f"no files were written to {folder}, so there is nothing to save: check the "
            "callback or hook that writes them"
        )
    owners = _owners(sizes)
    return meeting.begin(
        lambda: {
            name: _mapped(os.path.join(folder, name), size)
            for name, size in sizes[meeting.rank].items()
            if owners[name] == meeting.rank
        }
    )


def room_for(folder: str, name: str, nbytes: int, uri: str) -> torch.Tensor:
    """Creates a file in a folder, and returns it as a mapped uint8 tensor to load an item into.

    Args:
        folder: The folder.
        name: The path of the file in the folder, as it was saved.
        nbytes: The size of the file in bytes.
        uri: The location of the checkpoint, for the error message.

    Raises:
        ConfigError: If ``name`` leads out of the folder.
    """
    path = os.path.normpath(os.path.join(folder, name))
    if not path.startswith(folder + os.sep):
        raise ConfigError(
            f"{name!r} is not the name of a file in a saved folder", uri=uri, item=name
        )
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if nbytes == 0:
        with open(path, "wb"):
            return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def part_unlike(folder: str, meeting: Meeting) -> None:
    """Moves files that differ between ranks into a subfolder named after the rank.

    Args:
        folder: A folder that only this rank writes to.
        meeting: The meeting of the ranks that save.

    Raises:
        CloudCheckpointError: If a rank can't read its folder.
    """

    def checksum(name: str, size: int) -> tuple[int, int]:
        content = _mapped(os.path.join(folder, name), size)  # unmapped when this returns
        return size, CRC32C.of(bytes_of(content))

    def checksums() -> dict[str, tuple[int, int]]:
        return {name: checksum(name, size) for name, size in _sizes(folder).items()}

    of_ranks = meeting.gathered(meeting.begin(checksums))

    def move() -> None:
        for name, own in of_ranks[meeting.rank].items():
            if any(found.get(name, own) != own for found in of_ranks):
                path = os.path.join(folder, f"cloudckpt_rank_{meeting.rank}", name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(os.path.join(folder, name), path)

    meeting.begin(move)


def chosen_for(names: Iterable[str], rank: int) -> list[str]:
    """Chooses the saved files that a rank gets back.

    These are all files that were equal on all ranks; and of those that differed, the rank's own, or
    that of the lowest rank if the rank has not saved one, which is logged.
    """
    by_name: dict[str, dict[int, str]] = {}
    chosen = []
    for name in names:
        of_rank = _OF_RANK.fullmatch(name)
        if of_rank is None:
            chosen.append(name)
        else:
            by_name.setdefault(of_rank[2], {})[int(of_rank[1])] = name
    for name, of_ranks in by_name.items():
        if rank not in of_ranks:
            logger.warning(
                "rank %d has not saved %s and gets the file of rank %d: the checkpoint has "
                "those of ranks %s",
                rank,
                name,
                min(of_ranks),
                " ".join(map(str, sorted(of_ranks))),
            )
        chosen.append(of_ranks.get(rank, of_ranks[min(of_ranks)]))
    return chosen


def put_chosen(folder: str) -> None:
    """Moves files out of the subfolders named after ranks, back to their original names."""
    for name in _sizes(folder):
        if (of_rank := _OF_RANK.fullmatch(name)) is not None:
            os.renames(os.path.join(folder, name), os.path.join(folder, of_rank[2]))


def _sizes(folder: str) -> dict[str, int]:
    """Returns the size in bytes of each file beneath a folder, by its path in the folder."""
    return {
        os.path.relpath(path, folder): os.path.getsize(path)
        for where, _, names in os.walk(folder)
        for path in (os.path.join(where, name) for name in names)
    }


def _owners(sizes: list[dict[str, int]]) -> dict[str, int]:
    """Assigns each file to a rank that has it in the size that the lowest rank sees, in turn."""
    seen_by: dict[str, list[int]] = {}
    for rank, files in enumerate(sizes):
        for name, size in files.items():
            ranks = seen_by.setdefault(name, [])
            if not ranks or sizes[ranks[0]][name] == size:
                ranks.append(rank)
    names = enumerate(sorted(seen_by))
    return {name: seen_by[name][index % len(seen_by[name])] for index, name in names}


def _mapped(path: str, size: int) -> torch.Tensor:
    """Maps a file into memory as a uint8 tensor."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
