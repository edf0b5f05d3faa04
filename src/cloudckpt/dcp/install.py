"""``install``: stock ``torch.distributed.checkpoint`` takes cloud URIs or refuses them.

torch's file writer and reader treat any string as a local path: given ``s3://bucket/run`` they save
to a folder named ``s3:`` in the working directory and report success. To prevent that, ``install``
replaces attributes of torch. These suffice because torch's checkpoint code reaches the disk in four
ways:

- through ``FileSystemWriter`` and ``Reader``, ``FsspecWriter`` and ``Reader`` and their subclasses.
  All their paths pass through methods of the two ``FileSystem`` classes, which therefore refuse
  cloud URIs. Before that, ``_storage_setup`` (where ``save``, ``load`` and ``async_save`` choose by
  ``checkpoint_id``) and the four constructors make cloudckpt's writer or reader instead.
- through ``torch.save`` and ``torch.load`` (``format_utils``, the experimental checkpointers), each
  of which opens paths in one function.
- by calling ``open`` and ``makedirs`` directly: the consolidation of safetensors, the stager that
  keeps replicas on disk, the experimental writer and reader.
- in a separate process, which does not inherit ``install``: the daemon of ``async_save`` receives
  our writer, the experimental one installs before it begins.

A URI that ``pathlib`` has folded (``s3:/bucket/run``) is refused and never unfolded: code that
folds a path also creates folders and files next to the checkpoint, and all of these would be lost.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.save_steps import clean_up_after, save_by_steps
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter
from cloudckpt.errors import ConfigError, InstallError, InvalidURIError
from cloudckpt.fork import module_lock
from cloudckpt.stores.listings import forget_listings
from cloudckpt.uri import CLOUD_SCHEMES, CheckpointURI, text_of, unfolded

__all__ = ["Change", "chosen_config", "install", "our_uri", "uninstall"]

_DCP = "torch.distributed.checkpoint"
_OPENED_BY_TORCH = (
    ("torch.serialization", "_open_file_like", "torch.load"),
    ("torch.serialization", "_open_zipfile_writer", "torch.save"),
    (f"{_DCP}._consolidate_hf_safetensors", "_consolidate_safetensors_files", "consolidation"),
    (f"{_DCP}._consolidate_hf_safetensors", "_write_overall_metadata_file", "consolidation"),
    (f"{_DCP}.staging", "_ReplicationStager.__init__", "_ReplicationStager"),
)
"""Functions that open files directly: module, function, and its name in messages."""
_OPENED_BY_EXPERIMENTS = (
    (f"{_DCP}._experimental.checkpoint_writer", "CheckpointWriter.write", "CheckpointWriter"),
    (f"{_DCP}._experimental.checkpoint_reader", "CheckpointReader.read", "CheckpointReader"),
)
_PATH = re.compile(r"path|_dir$|^name_or_buffer$")
"""Names of torch's parameters that are paths."""
_OF_SPEED = {"cache_staged_state_dict", "per_thread_copy_ahead", "single_file_per_rank"}
_OF_SPEED |= {"sync_files", "thread_count"}
"""Options of torch's writers that affect speed, not what is saved."""

Change = tuple[Any, str, Any]
"""An object of torch, the name of an attribute, and the replacement."""


@dataclass(frozen=True)
class _Options:
    """Options of the writers and readers that replace torch's."""

    config: Config | None = None
    trust_pickle: bool = False

    def arguments(self, *, reads: bool) -> dict[str, Any]:
        """The constructor's arguments besides the location."""
        common = {"config": self.config}
        return common | {"trust_pickle": self.trust_pickle} if reads else common


_OURS: dict[bool, Any] = {True: CloudStorageReader, False: CloudStorageWriter}
_lock = module_lock()
_replaced: list[Change] = []
_chosen = _Options()


def chosen_config() -> Config | None:
    """The options that :func:`install` was given."""
    return _chosen.config


def install(
    config: Config | None = None,
    trust_pickle: bool = False,
    more: Callable[[], Iterator[Change]] = lambda: iter(()),
) -> None:
    """Changes torch's part of this process; see :func:`cloudckpt.install`, which has the contract.

    Args:
        config: Options of the writers and readers that replace torch's; those not given are read
            from the environment.
        trust_pickle: Whether pickles in loaded checkpoints may run arbitrary code.
        more: Further changes, from packages above this one.

    Raises:
        ConfigError: If the options are something else.
        InstallError: If the running torch does not look as expected; nothing is changed then.
    """
    global _chosen
    if config is not None:
        config_or_default(config)
    with _lock:
        changes = [] if _replaced else [*_changes(), *more()]
        _chosen = _Options(config, trust_pickle)
        for owner, name, value in changes:
            _replaced.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)


