"""All exceptions that cloudckpt raises, as a tree.

::

    CloudCheckpointError
    ├── InvalidURIError               also ValueError
    ├── ConfigError                   also ValueError
    ├── MissingDependencyError        also ImportError
    ├── InstallError                  this torch is unknown, or the class in use takes no URI
    ├── StoreError                    the object store refused, failed or could not be reached
    │   ├── ObjectNotFoundError       also FileNotFoundError
    │   ├── BucketNotFoundError
    │   ├── AccessDeniedError         also PermissionError
    │   ├── CredentialsError          absent, incomplete or refused
    │   │   ├── ExpiredCredentialsError   also TransientStoreError
    │   │   └── ClockError            this machine's clock is wrong
    │   ├── TLSError                  the server is not trusted, or shares no TLS version
    │   ├── WrongRegionError
    │   ├── PreconditionFailedError   the object's state differs from the condition
    │   ├── StorageFullError
    │   ├── InvalidRequestError       the store will never accept this request
    │   │   ├── RangeNotSatisfiableError  the object ends before the range does
    │   │   └── ObjectTooLargeError   the object is larger than its reader allows
    │   └── TransientStoreError       retried; it surfaces only when the retries are used up
    │       ├── ThrottledError
    │       ├── ServerError
    │       └── ConnectionLostError   reset, timed out, stalled or truncated
    ├── TransferCancelledError        stopped as another transfer failed, or cancelled
    └── CheckpointError
        ├── CheckpointNotFoundError   also FileNotFoundError
        ├── CheckpointExistsError     also FileExistsError
        ├── CheckpointConflictError   another writer committed first
        ├── CommitUnknownError        it is unknown whether the commit took place
        ├── DifferentCheckpointsError ranks save to, or load from, different checkpoints
        ├── IncompleteSaveError       a planned item was not written
        ├── CheckpointCorruptError    bytes missing, changed or damaged
        ├── CheckpointReplacedError   overwritten or deleted while it was loaded
        ├── UntrustedPickleError      loading would run code that is not on the allow-list
        ├── KeyCollisionError         also ValueError
        ├── MissingKeyError           also KeyError
        ├── ShapeMismatchError        also ValueError
        ├── UnsupportedTensorError    also TypeError
        ├── UnsupportedValueError     also TypeError
        ├── TensorChangedError        a tensor was written to while it was saved
        ├── RanksFailedError          ranks failed for different reasons, or outside of cloudckpt
        ├── ProcessGroupError         a rank died, or the ranks lost each other
        └── AsyncSaveError            saving in the background
            ├── StagingError          the state can't be copied
            ├── StagingMemoryError    also MemoryError: no room for the copy
            ├── SaveInProgressError   an earlier save has not ended yet
            ├── SaveProcessError      the saving process died, or did not respond
            └── ClosedError           the saver was closed, or made before a fork

Every error survives pickling with its message, URI, item and the text of its cause: torch gathers
the failures of all ranks by pickle, and a cause that does not survive it is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

__all__ = [
    "AccessDeniedError",
    "AsyncSaveError",
    "BucketNotFoundError",
    "CheckpointConflictError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "ClockError",
    "ClosedError",
    "CloudCheckpointError",
    "CommitUnknownError",
    "ConfigError",
    "ConnectionLostError",
    "CredentialsError",
    "Damage",
    "DifferentCheckpointsError",
    "ExpiredCredentialsError",
    "IncompleteSaveError",
    "InstallError",
    "InvalidRequestError",
    "InvalidURIError",
    "KeyCollisionError",
    "MissingDependencyError",
    "MissingKeyError",
    "ObjectNotFoundError",
    "ObjectTooLargeError",
    "PreconditionFailedError",
    "ProcessGroupError",
    "RangeNotSatisfiableError",
    "RanksFailedError",
    "SaveInProgressError",
    "SaveProcessError",
    "ServerError",
    "ShapeMismatchError",
    "StagingError",
    "StagingMemoryError",
    "StorageFullError",
    "StoreError",
    "TLSError",
    "TensorChangedError",
    "ThrottledError",
    "TransferCancelledError",
    "TransientStoreError",
    "UnsupportedTensorError",
    "UnsupportedValueError",
    "UntrustedPickleError",
    "WrongRegionError",
]


class CloudCheckpointError(Exception):
    """The base class of all errors of cloudckpt.

    Attributes:
        message: What failed, why, and what to do.
        uri: The object or checkpoint concerned, without secrets; None if there is none.
        item: The state-dict entry concerned; None if there is none.
        cause: The underlying error as text, as ``__cause__`` does not survive pickling; None if
            there is no such error.
        action: The operation that failed, such as ``save to s3://bucket/run/step-1``; None if
            unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        uri: str | None = None,
        item: str | None = None,
        cause: BaseException | str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.uri = uri
        self.item = item
        self.cause = text_of(cause) if isinstance(cause, BaseException) else cause
        self.action: str | None = None

    def __str__(self) -> str:
        parts = [f"{_plain(self.action)} failed: {self.message}" if self.action else self.message]
        if self.uri is not None and _plain(self.uri) not in parts[0]:
            parts.append(f"at {_plain(self.uri)}")
        if self.item is not None and self.item not in self.message:
            parts.append(f"item {self.item!r}")
        if self.cause is not None and self.cause not in self.message:
            parts.append(f"cause: {self.cause}")
        return " | ".join(parts)


