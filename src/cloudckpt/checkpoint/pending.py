"""The object that a saving process leaves in the store if its trainer ends before the commit.

It is next to the data objects of its rank, and readers ignore it. At first it records the progress
of the process; at the end it has everything that a commit needs of this rank: the objects with
their checksums, and the location of each item in them. From the pending objects of all ranks, the
next job can commit the save (:mod:`cloudckpt.runs.adopting`).

Nothing here uses torch: the trainer encodes the plan and the record before the process sends.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt.checkpoint.objects import WrittenObject, check_attempt, check_folder
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import CheckpointCorruptError

__all__ = ["MOST_BYTES", "Pending"]

_MAGIC = b"cloudckpt-pending\0\2"  # its last byte is the version; a JSON document follows
_CRC = struct.Struct("<I")  # CRC32C of all bytes before it

MOST_BYTES = 1 << 28
"""Maximum bytes of a pending object that are read: enough for some million chunks."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """The content of a pending object: one rank's part of a save that a later job can commit.

    Attributes:
        save: A text that identifies the save: equal on all of its ranks, and different for every
            other save.
        rank: The rank.
        ranks: How many ranks there are.
        job: The random name of the job that has claimed the run: an object in the run names the
            only job that may write to it. Empty if no job has.
        attempt: The random name that this rank's writer has drawn; that of the coordinator becomes
            the random name of the checkpoint.
        plan: The rank's items: the bytes of a record (:mod:`~cloudckpt.checkpoint.record`) without
            locations.
        record: The locations of the items: the bytes of a record without a table and objects.
        notes: The notes for the checkpoint.
        copies: A number computed from the values that other ranks hold as well. If all ranks have
            equal values, the numbers of all ranks add up to 0, modulo 2**64.
        references: The objects of other checkpoints that hold some of the items; empty once
            ``objects`` includes them.
        held: On the coordinator, the folders of the checkpoints whose objects a mark of this save
            protects (:mod:`~cloudckpt.checkpoint.references`); empty on other ranks.
        sent: Bytes sent so far.
        objects: The rank's objects in the store, followed by the objects of other checkpoints that
            hold some of its items; None until the store has all of the rank's objects.
    """

    save: str
    rank: int
    ranks: int
    job: str
    attempt: str
    plan: bytes
    notes: bytes
    record: bytes = b""
    copies: int = 0
    references: tuple[WrittenObject, ...] = ()
    held: tuple[str, ...] = ()
    sent: int = 0
    objects: tuple[WrittenObject, ...] | None = None

    def so_far(self, sent: int) -> Pending:
        """Returns a copy with the number of bytes that were sent so far."""
        return dataclasses.replace(self, sent=sent)

    def finished(self, objects: Sequence[WrittenObject]) -> Pending:
        """Returns the content to leave once the store has all ``objects`` of this rank."""
        return dataclasses.replace(self, objects=(*objects, *self.references), references=())

    def to_bytes(self) -> bytes:
        """Returns the bytes of the pending object, for :meth:`parse`.

        They lack plan, record, notes and references until the store has all objects.
        """
        document = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        if self.objects is None:
            document |= {"plan": b"", "record": b"", "notes": b"", "references": ()}
        body = _MAGIC + json.dumps(document, default=_plain).encode()
        return body + _CRC.pack(CRC32C.of(body))

    @classmethod
    def parse(cls, data: bytes | bytearray, uri: str) -> Pending:
        """Parses the bytes of a pending object.

        Raises:
            CheckpointCorruptError: If they are damaged, or of a newer cloudckpt.
        """
        try:
            return _parse(bytes(data))
        except (ValueError, LookupError, TypeError, RecursionError, struct.error) as exc:
            raise CheckpointCorruptError(
                "the object that a saving process left for the next job can't be read: it is "
                "damaged, or a newer cloudckpt wrote it. To commit its save, install a newer "
                "cloudckpt; otherwise save again",
                uri=uri,
                cause=exc,
            ) from exc


def _plain(value: bytes | WrittenObject) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value.to_json()


def _parse(data: bytes) -> Pending:
    body, (crc,) = data[: -_CRC.size], _CRC.unpack(data[-_CRC.size :])
    if not body.startswith(_MAGIC) or CRC32C.of(body) != crc:
        raise ValueError(
            "invalid pending save: its version is unknown, or its checksum does not match"
        )
    document = json.loads(body[len(_MAGIC) :])
    for name in ("plan", "record", "notes"):
        document[name] = base64.b64decode(document[name], validate=True)
    for name in ("objects", "references"):
        if document[name] is not None:
            document[name] = tuple(map(WrittenObject.from_json, document[name]))
    for folder in document["held"]:
        check_folder(folder)
    made = Pending(**{**document, "held": tuple(document["held"])})
    numbers, texts = (made.rank, made.ranks, made.sent, made.copies), (made.save, made.job)
    if {*map(type, numbers)} != {int} or {*map(type, texts)} != {str}:
        raise ValueError("invalid pending save: a field has the wrong type")
    if made.attempt != "":
        check_attempt(made.attempt)
    if min(numbers) < 0 or made.rank >= made.ranks:
        raise ValueError("invalid pending save: a number is negative, or the rank too large")
    return made
