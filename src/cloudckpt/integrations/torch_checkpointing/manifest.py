"""The manifest of a committed folder of files, and the records of files that are not committed yet.

Both say which object holds the bytes of a file; docs/format.md specifies the two formats.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudckpt.checkpoint.file_folder import inside, sealed, unsealed
from cloudckpt.checkpoint.objects import checked
from cloudckpt.checksum import ALGORITHMS, Blocks, ChecksumAlgorithm
from cloudckpt.errors import CheckpointCorruptError

__all__ = [
    "BLOCK",
    "MOST_MANIFEST_BYTES",
    "MOST_RECORD_BYTES",
    "StoredFile",
    "beneath",
    "manifest_bytes",
    "read_manifest",
    "read_record",
    "record_bytes",
]

BLOCK = 1024 * 1024
"""Bytes of a block with one checksum, in files of up to 1 GiB."""
_MOST_BLOCKS = 1024  # of a file, so that a manifest stays a few KiB per file

MOST_MANIFEST_BYTES = 1 << 28
MOST_RECORD_BYTES = 1 << 20


def beneath(folder: str, key: str) -> str:
    """Returns a key relative to a folder that contains it; empty for the folder's own key."""
    return key.removeprefix(inside(folder)) if key != folder else ""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """The object that holds the bytes of a file.

    Attributes:
        key: The key of the object.
        size: Bytes of the file.
        blocks: The checksums of the bytes, block by block; None for a plain object, which another
            program has written.
    """

    key: str
    size: int
    blocks: Blocks | None

    @classmethod
    def of_blocks(
        cls, key: str, size: int, algorithm: ChecksumAlgorithm, checksums: tuple[int, ...]
    ) -> StoredFile:
        """Makes a file from its blocks' checksums, combined in pairs until at most 1,024 are left.

        Args:
            key: The key of the object.
            size: Bytes of the file.
            algorithm: The algorithm of the checksums.
            checksums: The checksum of each ``BLOCK`` bytes.
        """
        block = BLOCK
        while len(checksums) > _MOST_BLOCKS:
            pairs = [*zip(checksums, _lengths(size, block), strict=True)]
            starts = range(0, len(pairs), 2)
            checksums = tuple(algorithm.combine(pairs[at : at + 2]) for at in starts)
            block *= 2
        return cls(key=key, size=size, blocks=Blocks(algorithm, block, checksums))

    def described(self, key: str) -> dict[str, Any]:
        """Returns a JSON object that describes the file; ``key`` is the object's key in it."""
        assert self.blocks is not None
        algorithm = self.blocks.algorithm
        return {
            "object": key,
            "size": self.size,
            "checksum": f"{_whole(self.size, self.blocks):0{2 * algorithm.nbytes}x}",
            "algorithm": algorithm.name,
            "block_size": self.blocks.size,
            "blocks": base64.b64encode(algorithm.pack(self.blocks.checksums)).decode("ascii"),
        }


def _whole(size: int, blocks: Blocks) -> int:
    """Returns the checksum of all bytes of a file."""
    lengths = _lengths(size, blocks.size)
    return blocks.algorithm.combine(zip(blocks.checksums, lengths, strict=True))


def _lengths(size: int, block: int) -> list[int]:
    whole, rest = divmod(size, block)
    return [block] * whole + ([rest] if rest else [])


def manifest_bytes(folder: str, job: str, files: Mapping[str, StoredFile]) -> bytes:
    """Returns the bytes of a manifest, with all names and objects relative to the folder.

    Args:
        folder: The folder's key, without a slash at its end.
        job: The job that commits the folder: sixteen hexadecimal digits.
        files: The files by their names, relative to the folder.
    """
    described = {
        name: file.described(beneath(folder, file.key)) for name, file in sorted(files.items())
    }
    return _sealed({"format": "cloudckpt files", "version": 1, "job": job, "files": described})


def read_manifest(data: bytes | bytearray, folder: str, uri: str) -> dict[str, StoredFile]:
    """Parses and verifies the bytes of a manifest; returns the files by name.

    Args:
        data: The bytes of the manifest.
        folder: The key of the manifest's folder.
        uri: The manifest's URI, for messages.

    Raises:
        CheckpointCorruptError: If the bytes are damaged, invalid, or of a newer version.
    """
    files = _opened(data, "cloudckpt files", uri).get("files")
    if not isinstance(files, dict):
        raise _invalid("this object lists no saved files", uri)
    below = inside(folder)
    return {checked(name, uri): _file(below, described, uri) for name, described in files.items()}


def record_bytes(file: StoredFile) -> bytes:
    """Returns the bytes of a file's record."""
    described = file.described(file.key)
    return _sealed({"format": "cloudckpt file", "version": 1, **described})


def read_record(data: bytes | bytearray, uri: str) -> StoredFile:
    """Parses and verifies the bytes of a record; raises the errors of :func:`read_manifest`."""
    return _file("", _opened(data, "cloudckpt file", uri), uri)


def _sealed(content: dict[str, Any]) -> bytes:
    return sealed(json.dumps(content, separators=(",", ":")).encode())


def _opened(data: bytes | bytearray, expected: str, uri: str) -> dict[str, Any]:
    """Parses a manifest or a record, and checks its format and version."""
    line = unsealed(data, uri)
    try:
        content = json.loads(line)
        if content["format"] != expected:
            raise ValueError(f"the format is not {expected!r}")
        version = content["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _invalid("this is not what cloudckpt writes under this name", uri, error) from error
    if version != 1:
        raise CheckpointCorruptError(
            f"this description of saved files has version {version!r}, which this cloudckpt can't "
            "read: install a newer version of cloudckpt",
            uri=uri,
        )
    return dict(content)


def _invalid(what: str, uri: str, cause: Exception | None = None) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{what}: restore the original object from a backup, or load an older checkpoint",
        uri=uri,
        cause=cause,
    )


def _file(below: str, described: Any, uri: str) -> StoredFile:
    """Makes a file from its description, which names the object relative to the key ``below``."""
    try:
        algorithm = ALGORITHMS[described["algorithm"]]
        size, block_size = described["size"], described["block_size"]
        if type(size) is not int or type(block_size) is not int or size < 0 or block_size < 1:
            raise ValueError("the size of the file or of its blocks is not a number of bytes")
        checksums = algorithm.unpack(base64.b64decode(described["blocks"], validate=True))
        if len(checksums) != -(-size // block_size):
            raise ValueError("the number of checksums does not fit the size of the file")
        blocks = Blocks(algorithm, block_size, checksums)
        if _whole(size, blocks) != int(described["checksum"], 16):
            raise ValueError("the checksum of the file does not match those of its blocks")
        name = described["object"]
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid("this object describes a saved file incorrectly", uri, error) from error
    return StoredFile(key=below + checked(name, uri), size=size, blocks=blocks)
