"""``install``: stock ``torch.distributed.checkpoint`` takes cloud URIs, or says that it can't.

What is replaced, and why that is all of it. torch's checkpoint stack reaches the disk in four ways:

- through ``FileSystemWriter`` and ``Reader``, ``FsspecWriter`` and ``Reader`` and what is derived
  from them. Every path of theirs passes through a method of the two ``FileSystem`` classes, which
  therefore refuse; before that, ``_storage_setup`` (where ``save``, ``load`` and ``async_save``
  choose by ``checkpoint_id``) and the four constructors make ours instead.
- through ``torch.save`` and ``torch.load`` (``format_utils``, the experimental checkpointers),
  which open a path in one function each.
- by ``open`` and ``makedirs`` of their own: the consolidation of safetensors, the stager that keeps
  replicas on disk, the experimental writer and reader.
- in a process of its own, to which nothing of ``install`` comes by itself: the daemon of
  ``async_save`` is handed our writer, the experimental one installs before it begins.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from cloudckpt.config import Config
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.roads import (
    Options,
    becoming_ours,
    guarded,
    keep_local,
    keep_off,
    our_uri,
    paths_of,
)
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import InstallError
from cloudckpt.fork import ModuleLock
from cloudckpt.stores.listings import forget_listings

__all__ = ["install", "uninstall"]

_DCP = "torch.distributed.checkpoint"
_SETUP = "_storage_setup"
_THREAD = "_ThreadBasedAsyncCheckpointExecutor"
_PROCESS = "_ProcessBasedAsyncCheckpointExecutor"
_OPENED_BY_TORCH = (
    ("torch.serialization", "_open_file_like", "torch.load"),
    ("torch.serialization", "_open_zipfile_writer", "torch.save"),
    (f"{_DCP}._consolidate_hf_safetensors", "_consolidate_safetensors_files", "consolidation"),
    (f"{_DCP}._consolidate_hf_safetensors", "_write_overall_metadata_file", "consolidation"),
    (f"{_DCP}.staging", "_ReplicationStager.__init__", "_ReplicationStager"),
)
"""What opens files without one of the file systems: module, function, and its name in messages."""
_OPENED_BY_EXPERIMENTS = (
    (f"{_DCP}._experimental.checkpoint_writer", "CheckpointWriter.write", "CheckpointWriter"),
    (f"{_DCP}._experimental.checkpoint_reader", "CheckpointReader.read", "CheckpointReader"),
)

_Change = tuple[Any, str, Any]
_lock = ModuleLock()
_replaced: list[_Change] = []
_chosen = Options()


def install(config: Config | None = None, trust_pickle: bool = False) -> None:
    """Makes ``dcp.save``, ``async_save`` and ``load`` use cloudckpt for ``s3://``, ``gs://`` and ``az://``.

    For frameworks that only pass a path on, or that make torch's ``FileSystemWriter`` and
    ``Reader`` or ``FsspecWriter`` and ``Reader`` themselves: these become ours where they are given
    a location in a store, and keep their names for all others. From now on nothing in torch's
    checkpoint code, and neither ``torch.save`` nor ``torch.load``, uses a local folder named
    ``s3:``, ``gs:`` or ``az:``: what can't become ours raises :class:`InvalidURIError` for a
    location that has lost a slash, as in ``Path("s3://bucket/run")``, and :class:`InstallError` for
    classes such as ``HuggingFaceStorageWriter`` that only know files. Other locations, and writers
    and readers of other libraries, are left alone.

    Calling it again replaces the options, also for what was installed before; :func:`uninstall`
    reverts it. It holds for this process: call it in each that uses torch's functions.

    Args:
        config: Options of the writers and readers that are made instead of torch's; read from the
            environment where they are not given.
        trust_pickle: Whether pickles in the checkpoints that they load may run any code.

    Raises:
        InstallError: If the running torch does not look as expected; nothing is changed then.
    """
    global _chosen
    with _lock:
        changes = [] if _replaced else list(_changes())
        _chosen = Options(config, trust_pickle)
        for owner, name, value in changes:
            _replaced.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)


def uninstall() -> None:
    """Reverts :func:`install`; does nothing if it was not called.

    Writers and readers that have become ours stay so.
    """
    with _lock:
        while _replaced:
            owner, name, value = _replaced.pop()
            setattr(owner, name, value)


def _options() -> Options:
    return _chosen


def _changes() -> Iterator[_Change]:
    storage, saver, loader = (
        _module(f"{_DCP}.{name}")
        for name in ("_storage_utils", "state_dict_saver", "state_dict_loader")
    )
    original = _in(storage, _SETUP, "storage", "checkpoint_id", "reader")
    for module in (storage, saver, loader):
        _in(module, _SETUP)
        yield module, _SETUP, _choosing(original)
    yield saver, _THREAD, _settling(_in(saver, _THREAD))
    process = _in(saver, _PROCESS)
    _in(process, "_execute_save_impl")
    yield saver, _PROCESS, _forgetting(_settling(process))
    yield from _file_systems()
    for where in _OPENED_BY_TORCH:
        yield _refusing(*where)
    yield from _experimental()


def _file_systems() -> Iterator[_Change]:
    files, fsspec = _module(f"{_DCP}.filesystem"), _fsspec_module()
    yield from _of_file_system(_in(files, "FileSystem"), "torch's FileSystem", keep_local)
    yield from _constructors(files, "FileSystem")
    if fsspec is not None:
        name = "_FileSystem" if hasattr(fsspec, "_FileSystem") else "FileSystem"  # 2.15, before
        yield from _of_file_system(_in(fsspec, name), "torch's FileSystem for fsspec", keep_off)
        yield from _constructors(fsspec, "Fsspec")


def _of_file_system(kind: Any, road: str, check: Callable[..., None]) -> Iterator[_Change]:
    """Every method, so that none of a later torch is forgotten."""
    for name in ("init_path", "create_stream", "mkdir", "rename", "rm_file"):
        _in(kind, name)
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and paths_of(method):
            yield kind, name, guarded(method, road, check)


def _constructors(module: Any, prefix: str) -> Iterator[_Change]:
    for reads in (False, True):
        kind = _in(module, prefix + ("Reader" if reads else "Writer"))
        _in(kind, "__init__", "self", "path", more=True)
        is_remote = prefix == "Fsspec"
        yield kind, "__init__", becoming_ours(kind, _options, reads=reads, is_remote=is_remote)


def _experimental() -> Iterator[_Change]:
    try:
        process = importlib.import_module(f"{_DCP}._experimental.checkpoint_process")
    except ModuleNotFoundError:  # torch may drop it
        return
    for where in _OPENED_BY_EXPERIMENTS:
        yield _refusing(*where)
    kind = _in(process, "CheckpointProcess")
    begin = _in(kind, "__init__")
    if "subprocess_init_fn" not in inspect.signature(begin).parameters:
        raise _unlike(kind.__name__, "can't be told what to do first")
    yield kind, "__init__", _installing_in_its_process(begin)


def _refusing(module: str, path: str, road: str) -> _Change:
    owner: Any = _module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = _in(owner, part)
    found = _in(owner, name)
    if not paths_of(found):
        raise _unlike(road, "takes no path")
    return owner, name, guarded(found, road, keep_local)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise InstallError(f"this torch keeps its checkpoint code elsewhere: {exc}") from exc


def _fsspec_module() -> Any:
    """Torch's module for fsspec; None if that is not there, so that torch can't use it either."""
    try:
        return importlib.import_module(f"{_DCP}.fsspec_filesystem")  # torch 2.15
    except ModuleNotFoundError:
        pass
    try:
        return importlib.import_module(f"{_DCP}._fsspec_filesystem")
    except ImportError as exc:
        if (exc.name or "").startswith("torch."):
            raise _unlike(_DCP, "has no module for fsspec") from exc
        return None


def _in(owner: Any, name: str, *parameters: str, more: bool = False) -> Any:
    """An attribute of torch, with these parameters (and more behind them) if any are named."""
    found = vars(owner).get(name)
    if found is None:
        raise _unlike(owner.__name__, f"has no {name}")
    if parameters:
        has = tuple(inspect.signature(found).parameters)
        if (has[: len(parameters)] if more else has) != parameters:
            raise _unlike(f"{owner.__name__}.{name}", f"takes {', '.join(has)}")
    return found


def _unlike(what: str, how: str) -> InstallError:
    return InstallError(
        f"{what} {how}: this torch is newer than this cloudckpt knows; use cloudckpt.save and "
        "load, or pass storage_writer= and storage_reader="
    )


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _storage_setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        if storage:
            return original(storage, _as_known(storage, checkpoint_id), reader)
        uri = our_uri(checkpoint_id)
        if uri is not None:
            return _chosen.make(uri, reads=reader)
        keep_off(checkpoint_id, "torch")
        return original(storage, checkpoint_id, reader)

    return _storage_setup


def _as_known(storage: Any, checkpoint_id: Any) -> Any:
    """The location as a string if the storage is ours: path objects may be any library's."""
    if isinstance(storage, (CloudStorageWriter, CloudStorageReader)):
        return our_uri(checkpoint_id) or checkpoint_id
    return checkpoint_id