def uninstall() -> None:
    """Reverts :func:`install`; does nothing if it was not called.

    Writers and readers that were already replaced stay replaced.
    """
    with _lock:
        while _replaced:
            owner, name, value = _replaced.pop()
            setattr(owner, name, value)


def _changes() -> Iterator[Change]:
    storage, saver, loader = (
        _module(f"{_DCP}.{name}")
        for name in ("_storage_utils", "state_dict_saver", "state_dict_loader")
    )
    setup = "_storage_setup"
    original = _in(storage, setup, "storage", "checkpoint_id", "reader")
    for module in (storage, saver, loader):
        _in(module, setup)
        yield module, setup, _choosing(original)
    steps = "_save_state_dict"
    taken = _in(saver, steps, "state_dict", "storage_writer", more=True)
    yield saver, steps, _with_structure(taken)
    threads, process = "_ThreadBasedAsyncCheckpointExecutor", "_ProcessBasedAsyncCheckpointExecutor"
    yield saver, threads, _choosing_at_once(_in(saver, threads))
    _in(_in(saver, process), "_execute_save_impl")
    yield saver, process, _forgetting_listings(_choosing_at_once(_in(saver, process)))
    yield from _file_systems()
    for where in _OPENED_BY_TORCH:
        yield _refusing(*where)
    yield from _experimental()


def _file_systems() -> Iterator[Change]:
    files, fsspec = _module(f"{_DCP}.filesystem"), _fsspec_module()
    yield from _of_file_system(_in(files, "FileSystem"), "torch's FileSystem", _refuse_cloud_path)
    yield from _constructors(files, "FileSystem")
    if fsspec is not None:
        name = "_FileSystem" if hasattr(fsspec, "_FileSystem") else "FileSystem"  # 2.15; older
        kind = _in(fsspec, name)
        yield from _of_file_system(kind, "torch's FileSystem for fsspec", _refuse_cloud)
        yield from _constructors(fsspec, "Fsspec")


def _of_file_system(kind: Any, part: str, check: Callable[..., None]) -> Iterator[Change]:
    """Guards every method that takes a path, including those of later torch versions."""
    for name in ("init_path", "create_stream", "mkdir", "rename", "rm_file"):
        _in(kind, name)
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and _paths_of(method):
            yield kind, name, _guarded(method, part, check)


def _constructors(module: Any, prefix: str) -> Iterator[Change]:
    for reads in (False, True):
        kind = _in(module, prefix + ("Reader" if reads else "Writer"))
        _in(kind, "__init__", "self", "path", more=True)
        is_remote = prefix == "Fsspec"
        yield kind, "__init__", _becoming_ours(kind, reads=reads, is_remote=is_remote)


def _experimental() -> Iterator[Change]:
    try:
        process = importlib.import_module(f"{_DCP}._experimental.checkpoint_process")
    except ModuleNotFoundError:  # torch may drop it
        return
    for where in _OPENED_BY_EXPERIMENTS:
        yield _refusing(*where)
    kind = _in(process, "CheckpointProcess")
    begin = _in(kind, "__init__")
    if "subprocess_init_fn" not in inspect.signature(begin).parameters:
        raise _unknown_torch(kind.__name__, "can't be told what to do first")
    yield kind, "__init__", _installing_in_its_process(begin)


def _refusing(module: str, path: str, part: str) -> Change:
    owner: Any = _module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = _in(owner, each)
    found = _in(owner, name)
    if not _paths_of(found):
        raise _unknown_torch(part, "takes no path")
    return owner, name, _guarded(found, part, _refuse_cloud_path)


# ---- looking up torch's attributes


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise InstallError(f"this torch keeps its checkpoint code elsewhere: {exc}") from exc


def _fsspec_module() -> Any:
    """Torch's module for fsspec; None if not importable, so that torch can't use it either."""
    for name in ("fsspec_filesystem", "_fsspec_filesystem"):  # torch 2.15; older
        try:
            return importlib.import_module(f"{_DCP}.{name}")
        except ImportError as exc:
            if not (exc.name or "").startswith("torch."):
                return None
    raise _unknown_torch(_DCP, "has no module for fsspec")


def _in(owner: Any, name: str, *parameters: str, more: bool = False) -> Any:
    """An attribute of torch; raises if its parameters differ (``more``: further ones are fine)."""
    found = vars(owner).get(name)
    if found is None:
        raise _unknown_torch(owner.__name__, f"has no {name}")
    if parameters:
        has = tuple(inspect.signature(found).parameters)
        if (has[: len(parameters)] if more else has) != parameters:
            raise _unknown_torch(f"{owner.__name__}.{name}", f"takes {', '.join(has)}")
    return found


