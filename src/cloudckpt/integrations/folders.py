"""Saves and loads the files of a local folder as items of a checkpoint.

Each item is a memory-mapped uint8 tensor of a file's bytes: sending it reads the file, and loading
into it writes the file.
"""

from __future__ import annotations

import os

import torch

from cloudckpt.checksum import CRC32C
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import ConfigError
from cloudckpt.transfer.memory import bytes_of

__all__ = ["files_of", "files_of_first", "room_for"]


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
    with open(path, "wb"):  # also shortens a file that is there
        pass
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def files_of_first(
    folder: str, meeting: Meeting
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Maps the files beneath a folder of each rank; a collective call.

    Args:
        folder: A folder that only this rank writes to.
        meeting: The meeting of the ranks that save.

    Returns:
        On the first rank its files, on the others none; and the files of this rank that the first
        rank lacks, or has with other content: as in :func:`files_of`.

    Raises:
        CloudCheckpointError: If a rank can't read its folder.
    """

    def mapped() -> dict[str, torch.Tensor]:
        sizes = _sizes(folder).items()
        return {name: _mapped(os.path.join(folder, name), size) for name, size in sizes}

    files = meeting.begin(mapped)
    checksums = {name: CRC32C.of(bytes_of(content)) for name, content in files.items()}
    of_first = meeting.from_first(checksums)
    own = {name: files[name] for name in files if of_first.get(name) != checksums[name]}
    return (files if meeting.rank == 0 else {}), own


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
