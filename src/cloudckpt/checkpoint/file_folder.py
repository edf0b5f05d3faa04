"""The names of the objects that store a folder of files, and the checksums of its list of files.

Some libraries write files to a folder with a temporary name, and commit them by renaming it. In a
store, a *manifest* in the folder with the final name says which object has the bytes of which file.
Until it is written, each file has a *record* in the temporary folder: an object that names the
object with the bytes of this file. docs/format.md has their contents, and
:mod:`cloudckpt.integrations.torch_checkpointing` reads and writes them. A manifest is in the folder
of the objects that it names, or above it: so a sweep finds the manifest from the key of any
leftover object.
"""

from __future__ import annotations

import re

from cloudckpt.checksum import CRC32C
from cloudckpt.errors import CheckpointCorruptError

__all__ = [
    "MANIFEST",
    "content_name",
    "drawn_part",
    "folder_of",
    "folders_above",
    "inside",
    "is_content_name",
    "is_record_name",
    "name_of_record",
    "record_name",
    "sealed",
    "unsealed",
]

MANIFEST = ".cloudckpt-files"
"""The name of the manifest, the object that makes a folder of files visible."""

_CONTENT = re.compile(r".+\.[0-9a-f]{16}\.cloudckpt", re.DOTALL)
_RECORD = re.compile(r"(.+)\.([0-9a-f]{16})\.cloudckpt-pending", re.DOTALL)


def content_name(name: str, attempt: str) -> str:
    """Returns the name of the object with a file's bytes.

    Args:
        name: The name or key of the file.
        attempt: Sixteen random hexadecimal digits.
    """
    return f"{name}.{attempt}.cloudckpt"


def record_name(name: str, job: str) -> str:
    """Returns the name of the record of a file that is not committed yet.

    The record is an object that names the object with the file's bytes.

    Args:
        name: The name or key of the file.
        job: Sixteen hexadecimal digits that all ranks of the job share, and no other job has.
    """
    return f"{name}.{job}.cloudckpt-pending"


def is_content_name(name: str) -> bool:
    """Returns whether a name or key has the form that :func:`content_name` makes."""
    return _CONTENT.fullmatch(name) is not None


def is_record_name(name: str) -> bool:
    """Returns whether a name or key has the form that :func:`record_name` makes."""
    return _RECORD.fullmatch(name) is not None


def name_of_record(name: str) -> tuple[str, str]:
    """Returns the file's name and the job, given the result of :func:`record_name`."""
    found = _RECORD.fullmatch(name)
    assert found is not None
    return found[1], found[2]


def inside(folder: str) -> str:
    """Returns the prefix of all keys in a folder; empty for the bucket itself."""
    return f"{folder}/" if folder else ""


def folder_of(key: str) -> str:
    """Returns the folder of a key, without a slash at its end; empty if the key has no slash."""
    return key.rpartition("/")[0]


def folders_above(key: str) -> list[str]:
    """Returns the folders that contain a key, the innermost first; the last, "", is the bucket."""
    parts = key.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]


def drawn_part(key: str) -> bytes:
    """Returns the sixteen digits in a result of :func:`content_name` or :func:`record_name`.

    These are the digits of the attempt or of the job, as ASCII bytes. They can be searched for in a
    manifest, which contains the digits of its job and of the objects that it names.
    """
    return key.split(".")[-2].encode()


def sealed(line: bytes) -> bytes:
    """Returns a line of JSON, followed by a line with its CRC32C."""
    line += b"\n"
    return line + f"{CRC32C.of(line):08x}\n".encode()


def unsealed(data: bytes | bytearray, uri: str) -> bytes:
    """Verifies the result of :func:`sealed`; returns its line of JSON, with the newline.

    Raises:
        CheckpointCorruptError: If the line does not match its checksum, or is cut off.
    """
    line, seal = bytes(data[:-9]), data[-9:]
    if len(data) < 10 or seal != f"{CRC32C.of(line):08x}\n".encode():
        raise CheckpointCorruptError(
            "the list of a checkpoint's files (manifest), or the entry of one file (record), does "
            "not match its checksum: restore the original object from a backup, or load an older "
            "checkpoint",
            uri=uri,
        )
    return line