def _unknown_torch(what: str, how: str) -> InstallError:
    return InstallError(
        f"{what} {how}: this torch is newer than this cloudckpt knows; use cloudckpt.save and "
        "load, or pass storage_writer= and storage_reader="
    )


# ---- cloud locations


def our_uri(location: object) -> str | None:
    """The location as a string, if it is in a supported store; None leaves it to torch."""
    if isinstance(location, CheckpointURI):
        return str(location)
    text = text_of(location) or ""
    scheme, separator, _ = text.partition("://")
    if not separator or scheme.lower() in CLOUD_SCHEMES:
        return text if separator else None
    try:
        return text if CheckpointURI.parse(text).is_cloud else None  # Azure's other forms
    except InvalidURIError:
        return None


def _refuse_cloud(location: object, part: str, *, folds: bool = False) -> None:
    """Refuses a location that ``part`` would take for a local folder named after a store's scheme.

    Args:
        location: The location, or another value of a parameter.
        part: The part of torch, for messages.
        folds: Whether it treats every string as a path, including fsspec's URLs.

    Raises:
        InvalidURIError: If the location lost a slash; the message gives the string to pass instead.
        InstallError: If the location is valid, but this part of torch can't be redirected to a
            store.
    """
    if not isinstance(location, (str, os.PathLike, CheckpointURI)):
        return
    if (text := text_of(location)) is None:
        return
    folded = str(PurePath(text)) if folds and not isinstance(location, CheckpointURI) else text
    if our_uri(text) is not None or any(unfolded(one) is not None for one in (text, folded)):
        raise _not_redirected(text, part)


_refuse_cloud_path = functools.partial(_refuse_cloud, folds=True)


def _not_redirected(text: str, part: str) -> InstallError:
    return InstallError(
        f"{part} is none of what install() leads to a store, and would use a local folder or "
        "another library; give checkpoint_id= alone to torch's save and load, or use cloudckpt's "
        "own classes and functions",
        uri=str(CheckpointURI.parse(text)),  # which says what is wrong with a folded or unknown one
    )


# ---- replacements of torch's functions and classes


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_storage_setup``: where torch makes a writer or reader for a ``checkpoint_id``."""

    @functools.wraps(original)
    def _storage_setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        if storage:
            return original(storage, _as_known(storage, checkpoint_id), reader)
        if (uri := our_uri(checkpoint_id)) is not None:
            return _OURS[reader](uri, **_chosen.arguments(reads=reader))
        _refuse_cloud(checkpoint_id, "torch")
        return original(storage, checkpoint_id, reader)

    return _storage_setup


def _with_structure(original: Callable[..., Any]) -> Callable[..., Any]:
    """The steps of torch's saver, which does not pass a state dict's nesting to the writer."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _save_state_dict(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        of_torch = given.arguments
        writer, together = of_torch["storage_writer"], of_torch.get("use_collectives", True)
        if not (isinstance(writer, OurWriter) and together) or of_torch.get("coordinator_rank"):
            return original(*args, **kwargs)
        group = Meeting.of(of_torch["process_group"], of_torch["no_dist"]).group
        try:
            planner = of_torch["planner"] or CloudSavePlanner()
            return save_by_steps(of_torch["state_dict"], writer, planner, group)
        except (CheckpointException, RuntimeError) as exc:
            clean_up_after(exc, writer)
            raise

    return _save_state_dict


def _as_known(storage: Any, checkpoint_id: Any) -> Any:
    """The location as a string if the storage is ours: path objects may be from any library."""
    if isinstance(storage, (CloudStorageWriter, CloudStorageReader)):
        return our_uri(checkpoint_id) or checkpoint_id
    return checkpoint_id


def _choosing_at_once(original: Any) -> Any:
    """An executor of ``async_save`` that chooses the writer, or refuses, at the call.

    Any later, it would happen in a thread whose future may never be checked, or in a daemon that
    does not know of ``install``.
    """

    class _Executor(original):  # type: ignore[misc]
        def execute_save(
            self, *args: Any, checkpoint_id: Any = None, storage_writer: Any = None, **kwargs: Any
        ) -> Any:
            if storage_writer:
                checkpoint_id = _as_known(storage_writer, checkpoint_id)
                files = type(getattr(storage_writer, "fs", None))
                if files.__module__.startswith("torch."):  # its reset would refuse too late
                    check = _refuse_cloud_path if files is FileSystem else _refuse_cloud
                    check(checkpoint_id, type(storage_writer).__name__)
            elif (uri := our_uri(checkpoint_id)) is not None:
                checkpoint_id, storage_writer = uri, CloudStorageWriter(uri, config=_chosen.config)
            else:
                _refuse_cloud(checkpoint_id, "torch")
            return super().execute_save(
                *args, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **kwargs
            )

    return _Executor


