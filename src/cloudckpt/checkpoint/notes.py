"""Notes: data of a training run about a checkpoint, which can be read without loading it.

They are at the end of the commit object, so that they exist if and only if the checkpoint does. Two
small requests read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudckpt.checkpoint.objects import METADATA
from cloudckpt.checkpoint.trailer import MOST_NOTES, TAIL, notes_at_end, read_range
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigError,
    ObjectNotFoundError,
)
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.retry import Retrier, retry_if_replaced
from cloudckpt.uri import CheckpointURI

__all__ = ["Notes", "continued_from", "metrics_of", "read_notes"]

# JSON has no such numbers
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Step, metrics and other data about a checkpoint, stored with it.

    Attributes:
        step: The training step; None if unknown.
        metrics: Numbers by which to compare checkpoints; the keys are the names of the metrics.
        user: Any other data that JSON can hold; all keys are strings.
        job: The random name of the job that saved the checkpoint in a run; empty if unknown.
        continues: The earlier jobs whose training this job continues, the earliest first: the
            random name of each, with the step from which the job after it continued.
    """

    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    job: str = ""
    continues: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Returns the notes as JSON, or no bytes if there are no notes.

        Raises:
            ConfigError: If JSON can't hold the values, or takes more than ``MOST_NOTES`` bytes.
        """
        if self == Notes():
            return b""
        metrics = {
            name: value if math.isfinite(value) else str(value)
            for name, value in self.metrics.items()
        }
        document: dict[str, Any] = {"step": self.step, "metrics": metrics, "user": dict(self.user)}
        if self.job:
            document |= {"job": self.job, "continues": [*self.continues.items()]}
        try:
            data = json.dumps(
                document, ensure_ascii=False, allow_nan=False, default=_plain
            ).encode()
            if json.loads(data)["user"] != document["user"]:
                raise ValueError(
                    "they would be loaded as different values (in JSON, keys are strings)"
                )
        except (TypeError, ValueError, RuntimeError) as exc:
            raise ConfigError(
                f"the notes can't be saved as JSON: {exc}; give strings, numbers, lists and "
                "dicts of these"
            ) from exc
        if len(data) > MOST_NOTES:
            raise ConfigError(
                f"the notes take {len(data):,} bytes, and the limit is {MOST_NOTES:,}: put "
                "larger values into the state dict"
            )
        return data

    @classmethod
    def from_json(cls, data: bytes, uri: str) -> Notes:
        """Parses the stored bytes of notes; returns empty notes if there are no bytes.

        Raises:
            CheckpointCorruptError: If the bytes are not valid notes.
        """
        if not data:
            return cls()
        try:
            found = json.loads(data)
            step, user = found.get("step"), found.get("user", {})
            metrics = {name: _number(value) for name, value in found.get("metrics", {}).items()}
            if not isinstance(user, dict) or not (step is None or type(step) is int):
                raise ValueError("'user' is not a dict, or 'step' not an integer")
            job, continues = found.get("job", ""), continued_from(found.get("continues", []))
            if not isinstance(job, str):
                raise ValueError("'job' is not a string")
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as exc:
            raise CheckpointCorruptError(
                "the notes of the checkpoint are invalid: restore .metadata from a backup, or load "
                "an older checkpoint",
                uri=uri,
                cause=exc,
            ) from exc
        return cls(step=step, metrics=metrics, user=user, job=job, continues=continues)

    def is_same_training(self, other: Notes) -> bool:
        """Returns whether the notes ``other`` are of a checkpoint of the same training as these.

        They are if both checkpoints are of the same job, or of unknown jobs. They also are if this
        job continues the job of ``other``, and ``other.step`` is known and not after the step from
        which that job was continued.
        """
        last = self.continues.get(other.job, -1)
        return other.job == self.job or (other.step is not None and other.step <= last)

    def continued_at(self, step: int) -> dict[str, int]:
        """Returns :attr:`continues` for a job that resumes from this checkpoint, at ``step``."""
        before = {job: last for job, last in self.continues.items() if job != self.job}
        return {**before, self.job: step}


def continued_from(pairs: object) -> dict[str, int]:
    """Converts :attr:`Notes.continues` from its JSON form, a list of pairs of a job and a step.

    Raises:
        ValueError: If ``pairs`` is not a list of pairs of a string and an integer.
        TypeError: If an entry of the list is not iterable, or a job is not hashable.
    """
    if not isinstance(pairs, list):
        raise ValueError("'continues' is not a list of jobs")
    found = dict(pairs)
    if any(type(job) is not str or type(step) is not int for job, step in found.items()):
        raise ValueError("'continues' does not list jobs with their last steps")
    return found


def metrics_of(given: Mapping[str, Any] | None) -> dict[str, float]:
    """Converts metrics to floats; also accepts scalars of torch and numpy, and None for no metrics.

    Raises:
        ConfigError: If a name is not a string, or a value not a number.
    """
    found: dict[str, float] = {}
    for name, value in (given or {}).items():
        try:
            if not isinstance(name, str) or isinstance(value, (str, bytes)):
                raise TypeError
            found[name] = float(_plain(value) if hasattr(value, "item") else value)
        # torch raises RuntimeError for tensors of many elements
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise ConfigError(
                f"metrics: {name!r}={value!r} is not a number, or its name is not a string: give "
                "an int or a float, under a name that is a string"
            ) from None
    return found


def read_notes(store: ObjectStore, uri: CheckpointURI, retrier: Retrier) -> Notes:
    """Reads the notes of a committed checkpoint; returns empty notes if none were saved with it.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        CheckpointCorruptError: If the notes are damaged.
        CheckpointReplacedError: If the checkpoint was replaced during each of several reads.
        StoreError: If the store refuses or stays unreachable.
    """
    key = uri.key(METADATA)

    def read() -> bytes:
        commit = store.head(key)
        start = max(0, commit.size - TAIL)
        return notes_at_end(read_range(store, commit, start, commit.size), store.uri(key))

    try:
        data = retry_if_replaced(lambda: retrier.call(read))
    except ObjectNotFoundError as error:
        raise CheckpointNotFoundError(
            "there is no committed checkpoint here: check the location", uri=str(uri)
        ) from error
    return Notes.from_json(data, store.uri(key))


def _plain(value: Any) -> Any:
    """Converts a scalar of numpy or torch to a Python number.

    Raises:
        TypeError: If the value has no method ``item``, as the scalars of both libraries have.
        ValueError: If it is an array of numpy with several elements.
        RuntimeError: If it is a tensor with several elements.
    """
    if not hasattr(value, "item"):
        raise TypeError(f"an object of class {type(value).__name__} can't be written as JSON")
    return value.item()


def _number(value: Any) -> float:
    if isinstance(value, str):
        return _SPECIAL[value]
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
