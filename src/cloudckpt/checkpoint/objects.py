"""The names of the objects of checkpoints, and requests that check whether objects exist."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    CloudCheckpointError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI

__all__ = [
    "CLAIM",
    "METADATA",
    "OF_RANKS",
    "PART",
    "WrittenObject",
    "beneath",
    "check_attempt",
    "check_folder",
    "checked",
    "data_name",
    "find_commit",
    "keep_name",
    "keeps_in",
    "is_committed",
    "is_drawn_name",
    "is_file",
    "is_keep_name",
    "is_pending_name",
    "is_step_name",
    "look_for",
    "natural_order",
    "pending_name",
    "probe_name",
    "trial_name",
]

logger = logging.getLogger("cloudckpt")

METADATA = ".metadata"
"""The name of the commit object, whose presence makes a checkpoint; torch uses the same name."""

CLAIM = ".cloudckpt-job.json"
"""The name of a run's claim: the object in its folder that names the job which saves to it now."""

OF_RANKS = "__"
"""Prefix of the names of all objects that single ranks write."""
PART = f"__0{METADATA}"
"""The name of rank 0's metadata in a checkpoint that torch saved with ``use_collectives=False``."""

_UNUSABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # control characters, lone surrogates


def data_name(rank: int, ordinal: int, attempt: str) -> str:
    """Returns the name of a rank's data object number ``ordinal`` in the save ``attempt``."""
    return f"__{rank}_{ordinal}.{attempt}.distcp"


def pending_name(rank: int, attempt: str) -> str:
    """Returns the name of the object that a rank's saving process leaves if its trainer ends early.

    :mod:`cloudckpt.checkpoint.pending` describes this object.
    """
    return f"__{rank}.{attempt}.pending"


_PENDING = re.compile(r"__\d+\.[0-9a-f]{16}\.pending")


def is_pending_name(name: str) -> bool:
    """Returns whether a name has the form that :func:`pending_name` makes."""
    return _PENDING.fullmatch(name) is not None


_STEP = re.compile(r"step-(0|[1-9]\d{0,17})", re.ASCII)


def is_step_name(name: str) -> bool:
    """Returns whether a name is the default name of a step, such as ``step-100``."""
    return _STEP.fullmatch(name) is not None


KEPT_FOR = ".cloudckpt-keep."
"""Prefix of the names of all marks, by which saves protect objects that they may refer to."""


def keep_name(attempt: str) -> str:
    """Returns the name of a save's mark in a checkpoint whose objects the save may refer to.

    While the mark exists, these objects are not deleted; see
    :mod:`cloudckpt.checkpoint.references`.
    """
    return f"{KEPT_FOR}{attempt}"


def keeps_in(folder: CheckpointURI) -> str:
    """Returns the prefix of the keys of all marks in a checkpoint; see :func:`keep_name`."""
    return folder.key(KEPT_FOR)


def is_keep_name(name: str) -> bool:
    """Returns whether a name has the form that :func:`keep_name` makes."""
    return re.fullmatch(re.escape(KEPT_FOR) + "[0-9a-f]{16}", name) is not None


def trial_name(attempt: str) -> str:
    """Returns the name of a temporary object on which a store's conditional writes are tested."""
    return f".conditions.{attempt}"


def probe_name(of: Literal["doctor", "sweep"], drawn: str) -> str:
    """Returns the name, or the prefix of names, of temporary objects on which a store is tested.

    Args:
        of: The function that tests the store.
        drawn: Sixteen random hexadecimal digits.
    """
    return f".cloudckpt-{of}.{drawn}"


_OF_DATA = re.compile(r"__\d+_\d+\.[0-9a-f]{16}\.distcp")
_DRAWN = re.compile(
    r"(\.conditions\.<>|\.cloudckpt-(doctor|sweep)\.<>(\.[0-9a-z]+)?)".replace("<>", "[0-9a-f]{16}")
)


def is_drawn_name(name: str) -> bool:
    """Returns whether a name has random digits, in a form that only cloudckpt makes.

    These are the names of data objects, pending objects (:func:`pending_name`), marks
    (:func:`keep_name`), and objects for tests. Such a name is never used twice.
    """
    if _OF_DATA.fullmatch(name) or _DRAWN.fullmatch(name):
        return True
    return is_pending_name(name) or is_keep_name(name)


