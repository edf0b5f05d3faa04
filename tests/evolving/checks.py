"""What is looked at behind a save: by all roads it is what the model says, to the last bit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import cloudckpt
from cloudckpt.checkpointer import CheckpointerConfig
from cloudckpt.errors import CheckpointNotFoundError
from dcp.places import Place

from .cases import Save
from .states import difference, flat, made, placed_otherwise
from .values import Here

__all__ = ["CHECK", "there_is_nothing"]


def there_is_nothing(place: Place) -> str | None:
    """What is wrong if there is to be no checkpoint."""
    if cloudckpt.exists(place.uri, config=place.config):
        return "there is a checkpoint"
    try:
        cloudckpt.inspect(place.uri, config=place.config)
    except CheckpointNotFoundError:
        return None
    return "it can be inspected"


def _together(save: Save, step: int, world: int, place: Place) -> str | None:
    room = made(save.state, _here(save, step, blank=True))
    cloudckpt.load(room, checkpoint_id=place.uri, config=place.config)
    return difference(room, made(save.state, _here(save, step)), ordered=True)


def _placed_otherwise(save: Save, step: int, world: int, place: Place) -> str | None:
    """Into other shards, and on as many ranks as there are now."""
    state, here = placed_otherwise(save.state, world), _here(save, step)
    room = made(state, dataclasses.replace(here, blank=True))
    expected = made(state, dataclasses.replace(here, saved_by=world))
    cloudckpt.load(room, checkpoint_id=place.uri, config=place.config)
    return difference(room, expected, ordered=True)


def _in_another_group(save: Save, step: int, world: int, place: Place) -> str | None:
    """All of it on each of the ranks, each of which loads it by itself."""
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        return None
    return _alone(save, step, world, place)


def _stock_together(save: Save, step: int, world: int, place: Place) -> str | None:
    """By torch's names: its own loader mistakes keys that are no texts, and empty dicts."""
    if not place.uri.startswith("file://"):
        return None
    room, expected = _flat_of_rank(save, step)
    dcp.load(room, storage_reader=FileSystemReader(place.path))
    return difference(room, expected, ordered=False)


def _flat_of_rank(save: Save, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank has by torch's names: as room, and as it was saved."""
    room, expected = (made(save.state, _here(save, step, blank=blank)) for blank in (True, False))
    return flat(room, dist.get_rank()), flat(expected, dist.get_rank())


def _alone(save: Save, step: int, world: int, place: Place) -> str | None:
    room = made(save.state, Here(step, None, world, blank=True))
    cloudckpt.load(room, checkpoint_id=place.uri, config=place.config, no_dist=True)
    return difference(room, _whole(save, step, world), ordered=True)


def _everything(save: Save, step: int, world: int, place: Place) -> str | None:
    config = CheckpointerConfig(config=place.config, no_dist=True)
    with cloudckpt.checkpointer.make_sync_checkpointer(config) as checkpointer:
        found = checkpointer.load(place.uri)
    return difference(found, _whole(save, step, world), ordered=world == 1)


def _verify(save: Save, step: int, world: int, place: Place) -> str | None:
    seen = cloudckpt.verify(place.uri, config=place.config, process_group=None)
    return None if seen.has_checksums else "it has no checksums"


def _inspect(save: Save, step: int, world: int, place: Place) -> str | None:
    found = {
        item.name: (item.shape, item.dtype)
        for item in cloudckpt.inspect(place.uri, config=place.config).items
    }
    expected = {
        name: (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if isinstance(value, torch.Tensor)
        else (None, None)
        for name, value in flat(_whole(save, step, world)).items()
    }
    if found != expected:
        wrong = set(found.items()) ^ set(expected.items())
        return f"what it lists differs in {sorted(wrong, key=repr)[:4]}"
    return None


def _stock_alone(save: Save, step: int, world: int, place: Place) -> str | None:
    with _downloaded(place) as folder:
        expected = flat(_whole(save, step, world))
        room = {name: _room(value) for name, value in expected.items()}
        dcp.load(room, storage_reader=FileSystemReader(folder), no_dist=True)
        named = FileSystemReader(folder).read_metadata().storage_data
        objects = {place.relative_path for place in named.values()}
    own = {name for name in objects if not name.startswith("../")}
    if own - set(place.data()):
        return f"metadata name objects that are not there: {own - set(place.data())}"
    return difference(room, expected, ordered=True)


CHECK: Mapping[str, Callable[[Save, int, int, Place], str | None]] = {
    "together": _together,
    "placed otherwise": _placed_otherwise,
    "alone": _alone,
    "everything": _everything,
    "verify": _verify,
    "inspect": _inspect,
    "stock alone": _stock_alone,
    "stock together": _stock_together,
    "another group": _in_another_group,
}
"""By its name in `CHECKS`: what is wrong with a checkpoint; None if it is what was saved."""


@contextlib.contextmanager
def _downloaded(place: Place) -> Iterator[str]:
    """A checkpoint in a folder, with what it refers to beside it."""
    if place.uri.startswith("file://"):
        yield place.path
        return
    run, _, own = place.uri.rpartition("/")
    metadata = pickle.loads(place.read(".metadata"))
    named = {each.relative_path for each in metadata.storage_data.values()}
    wanted = {(own, name) for name in place.names()}
    wanted |= {tuple(name.split("/")[1:]) for name in named if name.startswith("../")}
    with tempfile.TemporaryDirectory() as target:
        for folder, name in wanted:
            os.makedirs(os.path.join(target, folder), exist_ok=True)
            with open(os.path.join(target, folder, name), "wb") as file:
                file.write(dataclasses.replace(place, uri=f"{run}/{folder}").read(name))
        yield os.path.join(target, own)


def _here(save: Save, step: int, *, blank: bool = False) -> Here:
    return Here(step, dist.get_rank(), dist.get_world_size(), blank=blank)


def _whole(save: Save, step: int, world: int) -> dict[Any, Any]:
    return made(save.state, Here(step, None, world))


def _room(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    raw = torch.full((value.numel() * value.itemsize,), 113, dtype=torch.uint8)
    if value.dtype == torch.bool:
        return (raw & 1).bool().reshape(value.shape)
    return raw.view(value.dtype).reshape(value.shape)
