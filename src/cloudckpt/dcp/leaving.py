"""What a rank's saving process is to tell the store if its trainer ends before the commit."""

from __future__ import annotations

from torch.distributed.checkpoint.planner import SavePlan

from cloudckpt.checkpoint.columns import raw_bytes
from cloudckpt.checkpoint.from_torch import NotInColumnsError, inventory_of_plan
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.written import Extents
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.gc_pause import paused_gc

__all__ = ["Leaving"]


class Leaving:
    """Makes it, when it is known where the items lie.

    Attributes:
        record: What this rank writes, as a record without places, which saves by the same plan have
            in common; empty if columns can't have it, and None if nobody has asked for it.
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
            writer: Writes to the place.
            plan: What this rank writes.
            structure: What flattening has lost of its state dict.
            save: The name of the save, see :class:`Pending`.
            rank: This one.
            ranks: How many there are.
            record: See above.
        """
        self.record = record
        self._writer, self._plan, self._structure = writer, plan, structure
        self._save, self._rank, self._ranks = save, rank, ranks

    def __call__(self, extents: Extents) -> Pending | None:
        """What is to be told; None if nothing can be.

        Args:
            extents: Where the items of the plan lie, in their order.
        """
        if self.record is None:
            self.record = self._made()
        if not self.record:
            return None
        return Pending(
            save=self._save,
            rank=self._rank,
            ranks=self._ranks,
            job=self._writer.claimed_by,
            record=self.record,
            extents=b"".join(map(raw_bytes, extents.columns)),
            notes=self._writer.noted,
        )

    def _made(self) -> bytes:
        try:
            with paused_gc():
                checksum = self._writer.checksum
                inventory, whole = inventory_of_plan(self._plan, self._structure, checksum)
                return Record.of(inventory, whole=whole).to_bytes()
        except (NotInColumnsError, KeyError, ValueError):
            return b""
