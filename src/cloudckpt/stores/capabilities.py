"""The features and limits of a store, as plain data; saves choose the sizes of parts by them."""

from __future__ import annotations

from dataclasses import dataclass

from cloudckpt.checksum import CRC32C, ChecksumAlgorithm

__all__ = ["Capabilities"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The features and limits of a store, as its documentation states them.

    Attributes:
        conditional_writes: Whether `put` honours ``if_version``, both empty and not empty: True or
            False where the vendor of this endpoint documents it, None where it must be tried.
        conditional_deletes: Whether ``if_version`` of ``delete`` is documented to be honoured in
            one request; otherwise the object's version is checked before the deletion.
        create_only: Whether an empty ``if_version`` of `put` and `complete_upload` is documented to
            prevent a repeated request from creating a second, billed version.
        min_part_size: The minimum size of an upload's parts in bytes; the last may be smaller.
        max_part_size: The maximum size of an upload's parts in bytes.
        max_parts: The maximum number of parts of an upload.
        max_put_size: The maximum size of an object that one `put` writes, in bytes.
        checksum: The checksum algorithm of uploads: the one that the store verifies, if any.
        verifies: Whether the checksum is sent and the store rejects mismatches, according to its
            vendor's documentation or the user.
        max_copy_size: The maximum size of an object that `copy` takes, in bytes; 0 if the store
            can't copy.
        copies_parts: Whether `copy_part` is supported, with the limits of other parts.
        equal_parts: Whether all parts of an upload but the last must have the same size.
    """

    conditional_writes: bool | None
    conditional_deletes: bool = False
    min_part_size: int
    max_part_size: int
    max_parts: int
    max_put_size: int
    checksum: ChecksumAlgorithm = CRC32C
    verifies: bool = False
    create_only: bool = False
    max_copy_size: int = 0
    copies_parts: bool = False
    equal_parts: bool = False