def checked(name: object, uri: str) -> str:
    """Returns ``name``, an object's path relative to a checkpoint's folder, if it is allowed.

    Allowed are objects beneath this folder, and data objects of cloudckpt in a folder beside it.
    Names come from the bucket; an object elsewhere must not be read, much less deleted.

    Args:
        name: The name, as the metadata has it.
        uri: The checkpoint or its commit object, for messages.

    Raises:
        CheckpointCorruptError: If the name leads elsewhere, or is invalid.
    """
    if not isinstance(name, str):
        raise CheckpointCorruptError(
            f"invalid metadata: the name of an object is of class {type(name).__name__}, not str; "
            "restore .metadata from a backup, or load an older checkpoint",
            uri=uri,
        )
    parts = name.split("/")
    if parts[0] == ".." and len(parts) == 3 and _OF_DATA.fullmatch(parts[2]):
        del parts[0]
    if not name or _UNUSABLE.search(name) or "" in parts or "." in parts or ".." in parts:
        raise CheckpointCorruptError(
            "invalid metadata: the name of an object leads out of the checkpoint, or is invalid: "
            f"{name[:200]!r}; restore .metadata from a backup, or load an older checkpoint",
            uri=uri,
        )
    return name


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """A data object in the store, as its rank has written it.

    Attributes:
        rank: The rank that wrote it.
        ordinal: The object's number among those of its rank, from 0.
        attempt: The random part of its name: sixteen hexadecimal digits.
        size: The object's size in bytes, with its index.
        checksum: The object's checksum, by the store's algorithm.
        index_size: Bytes of the index at its end.
        index_crc: CRC32C of the index.
        folder: The folder name of the sibling checkpoint that contains the object; empty if the
            checkpoint that names the object contains it.
    """

    rank: int
    ordinal: int
    attempt: str
    size: int
    checksum: int
    index_size: int
    index_crc: int
    folder: str = ""

    @property
    def name(self) -> str:
        """The object's path relative to the checkpoint that refers to it.

        It begins with ``../`` if the object is in the folder of a sibling checkpoint.
        """
        name = data_name(self.rank, self.ordinal, self.attempt)
        return f"../{self.folder}/{name}" if self.folder else name

    def seen_from(self, folder: str) -> WrittenObject:
        """Returns the object as the checkpoint in ``folder`` refers to it.

        An object in that folder itself gets an empty ``folder``, so that it is still found after
        the folder was renamed.
        """
        return dataclasses.replace(self, folder="") if self.folder == folder else self

    def to_json(self) -> list[Any]:
        """Returns the fields of the object, in their order."""
        return [*dataclasses.astuple(self)]

    @classmethod
    def from_json(cls, fields: Any) -> WrittenObject:
        """Makes an object from the result of :meth:`to_json`.

        Raises:
            ValueError: If a field is invalid.
            TypeError: If ``fields`` can't be iterated over, or has the wrong length.
        """
        made = cls(*fields)
        numbers = made.rank, made.ordinal, made.size, made.checksum, made.index_size, made.index_crc
        if any(type(number) is not int or not 0 <= number < 1 << 64 for number in numbers):
            raise ValueError(
                "invalid metadata record: a size, checksum or number of an object is not a uint64"
            )
        if not made.index_size <= made.size < 1 << 63:
            raise ValueError(
                "invalid metadata record: an object is smaller than its index, or over 2**63 bytes"
            )
        check_attempt(made.attempt)
        if made.folder != "":
            check_folder(made.folder)
        return made


def check_attempt(attempt: object) -> None:
    """Checks that ``attempt`` can be the random name of a save, as keys are made from it.

    Raises:
        ValueError: If it is not a string of 16 lower-case hexadecimal digits.
    """
    if type(attempt) is not str or not re.fullmatch("[0-9a-f]{16}", attempt):
        raise ValueError(
            "invalid metadata record: the random name of a save is not 16 hexadecimal digits"
        )


def check_folder(folder: object) -> None:
    """Checks that ``folder`` can be the folder name of a sibling checkpoint.

    Raises:
        ValueError: If it is not a string, or can't be the name of a single folder.
    """
    if type(folder) is not str or folder in ("", ".", "..") or "/" in folder:
        raise ValueError(f"invalid folder name {folder!r}")
    if _UNUSABLE.search(folder):
        raise ValueError(f"the folder name {folder!r} contains a character that is not allowed")


_MOST_KEYS = 5000  # keys listed for a hint: five pages of S3


def find_commit(look: Callable[[str], ObjectInfo], uri: CheckpointURI) -> ObjectInfo | None:
    """Returns the commit object of a location; None only if the store says that it does not exist.

    Args:
        look: Requests an object, as :meth:`~cloudckpt.stores.base.ObjectStore.look`.
        uri: The location.

    Raises:
        StoreError: If the store gives any other answer, such as that the bucket does not exist, or
            stays unreachable.
    """
    try:
        return look(uri.key(METADATA))
    except ObjectNotFoundError:
        return None


def is_committed(store: ObjectStore, uri: CheckpointURI, retrier: Retrier) -> bool:
    """Returns whether a location has a commit object; see :func:`find_commit`."""

    def look(key: str) -> ObjectInfo:
        return retrier.call(lambda: store.look(key))

    return find_commit(look, uri) is not None


