"""Saves in the background: starting one, and waiting until its bytes are safe."""

from __future__ import annotations

from typing import Any, Protocol, cast

from benchmarks.contenders import CONTENDERS
from benchmarks.places import Place


class BackgroundSaver(Protocol):
    """A contender that can save while the trainer goes on."""

    def async_save(self, state_dict: dict[str, Any], name: str) -> Any:
        """Starts a save; returns when the state may be changed again."""


def background_saver(contender: str, place: Place) -> BackgroundSaver:
    """Returns `contender`, ready to save in the background.

    Raises:
        TypeError: If it cannot.
    """
    saver = CONTENDERS[contender].build(place)
    if not hasattr(saver, "async_save"):
        raise TypeError(f"{contender} has no async_save")
    return cast(BackgroundSaver, saver)


def completion(started: Any) -> Any:
    """Returns the future of a background save, from either of the shapes torch returns."""
    return getattr(started, "upload_completion", started)
