"""Files that a framework has written to a local folder, as items of a checkpoint.

Each item is a memory-mapped tensor of the file's bytes: read when sent, written when loaded.
"""

from __future__ import annotations

import os

import torch

from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import ConfigError

__all__ = ["files_of", "room_for"]


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
        raise ConfigError(f"nothing was written to {folder}")
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
        raise ConfigError(f"{name!r} is no file of a folder", uri=uri, item=name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if nbytes == 0:
        with open(path, "wb"):
            return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


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
