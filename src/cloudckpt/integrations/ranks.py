"""What each rank of a training has of its own: random generators, and positions of dataloaders.

They are saved once a rank (:func:`cloudckpt.per_rank`), and come back to the rank that saved them.
A rank that has saved none, since there were fewer ranks then, keeps its random generators, and gets
what the framework gives it for a position; a warning says so.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from cloudckpt.dcp.content import PerRank, per_rank

__all__ = ["OF_RANKS", "entries_of_rank", "packed", "put_random", "random_state", "unpacked"]

OF_RANKS = "of_each_rank"
"""The item with a rank's random generators and dataloaders, as the bytes of ``torch.save``."""


def random_state() -> dict[str, Any]:
    """The states of this process's random generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (device := _device()) is not None:
        state["device"] = device.get_rng_state()
    if (numpy := _numpy()) is not None:
        kind, keys, *rest = numpy.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def put_random(state: Mapping[str, Any]) -> None:
    """Sets the random generators to what :func:`random_state` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "device" in state and (device := _device()) is not None:
        device.set_rng_state(state["device"])
    if "numpy" in state and (numpy := _numpy()) is not None:
        kind, keys, *rest = state["numpy"]
        numpy.set_state((kind, keys.numpy().astype("uint32"), *rest))


def entries_of_rank(state: Mapping[str, Any]) -> dict[str, PerRank[Any]]:
    """The entries of a state that each rank has of its own: dataloaders, and what is marked so."""
    own = {key: one for key, one in state.items() if isinstance(one, (PerRank, DataLoader))}
    return {key: one if isinstance(one, PerRank) else per_rank(one) for key, one in own.items()}


def packed(values: Mapping[str, Any]) -> io.BytesIO:
    """Values as the bytes of ``torch.save``, which load like a framework's own small files."""
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    buffer.seek(0)
    return buffer


def unpacked(buffer: io.BytesIO, weights_only: bool | None = None) -> dict[str, Any]:
    """The values that :func:`packed` packed."""
    buffer.seek(0)
    return dict(torch.load(buffer, map_location="cpu", weights_only=weights_only is not False))


def _device() -> Any:
    """The module of the accelerator, such as ``torch.cuda``, if this process uses one."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = None if kind is None else torch.get_device_module(kind)
    return module if module is not None and module.is_initialized() else None


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:  # torch works without it
        return None
    return numpy.random