def _forgetting_listings(original: Any) -> Any:
    """The executor of process mode; drops cached listings, which the daemon's save has outdated."""

    class _Executor(original):  # type: ignore[misc]
        @staticmethod
        def _execute_save_impl(*args: Any, **kwargs: Any) -> Any:
            try:
                return original._execute_save_impl(*args, **kwargs)
            finally:  # not in a callback, which runs after the result is available
                forget_listings()

    return _Executor


def _paths_of(function: Callable[..., Any]) -> list[str]:
    """The names of a torch function's parameters that are paths."""
    return [name for name in inspect.signature(function).parameters if _PATH.search(name)]


_brings_its_own: ContextVar[bool] = ContextVar("cloudckpt_brings_its_own", default=False)
"""Whether a constructor is running whose object will get a file system other than torch's for local
paths: it calls ``init_path`` before it has that file system."""


def _guarded(original: Callable[..., Any], part: str, check: Callable[..., None]) -> Any:
    """Wraps a function of torch so that it refuses locations in stores."""
    signature, paths = inspect.signature(original), _paths_of(original)
    is_pure = original.__name__ == "init_path"

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not (is_pure and check is _refuse_cloud_path and _brings_its_own.get()):
            given = signature.bind(*args, **kwargs).arguments
            for name in paths:
                check(given.get(name), part)
        return original(*args, **kwargs)

    return method


def _becoming_ours(kind: type, *, reads: bool, is_remote: bool) -> Any:
    """A constructor of torch's class that turns the object into ours if the location is in a store.

    The class is changed, not its name in a module, since frameworks have already imported it.
    Objects of subclasses keep their class: only the subclass knows what it adds. They are refused,
    unless the class accepts such locations (``validate_checkpoint_id``), as those of the stores'
    own libraries do, which bring their own file system; those of fsspec's classes always.
    """
    original = vars(kind)["__init__"]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(self, *args, **kwargs).arguments
        uri = our_uri(given["path"])
        if uri is not None and type(self) is kind:
            arguments = _chosen.arguments(reads=reads)
            arguments |= _counterparts(kind, given, _chosen.config)
            # not by __new__, which can't be removed from a class without a trace
            self.__class__ = _OURS[reads]
            _OURS[reads].__init__(self, uri, **arguments)
            return
        if uri is not None and (is_remote or not _takes(type(self), uri)):
            raise _not_redirected(uri, type(self).__name__)
        token = _brings_its_own.set(uri is not None or is_remote or _brings_its_own.get())
        try:
            original(self, *args, **kwargs)
        finally:
            _brings_its_own.reset(token)

    return __init__


def _takes(kind: Any, uri: str) -> bool:
    try:
        return bool(kind.validate_checkpoint_id(uri))
    except Exception:  # noqa: BLE001 - such as that of fsspec, if the store's library is not there
        return False


def _counterparts(kind: Any, given: Mapping[str, Any], config: Config | None) -> dict[str, Any]:
    """Translates the options given to the constructor of torch's class into ours.

    Raises:
        ConfigError: If an option would change what is stored, or where.
    """
    defaults = inspect.signature(kind.__init__).parameters
    for option, value in given.items():
        if option in _OF_SPEED | {"self", "path", "overwrite"} or not value:
            continue
        if value != defaults[option].default:
            named = ", ".join(value) if isinstance(value, dict) else option
            raise ConfigError(
                f"{kind.__name__} was given {named}, which means nothing to cloudckpt; leave it "
                "out, and pass what all locations need to cloudckpt.install(config=...)",
                uri=str(CheckpointURI.parse(our_uri(given["path"]) or "")),
            )
    if "overwrite" not in given:
        return {}
    return {
        "config": dataclasses.replace(config_or_default(config), overwrite=bool(given["overwrite"]))
    }


def _begin_installed(options: _Options, begin: Callable[..., None], *args: Any) -> None:
    """Calls :func:`install` in a new process, then the process's own initial function."""
    install(options.config, options.trust_pickle)
    begin(*args)


def _installing_in_its_process(original: Callable[..., Any]) -> Any:
    """The constructor of torch's experimental saving process."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        begin = functools.partial(_begin_installed, _chosen, given.arguments["subprocess_init_fn"])
        given.arguments["subprocess_init_fn"] = begin
        original(*given.args, **given.kwargs)

    return __init__
