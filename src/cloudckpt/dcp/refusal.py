"""How a rank that can't even begin tells the others, instead of leaving them to wait for it.

torch exchanges the failures of its own steps. A rank that fails before the first of them takes part
with one of these, which fails in it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from cloudckpt.dcp.portable import portable_errors

__all__ = ["RefusingReader", "RefusingWriter"]


class _Refusing:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        with portable_errors(None):
            raise self._error
        raise AssertionError  # for mypy, which takes a context manager for one that may suppress

    def reset(self, checkpoint_id: object = None) -> None:
        """There is nothing to reset."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False


class RefusingWriter(_Refusing, StorageWriter):
    """Fails in the first step of a save."""

    def storage_meta(self) -> NoReturn:
        self._refuse()

    set_up_storage_writer = prepare_local_plan = prepare_global_plan = _Refusing._refuse
    write_data = finish = _Refusing._refuse


class RefusingReader(_Refusing, StorageReader):
    """Fails in the first step of a load."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata({})  # torch would pass on an error of this only as a text

    set_up_storage_reader = prepare_local_plan = prepare_global_plan = _Refusing._refuse
    read_data = _Refusing._refuse
