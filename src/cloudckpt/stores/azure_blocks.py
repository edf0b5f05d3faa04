"""The identifiers of blocks: those of one upload are like those of no other."""

from __future__ import annotations

import base64
import binascii

from cloudckpt.stores.base import Upload, random_suffix

__all__ = ["MAX_BLOCKS", "block_id", "upload_of"]

MAX_BLOCKS = 50_000
"""Of a blob: https://learn.microsoft.com/azure/storage/blobs/scalability-targets."""

_UPLOAD_ID = len(random_suffix())
_NUMBER = len(f"{MAX_BLOCKS}")


def block_id(upload: Upload, number: int) -> str:
    """All blocks of a blob must have identifiers of one length."""
    return base64.b64encode(f"{upload.id}{number:0{_NUMBER}}".encode("ascii")).decode("ascii")


def upload_of(block: str) -> str:
    """The upload that a block belongs to; one of another program is taken for an upload."""
    try:
        name = base64.b64decode(block).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return block
    return name[:_UPLOAD_ID] if len(name) == _UPLOAD_ID + _NUMBER else block