def _settling(original: Any) -> Any:
    """An executor of ``async_save`` that chooses the writer, or refuses, when it is called.

    Later would be in a thread, whose future nobody may ask, or in a daemon that knows nothing of
    ``install``.
    """

    class _Executor(original):  # type: ignore[misc]
        def execute_save(
            self, *args: Any, checkpoint_id: Any = None, storage_writer: Any = None, **kwargs: Any
        ) -> Any:
            if storage_writer:
                checkpoint_id = _as_known(storage_writer, checkpoint_id)
                files = type(getattr(storage_writer, "fs", None))
                if files.__module__.startswith("torch."):  # its reset would refuse, elsewhere
                    check = keep_local if files is FileSystem else keep_off
                    check(checkpoint_id, type(storage_writer).__name__)
            elif (uri := our_uri(checkpoint_id)) is not None:
                checkpoint_id, storage_writer = uri, _chosen.make(uri, reads=False)
            else:
                keep_off(checkpoint_id, "torch")
            return super().execute_save(
                *args, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **kwargs
            )

    return _Executor


def _forgetting(original: Any) -> Any:
    """The executor of process mode: what its daemon has saved, this process may have listed."""

    class _Executor(original):  # type: ignore[misc]
        @staticmethod
        def _execute_save_impl(*args: Any, **kwargs: Any) -> Any:
            try:
                return original._execute_save_impl(*args, **kwargs)
            finally:  # and not by a callback of the future, whose result can be had before that
                forget_listings()

    return _Executor


@dataclass(frozen=True)
class _Installed:
    """Installs in a new process, then does what that was to do first."""

    options: Options
    begin: Callable[..., None]

    def __call__(self, *args: Any) -> None:
        install(self.options.config, self.options.trust_pickle)
        self.begin(*args)


def _installing_in_its_process(original: Callable[..., Any]) -> Any:
    """The constructor of torch's experimental saving process."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        begin = given.arguments["subprocess_init_fn"]
        given.arguments["subprocess_init_fn"] = _Installed(_chosen, begin)
        original(*given.args, **given.kwargs)

    return __init__
