"""What torch's own checkpoint classes do with a location in a store: they become ours, or refuse.

torch's file writer and reader take any string for a local path: given ``s3://bucket/run`` they save
to a folder named ``s3:`` beneath the working directory and report success. Everything here replaces
an attribute of torch while :func:`cloudckpt.install` is in force.

A URI that ``pathlib`` has folded (``s3:/bucket/run``) is refused and never unfolded: who folds a
path also makes folders and writes files next to the checkpoint, all of which would be lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from cloudckpt.config import Config
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import ConfigError, InstallError, InvalidURIError
from cloudckpt.uri import CLOUD_SCHEMES, CheckpointURI, text_of, unfolded

__all__ = ["Options", "becoming_ours", "guarded", "keep_local", "keep_off", "our_uri", "paths_of"]

_OF_SPEED = frozenset(
    {
        "cache_staged_state_dict",
        "per_thread_copy_ahead",
        "single_file_per_rank",
        "sync_files",
        "thread_count",
    }
)
"""Options of torch's writers that say how fast, and not what is saved."""

_PATH = re.compile(r"path|_dir$|^name_or_buffer$")
"""What torch calls its parameters that are paths."""


@dataclass(frozen=True)
class Options:
    """What the writers and readers that are made instead of torch's are given."""

    config: Config | None = None
    trust_pickle: bool = False

    def make(self, uri: str, *, reads: bool) -> CloudStorageWriter | CloudStorageReader:
        """Ours, for a location of ours."""
        made: CloudStorageWriter | CloudStorageReader = _OURS[reads](
            uri, **self.arguments(reads=reads)
        )
        return made

    def arguments(self, *, reads: bool) -> dict[str, Any]:
        """What its constructor takes besides the location."""
        common = {"config": self.config}
        return common | {"trust_pickle": self.trust_pickle} if reads else common


_OURS: dict[bool, Any] = {True: CloudStorageReader, False: CloudStorageWriter}


def our_uri(location: object) -> str | None:
    """The location as a string, if it is in a store of ours; None if it is torch's to judge."""
    if isinstance(location, CheckpointURI):
        return str(location)
    text = text_of(location) or ""
    scheme, separator, _ = text.partition("://")
    if not separator:
        return None
    if scheme.lower() in CLOUD_SCHEMES:
        return text
    try:
        return text if CheckpointURI.parse(text).is_cloud else None  # Azure's other forms
    except InvalidURIError:
        return None


def keep_off(location: object, road: str) -> None:
    """Refuses what ``road`` would take for a local folder named after the scheme of a store.

    Raises:
        InvalidURIError: If the location lost a slash; the message has the string to pass instead.
        InstallError: If it is whole, and this part of torch can't be led to a store.
    """
    if not isinstance(location, (str, os.PathLike, CheckpointURI)):
        return
    text = text_of(location)
    if text is not None and (our_uri(text) is not None or unfolded(text) is not None):
        raise _no_road(text, road)


def keep_local(location: object, road: str) -> None:
    """As :func:`keep_off`, where every string is a path, those that fsspec knows included."""
    keep_off(location, road)
    if isinstance(location, (str, os.PathLike)):
        text = text_of(location)
        if text is not None and unfolded(str(PurePath(text))) is not None:
            raise _no_road(text, road)


def _no_road(text: str, road: str) -> InstallError:
    uri = CheckpointURI.parse(text)  # which names what is wrong with one that is folded or unknown
    return InstallError(
        f"{road} is none of what install() leads to a store, and would use a local folder or "
        "another library; give checkpoint_id= alone to torch's save and load, or use cloudckpt's "
        "own classes and functions",
        uri=str(uri),
    )


_brings_its_own: ContextVar[bool] = ContextVar("cloudckpt_brings_its_own", default=False)


@contextlib.contextmanager
def _constructing(brings_its_own: bool) -> Iterator[None]:
    """The constructor of torch's file writer names a path before another file system takes it."""
    token = _brings_its_own.set(brings_its_own or _brings_its_own.get())
    try:
        yield
    finally:
        _brings_its_own.reset(token)


def paths_of(function: Callable[..., Any]) -> list[str]:
    """Which parameters of a function of torch are paths."""
    return [name for name in inspect.signature(function).parameters if _PATH.search(name)]


def guarded(original: Callable[..., Any], road: str, check: Callable[..., None]) -> Any:
    """A function of torch that refuses locations in stores."""
    signature, paths = inspect.signature(original), paths_of(original)
    is_pure = original.__name__ == "init_path"

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not (is_pure and check is keep_local and _brings_its_own.get()):
            given = signature.bind(*args, **kwargs).arguments
            for name in paths:
                check(given.get(name), road)
        return original(*args, **kwargs)

    return method


def becoming_ours(
    kind: type, options: Callable[[], Options], *, reads: bool, is_remote: bool
) -> Any:
    """The constructor of a class of torch that makes ours of an object for a location of ours.

    The class is changed and not its name in a module, since frameworks have imported that before.
    Objects of a class that was derived from it stay what they are: only that class knows what it
    adds. They are refused, unless the class says (``validate_checkpoint_id``) that it takes such
    locations, as those of the stores' own libraries do, which bring a file system of their own;
    what is derived from fsspec's is refused in any case.

    Args:
        kind: The class.
        options: What ours is given.
        reads: Whether it is a reader.
        is_remote: Whether it has another file system than that of local paths.
    """
    original = vars(kind)["__init__"]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(self, *args, **kwargs).arguments
        uri = our_uri(given["path"])
        if uri is not None and type(self) is kind:
            arguments = options().arguments(reads=reads)
            arguments |= _counterparts(uri, kind.__name__, given, signature, arguments)
            # and no __new__: a class that has once been given one can't be rid of it entirely
            self.__class__ = _OURS[reads]
            _OURS[reads].__init__(self, uri, **arguments)
            return
        if uri is not None and (is_remote or not _takes(type(self), uri)):
            raise _no_road(uri, type(self).__name__)
        with _constructing(brings_its_own=uri is not None or is_remote):
            original(self, *args, **kwargs)

    return __init__


def _takes(kind: Any, uri: str) -> bool:
    try:
        return bool(kind.validate_checkpoint_id(uri))
    except Exception:  # noqa: BLE001 - such as that of fsspec, if the store's library is not there
        return False


def _counterparts(
    uri: str,
    name: str,
    given: Mapping[str, Any],
    signature: inspect.Signature,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """What the options of torch's constructor are called here.

    Raises:
        ConfigError: If one would change what is stored, or where.
    """
    for option, value in given.items():
        if option in _OF_SPEED | {"self", "path", "overwrite"} or not value:
            continue
        if value != signature.parameters[option].default:
            named = ", ".join(value) if isinstance(value, dict) else option
            raise ConfigError(
                f"{name} was given {named}, which means nothing to cloudckpt; leave it out, and "
                "pass what all locations need to cloudckpt.install(config=...)",
                uri=str(CheckpointURI.parse(uri)),
            )
    if "overwrite" not in given:
        return {}
    config = arguments["config"] or Config()
    return {"config": dataclasses.replace(config, overwrite=bool(given["overwrite"]))}
