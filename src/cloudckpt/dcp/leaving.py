"""What a rank's saving process records in the store if its trainer ends before the commit."""

from __future__ import annotations

from torch.distributed.checkpoint.planner import SavePlan

from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.written import Extents
from cloudckpt.dcp.global_plan import record_of
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.gc_pause import paused_gc

__all__ = ["Leaving"]


class Leaving:
    """Makes that record, once it is known where the items lie.

    Attributes:
        record: What this rank writes, as a record without locations, shared by saves of the same
            plan; empty if columns can't express it, None until it is needed.
    """

    def __init__(
        self,
        writer: CloudStorageWriter,
        plan: SavePlan,
        structure: Structure,
        *,
        save: str,
        rank: int,
        ranks: int,
        record: bytes | None = None,
    ) -> None:
        """
        Args:
            writer: Writes the checkpoint.
            plan: What this rank writes.
            structure: What flattening has lost of its state dict.
            save: The name of the save, see :class:`Pending`.
            rank: This rank.
            ranks: How many ranks there are.
            record: See above.
        """
        self.record = record
        self._writer, self._plan, self._structure = writer, plan, structure
        self._save, self._rank, self._ranks = save, rank, ranks

    def __call__(self, extents: Extents, references: tuple[WrittenObject, ...]) -> Pending | None:
        """The record; None if it can't be expressed.

        Args:
            extents: Where the items of the plan lie, in their order.
            references: The objects of other checkpoints that hold some items.
        """
        if self.record is None:
            with paused_gc():
                made = record_of(self._plan, self._structure, self._writer.checksum)
            self.record = made or b""
        if not self.record:
            return None
        return Pending(
            save=self._save,
            rank=self._rank,
            ranks=self._ranks,
            job=self._writer.claimed_by,
            attempt=self._writer.attempt,
            record=self.record,
            extents=extents.pack(),
            columns=len(extents.all_columns),
            notes=self._writer.noted,
            references=references,
            held=self._writer.held,
        )
