"""The manifest of a committed folder of files, and the records of files that are not committed yet.

Each describes the object with a file's bytes; docs/format.md has the bytes of both.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudckpt.checkpoint.file_folder import inside, sealed, unsealed
from cloudckpt.checkpoint.objects import checked
from cloudckpt.checksum import ALGORITHMS, Blocks, ChecksumAlgorithm
from cloudckpt.errors import CheckpointCorruptError

__all__ = [
    "MOST_MANIFEST_BYTES",
    "MOST_RECORD_BYTES",
    "FileManifest",
    "StoredFile",
    "beneath",
    "manifest_bytes",
    "read_manifest",
    "read_record",
    "record_bytes",
]

_MOST_BLOCKS = 1024  # of a file, each with a checksum: a manifest stays a few KiB per file

MOST_MANIFEST_BYTES = 1 << 28
MOST_RECORD_BYTES = 1 << 20


def beneath(folder: str, key: str) -> str:
    """Returns a key relative to a folder that contains it."""
    return key.removeprefix(inside(folder)) if key != folder else ""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """The object with a file's bytes, with their size and checksums.

    Attributes:
        key: The key of the object.
        size: Bytes of the file.
        checksum: The checksum of all bytes.
        blocks: The checksums of the bytes, block by block.
    """

    key: str
    size: int
    checksum: int
    blocks: Blocks

    @classmethod
    def of_blocks(
        cls,
        key: str,
        size: int,
        algorithm: ChecksumAlgorithm,
        block_size: int,
        checksums: tuple[int, ...],
    ) -> StoredFile:
        """Makes a stored file from checksums of blocks, joined until at most ``_MOST_BLOCKS`` are
        left.
        """
        lengths = _lengths(size, block_size)
        while len(checksums) > _MOST_BLOCKS:
            pairs = [*zip(checksums, lengths, strict=True)]
            checksums = tuple(
                algorithm.combine(pairs[at : at + 2]) for at in range(0, len(pairs), 2)
            )
            block_size *= 2
            lengths = _lengths(size, block_size)
        whole = algorithm.combine(zip(checksums, lengths, strict=True))
        return cls(
            key=key, size=size, checksum=whole, blocks=Blocks(algorithm, block_size, checksums)
        )

    def described(self, key: str) -> dict[str, Any]:
        """Returns the file as a JSON object that names its object ``key``."""
        algorithm = self.blocks.algorithm
        return {
            "object": key,
            "size": self.size,
            "checksum": f"{self.checksum:0{2 * algorithm.nbytes}x}",
            "algorithm": algorithm.name,
            "block_size": self.blocks.size,
            "blocks": base64.b64encode(algorithm.pack(self.blocks.checksums)).decode("ascii"),
        }


def _lengths(size: int, block: int) -> list[int]:
    whole, rest = divmod(size, block)
    return [block] * whole + ([rest] if rest else [])


@dataclass(frozen=True, kw_only=True)
class FileManifest:
    """The job and the files of a folder, as its manifest names them.

    Attributes:
        job: The job that committed the folder: sixteen hexadecimal digits.
        files: The files by their names, relative to the folder.
    """

    job: str
    files: Mapping[str, StoredFile]


def manifest_bytes(folder: str, manifest: FileManifest) -> bytes:
    """Returns the bytes of a manifest, with all names and objects relative to the folder.

    Args:
        folder: The folder's key, without a slash at its end.
        manifest: The contents of the manifest.
    """
    described = {
        name: file.described(beneath(folder, file.key))
        for name, file in sorted(manifest.files.items())
    }
    content = {"format": "cloudckpt files", "version": 1, "job": manifest.job, "files": described}
    return _sealed(content)


def read_manifest(data: bytes | bytearray, folder: str, uri: str) -> FileManifest:
    """Parses and verifies the bytes of a manifest.

    Args:
        data: The bytes of the manifest.
        folder: The key of the manifest's folder.
        uri: The manifest's URI, for messages.

    Raises:
        CheckpointCorruptError: If the bytes are damaged, invalid, or of a newer version.
    """
    below = inside(folder)
    content = _opened(data, "cloudckpt files", uri)
    files, job = content.get("files"), content.get("job")
    if not isinstance(files, dict) or not isinstance(job, str):
        raise CheckpointCorruptError(
            "invalid manifest: it lists no files or names no job; write the folder again, or "
            "load an older checkpoint",
            uri=uri,
        )
    read = {
        checked(name, uri): _file(below + checked(_text(described, "object"), uri), described, uri)
        for name, described in files.items()
    }
    return FileManifest(job=job, files=read)


def record_bytes(file: StoredFile) -> bytes:
    """Returns the bytes of a file's record."""
    described = file.described(file.key)
    return _sealed({"format": "cloudckpt file", "version": 1, **described})


def read_record(data: bytes | bytearray, uri: str) -> StoredFile:
    """Parses and verifies the bytes of a record; errors as of :func:`read_manifest`."""
    content = _opened(data, "cloudckpt file", uri)
    return _file(checked(_text(content, "object"), uri), content, uri)


def _sealed(content: dict[str, Any]) -> bytes:
    return sealed(json.dumps(content, separators=(",", ":")).encode())


def _opened(data: bytes | bytearray, kind: str, uri: str) -> dict[str, Any]:
    line = unsealed(data, uri)
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(
            "invalid manifest or record: it is not JSON; restore it, or load an older checkpoint",
            uri=uri,
            cause=error,
        ) from error
    if not isinstance(content, dict) or content.get("format") != kind:
        raise CheckpointCorruptError(
            f"invalid manifest or record: its format is not {kind!r}; restore it, or load an older "
            "checkpoint",
            uri=uri,
        )
    if content.get("version") != 1:
        raise CheckpointCorruptError(
            f"the manifest or record has version {content.get('version')!r}, which this "
            "cloudckpt can't read: install a newer one",
            uri=uri,
        )
    return content


def _text(described: object, name: str) -> object:
    return described.get(name) if isinstance(described, dict) else None


def _file(key: str, described: dict[str, Any], uri: str) -> StoredFile:
    try:
        algorithm = ALGORITHMS[described["algorithm"]]
        size, block_size = described["size"], described["block_size"]
        if type(size) is not int or type(block_size) is not int or size < 0 or block_size < 1:
            raise ValueError("the size of the file or of its blocks is not a number of bytes")
        packed = base64.b64decode(described["blocks"], validate=True)
        checksums = algorithm.unpack(packed)
        if len(checksums) != -(-size // block_size):
            raise ValueError("the file does not have as many blocks as its size says")
        lengths = _lengths(size, block_size)
        whole = algorithm.combine(zip(checksums, lengths, strict=True))
        if whole != int(described["checksum"], 16):
            raise ValueError("the checksum of the file does not match those of its blocks")
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise CheckpointCorruptError(
            f"invalid description of the file {key}: restore the manifest, or load an older "
            "checkpoint",
            uri=uri,
            cause=error,
        ) from error
    return StoredFile(
        key=key, size=size, checksum=whole, blocks=Blocks(algorithm, block_size, checksums)
    )
