"""What the directory of a file of ``torch.save`` says: where the bytes of its storages lie."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Collection, Mapping

from cloudckpt.errors import CheckpointCorruptError, CheckpointError

__all__ = ["storage_sizes"]

_ZIP = b"PK\3\4"
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # torch's magic, pickled
_HAS_DESCRIPTOR = 0x08  # flag of a record that has its sizes behind it
_MAX32 = 0xFFFFFFFF


def storage_sizes(file: io.RawIOBase, uri: str) -> Mapping[int, int] | None:
    """The size of each record, by the offset of its bytes in the file.

    Empty for files of torch before 2.7, where only ``torch.load`` can tell. None if the bytes of
    elements are not in the order of this machine, or may not be.

    Raises:
        CheckpointError: If the file is in the legacy format, or a TorchScript archive.
        CheckpointCorruptError: If it is truncated, damaged, or none of ``torch.save``.
    """
    head = file.read(len(_LEGACY)) or b""
    if not head.startswith(_ZIP):
        raise _foreign(head, uri)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
            directory = archive.start_dir
    except (zipfile.BadZipFile, zipfile.LargeZipFile, KeyError, ValueError) as exc:
        size = file.seek(0, io.SEEK_END)
        raise CheckpointCorruptError(
            f"the file is truncated or damaged: its {size} bytes do not end with the directory of "
            "a zip archive; copy it here again",
            uri=uri,
            cause=exc,
        ) from exc
    names = {entry.filename.partition("/")[2] for entry in entries}
    if "constants.pkl" in names:
        raise CheckpointError(
            "the file is a TorchScript archive, not a state: torch.jit.load a local copy and "
            "torch.save its state_dict()",
            uri=uri,
        )
    if "data.pkl" not in names:
        raise CheckpointCorruptError(
            "the file is a zip archive, but not one of torch.save", uri=uri
        )
    places = _places(entries, directory)
    if _byte_order(file, names, places) != sys.byteorder:
        return None
    if ".format_version" not in names:
        return {}
    return {start: size for start, size in places.values() if size}


def _foreign(head: bytes, uri: str) -> CheckpointError:
    if head.startswith(_LEGACY):
        return CheckpointError(
            "the file is in torch's legacy format, of before torch 1.6, which can't be read in "
            "parts: torch.load a local copy and torch.save it again",
            uri=uri,
        )
    return CheckpointCorruptError("the file is not one of torch.save", uri=uri)


def _places(entries: list[zipfile.ZipInfo], directory: int) -> dict[str, tuple[int, int]]:
    """Offset and size of each record that is stored as it is, and ends where the next begins."""
    places: dict[str, tuple[int, int]] = {}
    ends = [entry.header_offset for entry in entries[1:]] + [directory]
    for entry, end in zip(entries, ends, strict=True):
        if entry.compress_type == zipfile.ZIP_STORED:
            descriptor = 0
            if entry.flag_bits & _HAS_DESCRIPTOR:
                is_zip64 = max(entry.file_size, entry.header_offset) >= _MAX32
                descriptor = 24 if is_zip64 else 16
            name = entry.filename.partition("/")[2]
            places[name] = end - descriptor - entry.file_size, entry.file_size
    return places


def _byte_order(
    file: io.RawIOBase, names: Collection[str], places: Mapping[str, tuple[int, int]]
) -> str:
    """Read past zipfile, which refuses it where torch was told to compute no CRC-32."""
    if "byteorder" not in names:
        return "little"
    start, size = places.get("byteorder", (0, 0))
    if start < 0 or not 0 < size <= len("little"):
        return "unknown"
    file.seek(start)
    return bytes(file.read(size) or b"").decode("ascii", "replace")