def _plain(text: str) -> str:
    """Replaces percent-encoded ``file://`` URIs in a text by paths, if these can be printed."""
    shown = re.sub(r"file://(\S*%\S*)", lambda found: unquote(found[1]), text)
    return shown if shown.isprintable() else text


def text_of(error: BaseException) -> str:
    """Returns an error as text: its class, message and notes."""
    notes = [f" ({note})" for note in getattr(error, "__notes__", ())]
    return f"{type(error).__name__}: {error}{''.join(notes)}"


class InvalidURIError(CloudCheckpointError, ValueError):
    """A string is not a valid checkpoint location; the message says what to write instead."""


class ConfigError(CloudCheckpointError, ValueError):
    """An option, an argument or an environment variable has an unusable value."""


class MissingDependencyError(CloudCheckpointError, ImportError):
    """An optional package is not installed; the message has the ``pip install`` line."""


class InstallError(CloudCheckpointError):
    """``cloudckpt.install()`` does not support the installed torch or the class in use.

    This cloudckpt does not know the installed version of torch, or a URI was given to a class
    derived from torch's writer or reader for local files.
    """


class StoreError(CloudCheckpointError):
    """The object store refused a request, failed, or could not be reached.

    Attributes:
        certain: Whether the request was certainly not carried out: the store itself said so, with
            an error code in its own format, or the request never left this machine. A gateway's
            response, a lost connection, and a store's timeout or internal error are not certain:
            such a request may have been carried out, or may be later.
        status: The HTTP status of the response; None if there was no response.
    """

    def __init__(self, message: str, *, certain: bool = False, **context: Any) -> None:
        super().__init__(message, **context)
        self.certain = certain
        self.status: int | None = None


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """There is no object under this key."""


class BucketNotFoundError(StoreError):
    """The bucket or container does not exist, or is invisible to these credentials.

    It is not a FileNotFoundError, so that a script that starts a new run on FileNotFoundError does
    not do so because of a mistyped bucket name.
    """


class AccessDeniedError(StoreError, PermissionError):
    """The credentials are valid but lack the permission for this operation."""


class CredentialsError(StoreError):
    """No credentials were found, or the store does not accept them."""


class ClockError(CredentialsError):
    """The store does not accept the time at which a request was signed.

    Attributes:
        ahead: Seconds by which this machine's clock is ahead of the store's; None if unknown. If it
            is about 0, the request was delayed, as in a process that was suspended.
    """

    ahead: float | None = None


