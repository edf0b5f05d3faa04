"""Changes torch's own ``save`` and ``load`` so that they accept locations in stores.

Given ``s3://bucket/run``, a ``FileSystemWriter`` of torch saves to a folder named ``s3:`` in the
working directory and reports success. So functions of torch are replaced, all or none:
``_storage_setup``, in which ``save``, ``load`` and ``async_save`` choose a writer or reader by
``checkpoint_id``, and the constructors of ``FileSystemWriter`` and ``FileSystemReader`` and, if
fsspec is installed, of ``FsspecWriter`` and ``FsspecReader``, which frameworks call themselves.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import ConfigError, InstallError
from cloudckpt.fork import module_lock
from cloudckpt.uri import CLOUD_SCHEMES, CheckpointURI, text_of, unfolded

__all__ = ["chosen_config", "install", "uninstall"]

_DCP = "torch.distributed.checkpoint"
_CHOOSING = ("_storage_utils", "state_dict_saver", "state_dict_loader")
"""The modules that have ``_storage_setup``: the first defines it, the others import it by name."""
_FSSPEC = ("_fsspec_filesystem", "fsspec_filesystem")  # torch 2.15: without the underscore
_HEEDED = {"self", "path", "overwrite", "cache_staged_state_dict", "per_thread_copy_ahead"}
_HEEDED |= {"single_file_per_rank", "sync_files", "thread_count"}
"""Parameters of torch's classes that are translated, or do not change what is saved."""
_CLOUDS = tuple(f"{scheme}://" for scheme in CLOUD_SCHEMES)

_lock = module_lock()
_replaced: list[tuple[Any, str, Any]] = []
"""Owner, name and original value of each attribute that was replaced in torch."""
_chosen: tuple[Config | None, bool] = (None, False)


def chosen_config() -> Config | None:
    """Returns the ``config`` of the last :func:`install`; None if not installed or not given."""
    return _chosen[0]


def install(config: Config | None = None, trust_pickle: bool = False) -> None:
    """Replaces functions of torch in this process; implements :func:`cloudckpt.install`.

    If the functions are replaced already, only the options change.

    Raises:
        InstallError: If this version of torch lacks one of the functions, or has it with other
            parameters; nothing is replaced then.
        ConfigError: If ``config`` is not a Config.
    """
    global _chosen
    if config is not None:
        config_or_default(config)
    with _lock:
        changes = [] if _replaced else list(_changes())
        _chosen = (config, trust_pickle)
        for owner, name, value in changes:
            _replaced.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)


def uninstall() -> None:
    """Reverts :func:`install`; does nothing if it was not called."""
    global _chosen
    with _lock:
        _chosen = (None, False)
        while _replaced:
            setattr(*_replaced.pop())


def _changes() -> Iterator[tuple[Any, str, Any]]:
    for name in _CHOOSING:
        original = _in_torch(name, "_storage_setup", "storage", "checkpoint_id", "reader")
        yield sys.modules[f"{_DCP}.{name}"], "_storage_setup", _choosing(original)
    classes = [("filesystem", "FileSystem")]
    if find_spec("fsspec") is not None:  # without fsspec, torch has no classes for it
        old, new = _FSSPEC
        classes.append((old if find_spec(f"{_DCP}.{old}") else new, "Fsspec"))
    for module, prefix in classes:
        for ours, name in ((CloudStorageWriter, "Writer"), (CloudStorageReader, "Reader")):
            theirs = _in_torch(module, f"{prefix}{name}", "path")
            yield theirs, "__init__", _becoming(theirs, ours)


def _in_torch(module: str, name: str, *parameters: str) -> Any:
    """Returns a function or class of torch, after checking its first parameters.

    Raises:
        InstallError: If it does not exist, or has other parameters.
    """
    home = f"{_DCP}.{module}"
    theirs = getattr(importlib.import_module(home), name, None) if find_spec(home) else None
    has = tuple(inspect.signature(theirs).parameters) if callable(theirs) else ()
    if has[: len(parameters)] != parameters:
        raise InstallError(
            f"this cloudckpt does not know this torch, whose {module}.{name} "
            f"{'takes ' + ', '.join(has) if has else 'is missing'}: use cloudckpt.save and "
            "cloudckpt.load, or install another version of torch or cloudckpt"
        )
    return theirs


def _in_store(location: object) -> str | None:
    """Returns the URI of a location in a store; None for a location that is left to torch.

    Raises:
        InvalidURIError: If the location is an invalid URI of a store, or a URI that ``pathlib`` has
            shortened, such as ``s3:/bucket``.
    """
    text = text_of(location) or ""
    is_ours = unfolded(text) is not None or text.lower().startswith(_CLOUDS)
    if not (is_ours or CheckpointURI.accepts(text)):
        return None
    uri = CheckpointURI.parse(text)
    return str(uri) if uri.is_cloud else None


def _options(ours: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments for cloudckpt's writer or reader class.

    Args:
        ours: cloudckpt's class.
        given: The arguments for torch's class, by name; only ``overwrite`` is used.
    """
    config, trust_pickle = _chosen
    if "overwrite" in given:
        config = replace(config_or_default(config), overwrite=bool(given["overwrite"]))
    more = {"trust_pickle": trust_pickle} if ours is CloudStorageReader else {}
    return {"config": config, **more}


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _storage_setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        uri = None if storage else _in_store(checkpoint_id)
        if uri is None:
            return original(storage, checkpoint_id, reader)
        ours = CloudStorageReader if reader else CloudStorageWriter
        return ours(uri, **_options(ours, {}))

    return _storage_setup


def _becoming(theirs: Any, ours: type[Any]) -> Callable[..., None]:
    """Returns an ``__init__`` for torch's class that makes an ``ours`` of it for a path in a store.

    An object of a derived class keeps its class: torch's own ``__init__`` is called if the class
    accepts the URI; otherwise an InstallError is raised. Arguments of torch's class that have no
    meaning in a store raise a ConfigError if they are set.
    """
    original = theirs.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(self, *args, **kwargs).arguments
        uri = _in_store(given["path"])
        if uri is None or (type(self) is not theirs and type(self).validate_checkpoint_id(uri)):
            original(self, *args, **kwargs)
            return
        if type(self) is not theirs:
            raise InstallError(
                f"{type(self).__name__} can't use a URI, because it derives from torch's "
                f"{theirs.__name__}: derive it from cloudckpt.{ours.__name__}",
                uri=uri,
            )
        for name, value in given.items():
            if name not in _HEEDED and value and value != signature.parameters[name].default:
                raise ConfigError(
                    f"torch's {theirs.__name__} can't take "
                    f"{', '.join(value) if isinstance(value, dict) else name} with a URI: leave it "
                    "out, and pass options by cloudckpt.install(config=...)",
                    uri=uri,
                )
        self.__class__ = ours  # __new__ can't be removed from a class without a trace
        ours.__init__(self, uri, **_options(ours, given))

    return __init__
