"""Files that a framework has written to a folder of the local disk, as items of a checkpoint.

Each is a tensor of its bytes, which is mapped, and read when it is sent; and written to when it is
loaded.
"""

from __future__ import annotations

import os

import torch

from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import ConfigError

__all__ = ["files_of", "room_for"]


def files_of(folder: str, meeting: Meeting) -> dict[str, torch.Tensor]:
    """What this rank has to save of the files beneath a folder; a collective call.

    Ranks of one machine see the same files, and others their own: of those of one name one is
    saved, and the ranks that see it share the work.

    Args:
        folder: On the disk of each rank.
        meeting: Of the ranks that save.

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
    """A new file, to load an item into.

    Args:
        folder: What it is to be beneath.
        name: Its path there, as somebody has saved it.
        nbytes: Its size.
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
    """The files beneath a folder, by their paths in it."""
    return {
        os.path.relpath(path, folder): os.path.getsize(path)
        for where, _, names in os.walk(folder)
        for path in (os.path.join(where, name) for name in names)
    }


def _owners(sizes: list[dict[str, int]]) -> dict[str, int]:
    """Which rank saves each file: in turn, those that see it as the first of them sees it."""
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
