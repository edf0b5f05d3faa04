"""Files that a framework has written to a local folder, as items of a checkpoint.

Each item is a memory-mapped tensor of the file's bytes: read when sent, written when loaded.
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
    """This rank's share of the files beneath a folder; a collective call.

    Ranks on one machine see the same files, other machines have their own: of files with the same
    name one is saved, and the ranks that see it share the work.

    Args:
        folder: The folder on each rank's disk.
        meeting: The meeting of the ranks that save.

    Raises:
        ConfigError: If no rank has a file there.
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
    """Makes a new file to load an item into.

    Args:
        folder: The folder to put it beneath.
        name: Its path there, as it was saved.
        nbytes: Its size in bytes.
        uri: The checkpoint, for the error.

    Raises:
        ConfigError: If its name leads out of the folder.
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
    """Moves files that ranks have written unlike under one name to a name of each rank.

    Args:
        folder: A folder that only this rank writes to.
        meeting: The meeting of the ranks that save.

    Raises:
        CloudCheckpointError: If a rank can't read its folder.
    """

    def checksum(name: str, size: int) -> tuple[int, int]:
        content = _mapped(os.path.join(folder, name), size)  # is unmapped when this returns
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
    """The files that a rank gets: those of all, and its own, or the first rank's, of a name."""
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
    """Moves files of a rank to the names that they had when it wrote them."""
    for name in _sizes(folder):
        if (of_rank := _OF_RANK.fullmatch(name)) is not None:
            os.renames(os.path.join(folder, name), os.path.join(folder, of_rank[2]))


def _sizes(folder: str) -> dict[str, int]:
    """The sizes of the files beneath a folder, by path in it."""
    return {
        os.path.relpath(path, folder): os.path.getsize(path)
        for where, _, names in os.walk(folder)
        for path in (os.path.join(where, name) for name in names)
    }


def _owners(sizes: list[dict[str, int]]) -> dict[str, int]:
    """Which rank saves each file: in turn, the ranks that see the same file as the first one."""
    seen_by: dict[str, list[int]] = {}
    for rank, files in enumerate(sizes):
        for name, size in files.items():
            ranks = seen_by.setdefault(name, [])
            if not ranks or sizes[ranks[0]][name] == size:
                ranks.append(rank)
    names = enumerate(sorted(seen_by))
    return {name: seen_by[name][index % len(seen_by[name])] for index, name in names}


def _mapped(path: str, size: int) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
