"""A staged state dict on its way to the saving process: its structure, without its bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from cloudckpt.background.arena import Arena
from cloudckpt.errors import StagingError
from cloudckpt.transfer.memory import extent

__all__ = ["pack", "unpack"]


def pack(state_dict: dict[str, Any], others: object, arena: Arena | None) -> bytes:
    """A pickle in which tensors of the arena are places, not bytes.

    Args:
        state_dict: The staged state dict.
        others: What else is to travel.
        arena: Where the tensors are; others are sent by value.

    Raises:
        StagingError: If a value can't be pickled, or lies on an accelerator.
    """
    try:
        return _dumps((state_dict, others), arena)
    except StagingError:
        raise
    except Exception as exc:
        raise StagingError(
            f"{_culprit(state_dict, arena)} can't be sent to the saving process; leave it out of "
            "the state dict, or save in a thread",
            cause=exc,
        ) from exc


def _dumps(value: object, arena: Arena | None) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer, arena).dump(value)
    return buffer.getvalue()


def _culprit(state_dict: dict[str, Any], arena: Arena | None) -> str:
    """The entry that can't be pickled, for a message."""
    for key, value in state_dict.items():
        try:
            _dumps(value, arena)
        except Exception:  # noqa: BLE001 - the same again
            return f"{key!r} (a {type(value).__name__})"
    return "the planner or the writer"


def unpack(data: bytes, arena: Arena | None) -> tuple[dict[str, Any], Any]:
    """The state dict and what else was packed with it."""
    content: tuple[dict[str, Any], Any] = _Unpacker(io.BytesIO(data), arena).load()
    return content


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, arena: Arena | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._begin = 0 if arena is None else arena.address
        self._end = 0 if arena is None else self._begin + arena.size

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return None
        if value.device.type not in ("cpu", "meta"):
            raise StagingError(
                f"a tensor is on {value.device}, where the saving process can't read it; use a "
                "stager that copies to the host"
            )
        if value.layout != torch.strided or value.device.type == "meta" or value.numel() == 0:
            return None
        start = value.untyped_storage().data_ptr()
        if not self._begin <= start < self._end:
            return None
        first, end = extent(value)
        place = start - self._begin + first
        return place, end - first, value.dtype, tuple(value.shape), value.stride()


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arena: Arena | None) -> None:
        super().__init__(file)
        self._memory = None if arena is None else arena.memory()

    def persistent_load(self, place: Any) -> torch.Tensor:
        if self._memory is None:
            raise StagingError("the staged copy did not arrive")
        first, size, dtype, shape, stride = place
        made = torch.empty(0, dtype=dtype, device="cpu")
        return made.set_(self._memory.storage(first, size), 0, shape, stride)
