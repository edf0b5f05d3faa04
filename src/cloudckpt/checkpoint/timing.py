"""What a save took on each rank, kept with the notes of its checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RankTiming", "SaveTiming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """What a rank did in a save; by its own clock, in seconds since 1970.

    Attributes:
        rank: Its number in the group that saved.
        began: When it began to plan.
        sending: When its first byte went out.
        sent: When the store had all of its data.
        nbytes: That it sent, repeated tries included.
    """

    rank: int
    began: float
    sending: float
    sent: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTiming:
    """What a save took, up to its commit.

    Attributes:
        ranks: Those whose data took longest, as many as there was room for; by their numbers.
        world: How many ranks have saved.
        committing: When the commit began: all data was in the store by then.
    """

    ranks: tuple[RankTiming, ...]
    world: int
    committing: float

    @property
    def began(self) -> float:
        """When the first of them began."""
        return min((one.began for one in self.ranks), default=self.committing)

    @classmethod
    def of(cls, ranks: Sequence[RankTiming], committing: float) -> SaveTiming:
        """That of all ranks."""
        return cls(ranks=tuple(ranks), world=len(ranks), committing=committing)

    def to_json(self, most: int) -> bytes:
        """At most so many bytes: the slowest ranks are kept if there are more; else none.

        Times are milliseconds since the first rank began.
        """
        began = self.began

        def since(moment: float) -> int:
            return round((moment - began) * 1000)

        rows = {
            one.rank: json.dumps(
                [one.rank, since(one.began), since(one.sending), since(one.sent), one.nbytes],
                separators=(",", ":"),
            )
            for one in sorted(self.ranks, key=lambda one: one.sent, reverse=True)
        }
        head = f'{{"began":{began:.3f},"commit":{since(self.committing)},"world":{self.world}'
        room = most - len(head) - len(',"ranks":[]}')
        if room < 0:
            return b""
        kept = sorted(_fitting(rows, room))
        return f'{head},"ranks":[{",".join(rows[rank] for rank in kept)}]}}'.encode()

    @classmethod
    def from_json(cls, document: Any) -> SaveTiming:
        """Reads it.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: If it is none.
        """
        origin = _number(document["began"])
        ranks = []
        for rank, *moments, nbytes in document["ranks"]:
            began, sending, sent = (origin + _number(moment) / 1000 for moment in moments)
            if type(rank) is not int or type(nbytes) is not int:
                raise ValueError("no number of a rank, or of bytes")
            ranks.append(
                RankTiming(rank=rank, began=began, sending=sending, sent=sent, nbytes=nbytes)
            )
        committing = origin + _number(document["commit"]) / 1000
        return cls(ranks=tuple(ranks), world=int(document["world"]), committing=committing)


def _fitting(rows: dict[int, str], room: int) -> Iterator[int]:
    """The first rows that fit, with commas between them."""
    for rank, row in rows.items():
        room -= len(row) + 1
        if room < -1:
            return
        yield rank


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)
