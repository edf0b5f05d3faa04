"""torch's pickle at the beginning of ``.metadata``, read without running it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.checkpoint.described import UnknownNameError
from cloudckpt.checkpoint.inert_pickle import RefusedError, full_name, home
from cloudckpt.checkpoint.metadata_fields import build
from cloudckpt.checkpoint.trailer import pickle_in
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError
from cloudckpt.fork import module_lock
from cloudckpt.gc_pause import paused_gc

__all__ = ["add_safe_metadata_globals", "load_metadata"]

_SAFE: set[type[Any]] = set()
_safe_lock = module_lock()


def add_safe_metadata_globals(classes: Iterable[type[Any]]) -> None:
    """Lets ``.metadata`` hold instances of these classes, for custom planners and writers.

    Only name classes whose construction from arbitrary arguments is harmless.
    """
    with _safe_lock:
        by_name = {_name(cls): cls for cls in (*_SAFE, *classes)}  # a class defined again replaces
        _SAFE.clear()
        _SAFE.update(by_name.values())


def _name(cls: type[Any]) -> str:
    return full_name(cls.__module__, cls.__qualname__)


class _TrustingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(home(module), name)


def load_metadata(data: bytes | bytearray, uri: str, *, trust_pickle: bool = False) -> Metadata:
    """Reads the pickle in ``.metadata``, ours or another writer's.

    Raises:
        UntrustedPickleError: If it names a class or function that is not on the allow-list.
        CheckpointCorruptError: If it is damaged, or not metadata.
    """
    body = pickle_in(data, uri)
    try:
        with paused_gc():
            if trust_pickle:
                metadata = _TrustingUnpickler(io.BytesIO(body)).load()
            else:
                with _safe_lock:
                    allowed = {_name(cls): cls for cls in _SAFE}
                metadata = build(data, body.nbytes, allowed)
    except (MemoryError, Warning):
        raise
    except UnknownNameError as unknown:
        raise UntrustedPickleError(
            f"the checkpoint's metadata names {unknown}, which is not on the allow-list: if you "
            "trust whoever can write to this location, pass trust_pickle=True, or allow the class "
            "by cloudckpt.format_utils.add_safe_metadata_globals([...])",
            uri=uri,
        ) from None
    except RefusedError as refused:
        raise UntrustedPickleError(
            f"the checkpoint's metadata {refused}, as no writer of checkpoints does: load nothing "
            "from this location, unless you trust whoever can write to it and pass "
            "trust_pickle=True",
            uri=uri,
        ) from None
    except Exception as exc:  # the user's classes, or any where all are trusted, may raise anything
        raise CheckpointCorruptError(
            "the metadata can't be read: it is damaged, or not that of a checkpoint",
            uri=uri,
            cause=exc,
        ) from exc
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(
            f"the metadata is a {type(metadata).__name__}, not torch's Metadata", uri=uri
        )
    return metadata
