"""What differs between the requests of a vendor's client and ours, and whether that is accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any

from .fields import fields
from .recorder import Recorded, Recorder

__all__ = ["Accepted", "Comparison", "Difference", "Operation", "compared", "named"]


@dataclass(frozen=True)
class Operation:
    """Something that both clients can do.

    Attributes:
        name: ``<cloud>[, <options>]: <what is done>``.
        theirs: Does it by the vendor's client.
        ours: Does it by our store.
        keep: Which of the recorded requests belong to it, for a client that sends more in one call.
    """

    name: str
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    keep: Callable[[Recorded], bool] = lambda request: True


@dataclass(frozen=True)
class Difference:
    """A field that is not the same; None where a request does not have it.

    Attributes:
        operation: The name of the operation.
        field: See :func:`~vendors.fields.fields`; ``request <number>`` if one sends more of them.
        theirs: The value in the vendor's request.
        ours: The value in ours.
    """

    operation: str
    field: str
    theirs: str | None
    ours: str | None

    def __str__(self) -> str:
        return f"{self.field}: theirs {_shown(self.theirs)}, ours {_shown(self.ours)}"


@dataclass(frozen=True)
class Accepted:
    """Differences that are right. The first four are patterns (``*``); None: there is no value.

    Attributes:
        operations: The names of operations.
        field: The names of fields.
        theirs: Their values.
        ours: Our values.
        reason: Why it is right, by what the vendor documents.
    """

    operations: str
    field: str
    theirs: str | None
    ours: str | None
    reason: str

    def covers(self, difference: Difference) -> bool:
        """Whether a difference is one of these."""
        return (
            fnmatchcase(difference.operation, self.operations)
            and fnmatchcase(difference.field, self.field)
            and _fits(difference.theirs, self.theirs)
            and _fits(difference.ours, self.ours)
        )


@dataclass
class Comparison:
    """What came of comparing operations.

    Attributes:
        operations: Their names.
        accepted: The differences that are in the table, with their places there.
        unexpected: Those that are not.
        stale: Rows of the table that no difference needs any more.
    """

    operations: list[str] = field(default_factory=list)
    accepted: list[tuple[Difference, int]] = field(default_factory=list)
    unexpected: list[Difference] = field(default_factory=list)
    stale: list[Accepted] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What has to be mended, here or in the table of what is accepted."""
        by_field: dict[tuple[str, bool], list[Difference]] = {}
        for found in self.unexpected:
            by_field.setdefault((found.field, found.ours is None), []).append(found)
        return [
            *(f"not accepted: {those[0]}; in {named(those)}" for those in by_field.values()),
            *(f"accepted, but does not occur any more: {row}" for row in self.stale),
        ]


def compared(
    recorder: Recorder, operations: Iterable[Operation], table: Sequence[Accepted]
) -> Comparison:
    """Carries out the operations, each by both clients, and judges the differences."""
    comparison, used = Comparison(), set()
    for operation in operations:
        comparison.operations.append(operation.name)
        for difference in _differences(recorder, operation):
            row = next((n for n, row in enumerate(table) if row.covers(difference)), None)
            if row is None:
                comparison.unexpected.append(difference)
            else:
                used.add(row)
                comparison.accepted.append((difference, row))
    comparison.stale = [row for number, row in enumerate(table) if number not in used]
    return comparison


def _differences(recorder: Recorder, operation: Operation) -> Iterator[Difference]:
    theirs, ours = (
        _recorded(recorder, action, operation.keep) for action in (operation.theirs, operation.ours)
    )
    if not theirs and not ours:
        raise AssertionError(f"{operation.name}: nothing was sent")
    for number, (their, our) in enumerate(zip_longest(theirs, ours), 1):
        if their is None or our is None:
            spelled = [f"{one.method} {one.target}" if one else None for one in (their, our)]
            yield Difference(operation.name, f"request {number}", *spelled)
            continue
        expected, found = fields(their), fields(our)
        for name in dict.fromkeys([*expected, *found]):
            if expected.get(name) != found.get(name):
                yield Difference(operation.name, name, expected.get(name), found.get(name))


# where the vendors' own libraries fetch tokens and what belongs to them, for us too
_OF_TOKENS = {
    "iamcredentials.googleapis.com",
    "login.microsoftonline.com",
    "oauth2.googleapis.com",
}


def _recorded(
    recorder: Recorder, action: Callable[[], Any], keep: Callable[[Recorded], bool]
) -> list[Recorded]:
    recorder.requests.clear()
    action()
    found = [request for request in recorder.requests if request.host not in _OF_TOKENS]
    return list(filter(keep, found))


def named(differences: Sequence[Difference]) -> str:
    """The operations of some differences, or how many if they are more than a line takes."""
    names = list(dict.fromkeys(difference.operation for difference in differences))
    if len(names) < 4:
        return "; ".join(names)
    return f"{len(names)} operations, the first of them {names[0]}"


def _fits(value: str | None, pattern: str | None) -> bool:
    if value is None or pattern is None:
        return value is pattern
    return fnmatchcase(value, pattern)


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(value)