def is_file(look: Callable[[str], ObjectInfo], uri: CheckpointURI) -> bool:
    """Returns whether a location is itself an object's key; arguments as in :func:`find_commit`."""
    try:
        return bool(uri.prefix and look(uri.prefix))
    except ObjectNotFoundError:
        return False


def beneath(store: ObjectStore, uri: CheckpointURI) -> str:
    """Returns a hint for an error message, which names up to four checkpoints beneath a location.

    The hint is empty if the first 5000 keys beneath the location show no checkpoint, or if listing
    them fails; nothing is retried.
    """
    found: set[str] = set()
    seen, top = 0, uri.key("")
    try:
        for listed in itertools.islice(store.list(top), _MOST_KEYS):
            seen += 1
            folder, _, name = listed.key.rpartition("/")
            if name == METADATA and len(folder) >= len(top):
                found.add(store.uri(folder))
    except CloudCheckpointError:
        return ""
    if not found:
        return ""
    *others, last = sorted(found, key=natural_order)
    count = "There is a checkpoint" if not others else f"There are {len(found)} checkpoints"
    more = f" Others are {', '.join(others[:-4:-1])}" if others else ""
    return (
        f"{count if seen < _MOST_KEYS else 'There are checkpoints'} in folders under it: did you "
        f"mean {last}?{more}"
    )


_DIGITS = frozenset("0123456789")


def natural_order(text: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key that compares numbers in names by value: step-200 before step-1000."""
    return [
        (part[:1] in _DIGITS, int(part) if part[:1] in _DIGITS else 0, part)
        for part in re.split(r"([0-9]+)", text)
    ]


_MOST_SINGLE_LOOKS = 64
"""Maximum objects that are requested one by one: more are listed, up to 1,000 in one answer."""


def look_for(
    store: ObjectStore,
    uri: CheckpointURI,
    objects: Iterable[WrittenObject],
    config: Config,
    wrong: Callable[[WrittenObject, str], CloudCheckpointError],
) -> None:
    """Checks that objects exist, with the sizes that their ranks have reported.

    If a folder has many of the objects, it is listed. An object missing from a listing is requested
    individually before it counts as missing: listings may be refused, and network file systems may
    return stale ones.

    Args:
        store: The store of ``uri``.
        uri: The checkpoint that names the objects.
        objects: The objects, also those of sibling checkpoints.
        config: Options.
        wrong: Makes the error from an object and what is wrong with it: ``does not exist``, or
            ``has 5 bytes instead of 9``.

    Raises:
        CloudCheckpointError: The error that ``wrong`` makes; or a StoreError, if the store refuses
            or stays unreachable.
    """
    view = View(uri, config)
    by_folder: dict[str, list[WrittenObject]] = {}
    for record in objects:
        folder, slash, _ = uri.key(record.name).rpartition("/")
        by_folder.setdefault(folder + slash, []).append(record)

    def unlisted() -> Iterator[WrittenObject]:
        for start, records in by_folder.items():
            seen = set[str]()
            if len(records) > _MOST_SINGLE_LOOKS:
                seen = _listed(store, uri, start, records, view.retrier)
            yield from (record for record in records if record.name not in seen)

    def check(record: WrittenObject) -> None:
        try:
            found = view.retrier.call(lambda: store.head(uri.key(record.name))).size
        except ObjectNotFoundError:
            raise wrong(record, "does not exist") from None
        if found != record.size:
            raise wrong(record, f"has {found} bytes instead of {record.size}")

    view.each(check, unlisted())


def _listed(
    store: ObjectStore,
    uri: CheckpointURI,
    start: str,
    objects: Collection[WrittenObject],
    retrier: Retrier,
) -> set[str]:
    """Returns the names of the objects that a listing shows with the reported size.

    If the store refuses to list them, it logs a warning, and returns an empty set.

    Args:
        store: The store of ``uri``.
        uri: The checkpoint that names the objects.
        start: The prefix of all keys in a folder.
        objects: The objects in that folder.
        retrier: Retries transient failures.

    Raises:
        TransientStoreError: If the store stays unreachable.
    """
    names = {(uri.key(record.name), record.size): record.name for record in objects}
    try:
        listed = store.list(start + OF_RANKS, retrier.call)
        shown = (names.get((info.key, info.size)) for info in listed)
        return set(itertools.islice(filter(None, shown), len(names)))
    except TransientStoreError:
        raise
    except StoreError as error:
        logger.warning(
            "%s: the store refuses to list this folder, so each of %d objects in it is checked by "
            "a request of its own, which is slower: %s",
            store.uri(start), len(objects), error,
        )  # fmt: skip
        return set()
