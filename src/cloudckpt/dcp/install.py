"""Teaches stock ``torch.distributed.checkpoint`` to take cloud URIs as ``checkpoint_id``."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import InstallError, InvalidURIError
from cloudckpt.uri import CLOUD_SCHEMES, CheckpointURI

__all__ = ["install", "uninstall"]

_SETUP = "_storage_setup"
_PROCESS = "_ProcessBasedAsyncCheckpointExecutor"
_lock = threading.Lock()
_replaced: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Makes ``dcp.save``, ``async_save`` and ``load`` use cloudckpt for ``s3://``, ``gs://`` and ``az://``.

    For frameworks that only pass a path on. Other locations, and calls that name a storage writer
    or reader, go to torch as before. Calling it again does nothing; :func:`uninstall` reverts it.

    Raises:
        InstallError: If the running torch does not look as expected; nothing is changed then.
    """
    with _lock:
        if _replaced:
            return
        saver, loader, storage = _modules()
        original = storage._storage_setup
        setup = _choosing(original)
        executor = _carrying(saver._ProcessBasedAsyncCheckpointExecutor)
        for module, name, value in (
            (storage, _SETUP, setup),
            (saver, _SETUP, setup),
            (loader, _SETUP, setup),
            (saver, _PROCESS, executor),
        ):
            _replaced.append((module, name, getattr(module, name)))
            setattr(module, name, value)


def uninstall() -> None:
    """Reverts :func:`install`; does nothing if it was not called."""
    with _lock:
        while _replaced:
            module, name, value = _replaced.pop()
            setattr(module, name, value)


def _modules() -> tuple[Any, Any, Any]:
    try:
        from torch.distributed.checkpoint import (
            _storage_utils,
            state_dict_loader,
            state_dict_saver,
        )
    except ImportError as exc:
        raise InstallError(f"this torch keeps its checkpoint code elsewhere: {exc}") from exc
    for module, name in (
        (_storage_utils, _SETUP),
        (state_dict_saver, _SETUP),
        (state_dict_loader, _SETUP),
        (state_dict_saver, _PROCESS),
    ):
        if not hasattr(module, name):
            raise InstallError(
                f"{module.__name__} has no {name}: this torch is newer than this cloudckpt knows; "
                "use cloudckpt.save and load, or pass storage_writer= and storage_reader="
            )
    parameters = list(inspect.signature(_storage_utils._storage_setup).parameters)
    if parameters != ["storage", "checkpoint_id", "reader"]:
        raise InstallError(
            f"{_SETUP} takes {parameters}: this torch is newer than this cloudckpt knows; "
            "use cloudckpt.save and load, or pass storage_writer= and storage_reader="
        )
    return state_dict_saver, state_dict_loader, _storage_utils


def _is_ours(checkpoint_id: object) -> bool:
    if not isinstance(checkpoint_id, str):
        return False
    scheme, separator, _ = checkpoint_id.partition("://")
    if not separator or scheme in CLOUD_SCHEMES:
        return bool(separator)
    try:
        return CheckpointURI.parse(checkpoint_id).is_cloud  # abfss:// and https:// of Azure
    except InvalidURIError:
        return False


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    def _storage_setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        if not storage and _is_ours(checkpoint_id):
            kind = CloudStorageReader if reader else CloudStorageWriter
            return kind(checkpoint_id)
        return original(storage, checkpoint_id, reader)

    return _storage_setup


def _carrying(original: Any) -> Any:
    """The executor of process mode, whose daemon knows nothing of ``install``."""

    class _Executor(original):  # type: ignore[misc]
        def execute_save(self, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("storage_writer") and _is_ours(kwargs.get("checkpoint_id")):
                kwargs["storage_writer"] = CloudStorageWriter(kwargs["checkpoint_id"])
            return super().execute_save(*args, **kwargs)

    return _Executor
