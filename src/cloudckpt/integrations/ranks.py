"""Saves and restores the state that differs between ranks: random generators and dataloaders.

It is saved for each rank (:func:`cloudckpt.per_rank`), and loaded by the same rank. A rank that did
not exist at the save keeps its random generators, and its dataloader starts at the position that
the framework chooses; a warning is logged.
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
"""The name of the item with each rank's random generators and dataloaders, by ``torch.save``."""


def random_state() -> dict[str, Any]:
    """Returns the states of this process's random generators: Python, torch, device, numpy."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (device := _device()) is not None:
        state["device"] = device.get_rng_state()
    if (numpy := _numpy()) is not None:
        kind, keys, *rest = numpy.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def put_random(state: Mapping[str, Any]) -> None:
    """Sets this process's random generators to states that :func:`random_state` has returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "device" in state and (device := _device()) is not None:
        device.set_rng_state(state["device"])
    if "numpy" in state and (numpy := _numpy()) is not None:
        kind, keys, *rest = state["numpy"]
        numpy.set_state((kind, keys.numpy().astype("uint32"), *rest))


def entries_of_rank(state: Mapping[str, Any]) -> dict[str, PerRank[Any]]:
    """Returns the entries that differ between ranks: dataloaders, and those marked ``per_rank``."""
    own = {key: one for key, one in state.items() if isinstance(one, (PerRank, DataLoader))}
    return {key: one if isinstance(one, PerRank) else per_rank(one) for key, one in own.items()}


def packed(values: Mapping[str, Any]) -> io.BytesIO:
    """Pickles values with ``torch.save`` into a buffer, as frameworks write their small files."""
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    buffer.seek(0)
    return buffer


def unpacked(buffer: io.BytesIO, weights_only: bool | None = None) -> dict[str, Any]:
    """Loads the values that :func:`packed` has pickled; ``weights_only=False`` trusts pickles."""
    buffer.seek(0)
    return dict(torch.load(buffer, map_location="cpu", weights_only=weights_only is not False))


def _device() -> Any:
    """Returns the accelerator's module, such as ``torch.cuda``; None if it is not initialized."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = None if kind is None else torch.get_device_module(kind)
    return module if module is not None and module.is_initialized() else None


def _numpy() -> Any:
    """Returns ``numpy.random``; None if numpy is not installed."""
    try:
        import numpy
    except ImportError:  # torch works without it
        return None
    return numpy.random
