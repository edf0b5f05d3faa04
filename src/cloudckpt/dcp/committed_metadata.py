"""torch's metadata of a save that another process has committed, read on first access.

Most callers drop what ``save`` returns. So the metadata, which are large for a large job, are not
sent to the other ranks: these get a stand-in that reads them from the store on access.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from cloudckpt.checkpoint.lazy import ReadLater, save_id_of
from cloudckpt.checkpoint.torch_private import CURRENT_DCP_VERSION
from cloudckpt.config import Config
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.errors import CheckpointReplacedError
from cloudckpt.uri import CheckpointURI

__all__ = ["committed_metadata"]


def committed_metadata(uri: CheckpointURI, config: Config, attempt: str) -> Metadata:
    """The metadata of a save.

    On first access its mappings raise CheckpointReplacedError if another save has replaced it, or
    what reading metadata raises. Printing or comparing them reads nothing: two are equal if they
    are of the same save at the same location, and never equal to a mapping of another kind,
    whatever its content.

    Args:
        uri: Where the save was committed.
        config: The options.
        attempt: The random name of the save.
    """
    wanted = save_id_of(attempt)

    @functools.cache
    def read() -> Metadata:
        found = CloudStorageReader(uri, config=config).read_metadata()
        save_id = getattr(found.storage_meta, "save_id", None)
        if save_id != wanted:
            raise CheckpointReplacedError(
                "another save has replaced it before anybody has looked at its metadata",
                saves=(wanted, save_id),
                uri=str(uri),
            )
        return found

    metadata: Any = Metadata(state_dict_metadata={})
    for field in ("state_dict_metadata", "planner_data", "storage_data"):
        setattr(metadata, field, _Later(read, field, (str(uri), attempt)))
    metadata.storage_meta = StorageMeta(checkpoint_id=str(uri), save_id=wanted)
    metadata.version = CURRENT_DCP_VERSION
    return metadata  # type: ignore[no-any-return]


class _Later(ReadLater):
    """A mapping in metadata. Pickles as a dict.

    Logging or comparing metadata must not read: a rank would wait for the store, or fail, just to
    report what it has saved.
    """

    def __init__(self, read: Callable[[], Metadata], field: str, save: tuple[str, str]) -> None:
        """``save``: the location and the random name of the save that the mapping is of."""
        self._read = read
        self._field = field
        self._save = save

    @property
    def _held(self) -> Mapping[Any, Any]:
        found: Mapping[Any, Any] = getattr(self._read(), self._field) or {}
        return found

    def __getitem__(self, key: Any) -> Any:
        return self._held[key]

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"<{self._field} of {self._save[0]}, read when somebody looks into it>"

    def __eq__(self, other: object) -> bool:
        # not NotImplemented: Python would ask the other mapping, which would look into this one
        if not isinstance(other, _Later):
            return False
        return (self._field, self._save) == (other._field, other._save)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
