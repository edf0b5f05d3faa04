"""Ray Train V2: reports checkpoints that are already in the run's storage, without copying them.

Each worker saves with :func:`cloudckpt.save` beneath :func:`run_uri`, and reports the location. Ray
removes what ``num_to_keep`` does not keep, and returns the newest checkpoint after a crash.

``ray.train.report`` copies what it is given, and in the background removes the original afterwards.
For the results of :func:`checkpoint`, and nothing else, it does neither: Ray accepts an upload
function, and the one passed here does nothing.

Tested with ray 2.60.
"""

from __future__ import annotations

import functools
import inspect
from concurrent.futures import Future
from typing import Any

from cloudckpt.checkpoint.references import commit_at
from cloudckpt.config import Config
from cloudckpt.dcp.install import chosen_config
from cloudckpt.errors import ConfigError, InvalidURIError, MissingDependencyError
from cloudckpt.integrations.fsspec import file_system
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.uri import CheckpointURI, URILike

try:
    import ray.train
    from pyarrow.fs import FSSpecHandler, PyFileSystem
    from ray.train.v2._internal.execution.context import TrainContext
    from ray.train.v2.api.report_config import CheckpointUploadMode
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "this needs Ray Train V2: pip install 'ray[train]>=2.60'", cause=error
    ) from error

__all__ = ["checkpoint", "run_uri", "storage", "uri_of"]

_SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "az", "local": "file"}
"""pyarrow's names for file systems, and their schemes here."""

_OURS = "py::fsspec+"
"""The prefix of pyarrow's names for our file systems; the scheme follows."""


def storage(uri: URILike, config: Config | None = None) -> dict[str, Any]:
    """Where Ray keeps runs, for ``RunConfig(**storage("s3://bucket/runs"))``.

    Ray also works with ``storage_path="s3://bucket/runs"``, through pyarrow. With this function it
    reads, writes and deletes as cloudckpt does: with the same credentials, endpoints and retries,
    and deleting a checkpoint starts with its commit, so that nobody sees it half deleted.

    Raises:
        InvalidURIError: If it is not in a cloud: give Ray the path instead.
    """
    place = CheckpointURI.parse(uri)
    if not place.is_cloud:
        raise InvalidURIError(f"{place} is in no cloud: give it to RunConfig as storage_path")
    files = PyFileSystem(FSSpecHandler(file_system(place.scheme, config)))
    path = str(place).partition("://")[2]
    return {"storage_path": path, "storage_filesystem": files}


def run_uri() -> str:
    """Where Ray keeps this run and removes its checkpoints; for workers.

    Raises:
        ConfigError: If the run's ``storage_path`` is neither in a cloud nor on a mounted disk.
    """
    place = _storage()
    return _uri(place.storage_filesystem, place.experiment_fs_path)


def checkpoint(uri: URILike, written: Future[Any] | None = None) -> Any:
    """Wraps a checkpoint beneath :func:`run_uri` for ``ray.train.report``.

    Args:
        uri: The checkpoint.
        written: The future of a background save. The report waits for it, in one of Ray's threads
            with ``checkpoint_upload_mode=CheckpointUploadMode.ASYNC``, and fails if the save does.
            It also fails for a checkpoint saved with ``incremental=True`` if Ray does not use
            :func:`storage`, since Ray would delete what later checkpoints refer to.

    Raises:
        ConfigError: If it is elsewhere: Ray would neither take nor remove it.
    """
    location, run = str(CheckpointURI.parse(uri)), run_uri()
    if not location.startswith(f"{run}/"):
        raise ConfigError(f"Ray manages what is beneath {run}: save there", uri=location)
    _lead_reports()
    return _Stored(location.partition("://")[2], _storage().storage_filesystem, written)


def uri_of(found: Any) -> str:
    """The URI of a checkpoint from Ray, for example from ``ray.train.get_checkpoint()``."""
    return _uri(found.filesystem, found.path)


class _Stored(ray.train.Checkpoint):  # type: ignore[misc]
    """A checkpoint already in Ray's storage; in other processes a plain Ray checkpoint."""

    def __init__(self, path: str, filesystem: Any, written: Future[Any] | None) -> None:
        super().__init__(path, filesystem)
        self.written = written

    def __reduce__(self) -> tuple[Any, ...]:
        return ray.train.Checkpoint, (self.path, self.filesystem)


def _when_written(stored: _Stored, name: str) -> _Stored:
    """Replaces the upload: returns the checkpoint as soon as it is written.

    Raises:
        ConfigError: If Ray would delete all of it through pyarrow, though a later checkpoint may
            refer to it.
    """
    if stored.written is not None:
        stored.written.result()
    is_by_pyarrow = not str(stored.filesystem.type_name).startswith(_OURS)
    if is_by_pyarrow and ray.train.get_context().get_world_rank() == 0:
        uri, config = CheckpointURI.parse(uri_of(stored)), chosen_config() or Config()
        said = commit_at(open_store(uri, config), uri, Retrier(config.retry))
        if said is not None and said.has_digests:
            raise ConfigError(
                "it was saved with incremental=True, and Ray deletes checkpoints by pyarrow, with "
                "what later ones refer to: give RunConfig(**storage(uri)) instead of storage_path, "
                "or save without it",
                uri=str(uri),
            )
    return stored


@functools.cache
def _lead_reports() -> None:
    """Makes ``report`` in this process take checkpoints that are already stored as they are."""
    original = TrainContext.report
    signature = inspect.signature(original)
    needed = {"checkpoint_upload_fn", "delete_local_checkpoint_after_upload"}
    if not needed <= {*signature.parameters}:
        raise MissingDependencyError(
            f"ray {ray.__version__} reports otherwise than this cloudckpt knows: take ray 2.60"
        )

    @functools.wraps(original)
    def report(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if isinstance(given.get("checkpoint"), _Stored):
            given["checkpoint_upload_fn"] = _when_written
            given["delete_local_checkpoint_after_upload"] = False
            if given.get("checkpoint_upload_mode") is CheckpointUploadMode.NO_UPLOAD:
                given["checkpoint_upload_mode"] = CheckpointUploadMode.SYNC
        original(**given)

    TrainContext.report = report


def _storage() -> Any:
    return ray.train.get_context().get_storage()


def _uri(files: Any, path: str) -> str:
    kind = str(files.type_name)
    scheme = kind.removeprefix(_OURS) if kind.startswith(_OURS) else _SCHEMES.get(kind)
    if scheme not in _SCHEMES.values():
        raise ConfigError(f"{path} is on a file system {kind!r}, which cloudckpt does not know")
    return str(CheckpointURI.parse(f"{scheme}://{path}"))