class TLSError(StoreError):
    """The client can't establish a trusted TLS connection to the server or proxy.

    A certificate is not trusted, or client and server share no TLS version or cipher.
    """


class WrongRegionError(StoreError):
    """The bucket is in another region than the client was configured for.

    Attributes:
        region: The bucket's region, if the store has named it; else None.
    """

    def __init__(self, message: str, *, region: str | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.region = region


class PreconditionFailedError(StoreError):
    """The object is missing, exists already, or has another version than the condition demands."""


class StorageFullError(StoreError):
    """The disk or the quota is full."""


class InvalidRequestError(StoreError):
    """The store rejects the request itself: sending it again can't help."""


class RangeNotSatisfiableError(InvalidRequestError):
    """The object ends before the requested range does."""


class ObjectTooLargeError(InvalidRequestError):
    """The object is larger than its reader allows; none of it was read."""


class TransientStoreError(StoreError):
    """A failure that is often temporary; raised to the user only after the last retry.

    Attributes:
        retry_after: Seconds that the store asks to wait; None if it does not.
    """

    def __init__(self, message: str, *, retry_after: float | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.retry_after = retry_after


class ExpiredCredentialsError(CredentialsError, TransientStoreError):
    """The store accepted these credentials before, and does not any more.

    New credentials (from a file, a variable, a role, a process) may arrive seconds later: they are
    looked up again until the deadline of the retries.
    """


class ThrottledError(TransientStoreError):
    """The store throttles requests (429, 503 SlowDown)."""


class ServerError(TransientStoreError):
    """The store failed internally (5xx), or sent an error in the body of a 200 response."""


class ConnectionLostError(TransientStoreError):
    """The connection was refused, reset, timed out, stalled, or closed before the last byte.

    Attributes:
        received: Bytes of a download that had arrived; the retry continues after them.
        version: The object version of these bytes; None if the response did not name it.
    """

    def __init__(
        self, message: str, *, received: int = 0, version: str | None = None, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.received = received
        self.version = version


class TransferCancelledError(CloudCheckpointError):
    """The transfer was stopped.

    Another transfer of the same save or load failed, or the caller cancelled or interrupted it.
    """


class CheckpointError(CloudCheckpointError):
    """A checkpoint can't be saved or loaded; the base class of such errors."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this URI."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A checkpoint or file already exists, and ``overwrite`` is off."""


class CheckpointConflictError(CheckpointError):
    """Another writer committed at the URI, or deleted the checkpoint, since this save began."""


class CommitUnknownError(CheckpointError):
    """It is unknown whether the commit took place; it may still take place.

    The store's response to the commit was lost, or a gateway responded in the store's place, and
    later requests did not show for certain what happened. Nothing is deleted, as the commit may
    still be carried out. This is also raised if something fails after the commit, such as in a
    subclass of cloudckpt's writer; the message says so then.
    """


class DifferentCheckpointsError(CheckpointError):
    """The ranks of one save or load use different locations, or different stores."""


class IncompleteSaveError(CheckpointError):
    """Not everything that a save needs was written, or not in time; this call committed nothing."""


@dataclass(frozen=True)
class Damage:
    """Damage to one object of a checkpoint: the object is missing, or has bytes that are wrong.

    Attributes:
        object: The URI of the object.
        item: The state-dict entry; empty if the bytes belong to none, or it is unknown.
        what: The kind of damage, in words.
        start: The offset of the first damaged byte in the object; None if it is unknown which bytes
            are damaged, or if the object is missing.
        stop: The offset after the last damaged byte; None if ``start`` is None.
    """

    object: str
    item: str
    what: str
    start: int | None = None
    stop: int | None = None


class CheckpointCorruptError(CheckpointError):
    """Bytes of the checkpoint are missing, were replaced, or do not match their checksum.

    Attributes:
        damages: The damage found. A verification lists all of it; a load, only the damage in the
            request that failed first. By default one entry for the object at ``uri``; empty if
            ``uri`` is None.
    """

    def __init__(self, message: str, *, damages: Sequence[Damage] = (), **context: Any) -> None:
        super().__init__(message, **context)
        if not damages and self.uri is not None:
            damages = [Damage(self.uri, self.item or "", message.partition(": ")[0])]
        self.damages = tuple(damages)


class CheckpointReplacedError(CheckpointError):
    """A writer overwrote or deleted the checkpoint while it was loaded; nothing is damaged.

    :func:`cloudckpt.load` starts again with the newer checkpoint, and raises this after a few
    times.

    Attributes:
        times: How often this load has noticed a replacement; above 1, it has given up.
        saves: If two ranks have read different saves, the ids of both saves (None for a save
            without an id); else None.
    """

    def __init__(
        self,
        message: str,
        *,
        times: int = 1,
        saves: tuple[str | None, str | None] | None = None,
        **context: Any,
    ) -> None:
        super().__init__(message, **context)
        self.times = times
        self.saves = saves


class UntrustedPickleError(CheckpointError):
    """The checkpoint contains a pickle that would run code outside the allow-list."""


class KeyCollisionError(CheckpointError, ValueError):
    """Different values would need the same name in the checkpoint, or the same memory in a load.

    Two keys of a state dict become the same string, or ranks have different content under one name,
    or tensors of the state dict that share memory (tied weights) have different saved values.
    """


class MissingKeyError(CheckpointError, KeyError):
    """The state dict has a key that the checkpoint lacks."""


class ShapeMismatchError(CheckpointError, ValueError):
    """A tensor's shape differs from its target's, or from the shape that a save has planned.

    This is also raised if the target is not a tensor; if an optimizer has other parameter groups
    than the saved one; or if element types differ, by functions that do not convert them.
    """


class UnsupportedTensorError(CheckpointError, TypeError):
    """A tensor can't be stored faithfully (quantized, sparse, meta), or can't take saved values."""


class UnsupportedValueError(CheckpointError, TypeError):
    """A value of the state dict, such as a lambda, can't be saved, or could not be loaded again."""


class TensorChangedError(CheckpointError):
    """A tensor was modified while it was saved; the bytes sent do not match its checksum."""

    @classmethod
    def of(cls, item: str | None, **context: Any) -> TensorChangedError:
        """Returns the error that names `item` (None: no item); passes `context` to the class."""
        return cls(
            f"{item or 'a tensor'} changed while it was saved, so that its checksum does not "
            "match the uploaded bytes: do not write to it before the save has returned (no "
            "optimizer step, no running kernel), pass a copy, or use async_save, which copies "
            "first",
            item=item,
            **context,
        )


class ProcessGroupError(CheckpointError):
    """The ranks can no longer reach each other: one died, or its connection did.

    Attributes:
        committed: Whether the save in progress is committed nevertheless; None if this rank does
            not know, or there was no save.
    """

    def __init__(self, message: str, *, committed: bool | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.committed = committed


class RanksFailedError(CheckpointError):
    """Ranks failed for different reasons, or outside of cloudckpt; the message lists them.

    Attributes:
        failures: The text of each failure, by rank.
    """

    def __init__(
        self, message: str, *, failures: Mapping[int, str] | None = None, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.failures = dict(failures or {})


class AsyncSaveError(CheckpointError):
    """A background save failed at copying, sending or starting; training can continue."""


class StagingError(AsyncSaveError):
    """The state dict, or an entry of it, can't be made or copied for a background save."""


class StagingMemoryError(AsyncSaveError, MemoryError):
    """There is not enough memory for the staged copy; the message says how much is needed."""


class SaveInProgressError(AsyncSaveError):
    """A background save has not ended in the time allowed."""


class SaveProcessError(AsyncSaveError):
    """The process that sends a save died, could not be started, or stopped responding."""


class ClosedError(AsyncSaveError):
    """The stager, saver or checkpointer was closed, or made before this process was forked."""
