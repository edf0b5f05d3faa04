"""Large objects composed from temporary ones, where the XML multipart API is not available.

A part is an object ``<key>.<upload>.<number>.cloudckpt-part``. Part 0, which is empty, represents
the upload itself. Up to 32 parts are composed in one request; more in two rounds. Composing deletes
the sources, so an attempt whose answer was lost is recognized by its result: for the last request
by the caller, for earlier requests here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cloudckpt.checksum import CRC32C
from cloudckpt.errors import (
    ConnectionLostError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import (
    Body,
    ObjectInfo,
    Part,
    Progress,
    Upload,
    nbytes,
    random_suffix,
)
from cloudckpt.stores.gcs_control import Control
from cloudckpt.stores.gcs_json import JsonObjects, carried_out

__all__ = ["MAX_PARTS", "Composition", "is_temporary"]

logger = logging.getLogger("cloudckpt")

_SOURCES = 32  # of one request: https://cloud.google.com/storage/docs/composite-objects
MAX_PARTS = _SOURCES**2
"""Two rounds: more would only add requests, as parts may have 5 GiB."""

_TEMPORARY = re.compile(r"(.+)\.([0-9a-f]{16})\.[0-9]-[0-9]{4}\.cloudckpt-part", re.DOTALL)


def is_temporary(key: str) -> bool:
    """Whether an object is a part of another one."""
    return _TEMPORARY.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A source of a composition."""

    key: str
    size: int
    crc32c: int
    version: str


class Composition:
    """The uploads of one bucket."""

    def __init__(self, objects: JsonObjects, control: Control) -> None:
        self._objects = objects
        self._control = control

    def create(self, key: str, part_size: int) -> Upload:
        """Begins an upload."""
        name = random_suffix()
        upload = Upload(key, name, part_size, attempt=name)
        self._objects.insert(_name(upload, 0, 0), [], crc32c=0, is_part=True)
        return upload

    def put_part(
        self, upload: Upload, number: int, body: Body, checksum: int, progress: Progress | None
    ) -> Part:
        """Sends a part, if the upload was not aborted meanwhile."""
        self._objects.stat(_name(upload, 0, 0))
        info = self._objects.insert(
            _name(upload, 0, number),
            body,
            crc32c=checksum,
            is_part=True,
            progress=progress,
        )
        return Part(number, nbytes(body), info.version, checksum)

    def complete(
        self, upload: Upload, parts: Sequence[Part], *, if_absent: bool = False
    ) -> ObjectInfo:
        """Makes the object out of its parts; ``if_absent``: unless there is one."""
        pieces = [_sent(upload, part) for part in parts]
        if len(pieces) > _SOURCES:
            groups = [pieces[n : n + _SOURCES] for n in range(0, len(pieces), _SOURCES)]
            pieces = [
                self._joined_piece(_name(upload, 1, number), group)
                for number, group in enumerate(groups, 1)
            ]
        info = self._compose(upload.key, pieces, attempt=upload.attempt, if_absent=if_absent)
        try:
            with carried_out():
                self.abort(upload)
        except TransientStoreError:
            raise
        except StoreError as error:
            logger.warning("temporary objects were left behind: %s", error)
        return info

    def _joined_piece(self, key: str, pieces: list[_Piece]) -> _Piece:
        """A temporary object made of others, by this request or by an earlier try."""
        size, crc32c = _joined(pieces)
        try:
            info = self._compose(key, pieces, is_part=True)
        except TransientStoreError:
            raise
        except StoreError as refused:  # because it has taken place, and the sources are gone?
            try:
                info = self._objects.stat(key)
            except ObjectNotFoundError:
                raise refused from None
            if info.size != size or info.checksum not in (None, crc32c):
                raise
        return _Piece(key, size, crc32c, info.version)

    def _compose(
        self,
        key: str,
        pieces: list[_Piece],
        *,
        attempt: str = "",
        is_part: bool = False,
        if_absent: bool = False,
    ) -> ObjectInfo:
        sources = [(piece.key, piece.version) for piece in pieces]
        made = self._objects.compose(
            key, sources, attempt=attempt, is_part=is_part, if_absent=if_absent
        )
        return self._objects.checked(made, *_joined(pieces))

    def abort(self, upload: Upload) -> None:
        """Deletes all objects of an upload; a lost connection ends that, other failures do not.

        Raises:
            StoreError: If an object is left; if there are several errors, preferably a retryable
                one.
        """
        found = self._control.list(f"{upload.key}.{upload.id}.")
        failures: list[StoreError] = []
        for key in [info.key for info in found if is_temporary(info.key)]:
            try:
                self._control.delete(key)
            except ConnectionLostError:
                raise  # the next request might wait as long for nothing
            except StoreError as error:
                failures.append(error)
        failures.sort(key=lambda error: not isinstance(error, TransientStoreError))
        if failures:
            raise failures[0]

    def open_uploads(self, prefix: str) -> Iterator[Upload]:
        """The uploads under a prefix that left something behind."""
        seen: set[tuple[str, str]] = set()
        for info in self._control.list(prefix):
            match = _TEMPORARY.fullmatch(info.key)
            if match is not None and (names := (match.group(1), match.group(2))) not in seen:
                seen.add(names)
                yield Upload(*names, 0, info.modified, is_ours=True)


def _name(upload: Upload, round_number: int, number: int) -> str:
    return f"{upload.key}.{upload.id}.{round_number}-{number:04}.cloudckpt-part"


def _sent(upload: Upload, part: Part) -> _Piece:
    assert part.checksum is not None  # only copied parts have none
    return _Piece(_name(upload, 0, part.number), part.size, part.checksum, part.tag)


def _joined(pieces: Sequence[_Piece]) -> tuple[int, int]:
    """Size and CRC32C of what comes of pieces that are put together."""
    size = sum(piece.size for piece in pieces)
    return size, CRC32C.combine((piece.crc32c, piece.size) for piece in pieces)
