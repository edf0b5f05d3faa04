"""Ray Train V2: reports checkpoints that workers have saved to the run's storage, without a copy.

Each worker saves with :func:`cloudckpt.save` beneath :func:`run_uri`, and reports the location::

    ray.train.report(
        {"loss": loss}, checkpoint=checkpoint(uri), checkpoint_upload_fn=checkpoint_upload_fn
    )

Ray deletes the checkpoints that ``num_to_keep`` does not keep, and returns the newest one after a
crash. ``checkpoint(uri)`` is a reference, without files that Ray could copy, or delete after the
"upload"; :func:`checkpoint_upload_fn` turns it into a checkpoint in Ray's storage. Nothing in Ray
is patched. Tested with ray 2.59 and 2.60.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NoReturn

from cloudckpt.checkpoint.references import commit_at
from cloudckpt.config import Config
from cloudckpt.dcp.install import chosen_config
from cloudckpt.errors import ConfigError, InvalidURIError, MissingDependencyError
from cloudckpt.integrations.fsspec import file_system
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.uri import CheckpointURI, URILike

try:
    import ray.train
    from fsspec.spec import AbstractFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "cloudckpt.integrations.ray needs Ray Train V2: pip install 'ray[train]>=2.59'", cause=error
    ) from error

__all__ = ["checkpoint", "checkpoint_upload_fn", "run_uri", "storage", "uri_of"]

_SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "az", "local": "file"}
"""The URI scheme of cloudckpt for each pyarrow file system, by its ``type_name``."""

_OURS = "py::fsspec+"
"""The prefix of pyarrow's name for cloudckpt's file systems; the scheme follows it."""


def storage(uri: URILike, config: Config | None = None) -> dict[str, Any]:
    """Returns ``storage_path`` and ``storage_filesystem`` for Ray's ``RunConfig``, as a dict.

    Use it as in ``RunConfig(**storage("s3://bucket/runs"))``. Ray then reads, writes and deletes
    through cloudckpt: with the same credentials, endpoints and retries. The deletion of a
    checkpoint begins with its commit object, so a reader never sees a partly deleted checkpoint.
    With ``storage_path="s3://bucket/runs"`` alone, Ray works, too, but through pyarrow.

    Args:
        uri: The folder of the runs, for example ``s3://bucket/runs``.
        config: Options of the file system; None uses those given to ``install``, or else the
            environment.

    Raises:
        InvalidURIError: If ``uri`` is not a valid location, or not in a cloud: then pass the path
            to Ray instead.
    """
    location = CheckpointURI.parse(uri)
    if not location.is_cloud:
        raise InvalidURIError(f"{location} is not in a cloud: pass it to RunConfig as storage_path")
    files = PyFileSystem(FSSpecHandler(file_system(location.scheme, config)))
    path = str(location).partition("://")[2]
    return {"storage_path": path, "storage_filesystem": files}


def run_uri() -> str:
    """Returns the URI of the folder in which Ray stores this run; call it in a worker.

    Raises:
        ConfigError: If the run's ``storage_path`` is neither in a cloud nor on a mounted disk.
    """
    context = _storage()
    return _uri(context.storage_filesystem, context.experiment_fs_path)


def checkpoint(uri: URILike, written: Future[Any] | None = None) -> Any:
    """Makes a reference to a checkpoint beneath :func:`run_uri`, for ``ray.train.report``.

    Pass ``checkpoint_upload_fn=checkpoint_upload_fn`` to ``ray.train.report``, too.

    Args:
        uri: The location of the checkpoint.
        written: The future of a background save; None if the checkpoint is committed. The report
            waits for it, in one of Ray's threads with
            ``checkpoint_upload_mode=CheckpointUploadMode.ASYNC``, and fails if the save does.

    Raises:
        InvalidURIError: If ``uri`` is not a valid location.
        ConfigError: If ``uri`` is not beneath :func:`run_uri`: Ray could not delete it.
    """
    location, run = str(CheckpointURI.parse(uri)), run_uri()
    if not location.startswith(f"{run}/"):
        raise ConfigError(f"Ray manages only checkpoints beneath {run}: save there", uri=location)
    return _Reference(location, written)


def checkpoint_upload_fn(reported: Any, name: str) -> Any:
    """Waits for a reported checkpoint, and returns it as Ray's checkpoint; Ray calls this.

    Args:
        reported: The result of :func:`checkpoint`.
        name: The name that Ray suggests for the checkpoint; it is ignored.

    Raises:
        ConfigError: If ``reported`` is not a result of :func:`checkpoint`, or if the checkpoint was
            saved with ``incremental=True`` while Ray does not use :func:`storage`: Ray would then
            delete objects that later checkpoints refer to.
        CloudCheckpointError: If the save failed, or the checkpoint can't be read.
    """
    if not isinstance(reported, _Reference):
        raise ConfigError(
            "checkpoint_upload_fn of cloudckpt can't upload this checkpoint: pass the result of "
            "cloudckpt.integrations.ray.checkpoint(uri) to ray.train.report"
        )
    if reported.written is not None:
        reported.written.result()
    uri, files = CheckpointURI.parse(reported.path), _storage().storage_filesystem
    is_by_pyarrow = not str(files.type_name).startswith(_OURS)
    if is_by_pyarrow and ray.train.get_context().get_world_rank() == 0:
        config = chosen_config() or Config()
        commit = commit_at(open_store(uri, config), uri, Retrier(config.retry))
        if commit is not None and commit.has_digests:
            raise ConfigError(
                "the checkpoint was saved with incremental=True, but Ray deletes checkpoints "
                "without regard to the later ones that need their objects: pass "
                "RunConfig(**storage(folder)), with the folder of the runs, instead of "
                "storage_path, or save without incremental",
                uri=str(uri),
            )
    return ray.train.Checkpoint(str(uri).partition("://")[2], files)


def uri_of(found: Any) -> str:
    """Returns the URI of one of Ray's checkpoints.

    Args:
        found: The checkpoint, such as the result of ``ray.train.get_checkpoint()`` if that is not
            None.

    Raises:
        ConfigError: If the checkpoint is neither in a cloud nor on a mounted disk.
    """
    return _uri(found.filesystem, found.path)


class _Reference(ray.train.Checkpoint):  # type: ignore[misc]
    """The result of :func:`checkpoint`: a URI, and the future of its save."""

    def __init__(self, uri: str, written: Future[Any] | None) -> None:
        super().__init__(uri, PyFileSystem(FSSpecHandler(_NoFiles())))
        self.written = written


class _NoFiles(AbstractFileSystem):  # type: ignore[misc]
    """The file system of a reference: listing raises an error, and deleting does nothing.

    With ``CheckpointUploadMode.ASYNC``, Ray deletes the reported checkpoint after the upload.
    """

    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": 0, "type": "directory"}

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None: ...

    def ls(self, path: str, detail: bool = True, **_: Any) -> NoReturn:
        raise ConfigError(
            "Ray would copy the checkpoint: pass checkpoint_upload_fn= of "
            "cloudckpt.integrations.ray to ray.train.report",
            uri=path,
        )

    def find(self, path: str, *_: Any, **__: Any) -> NoReturn:
        self.ls(path)


def _storage() -> Any:
    """Returns Ray's storage context of this worker's run."""
    return ray.train.get_context().get_storage()


def _uri(files: Any, path: str) -> str:
    """Converts a path on a pyarrow file system to a URI.

    Raises:
        ConfigError: If cloudckpt has no store for that file system.
    """
    type_name = str(files.type_name)
    is_ours = type_name.startswith(_OURS)
    scheme = type_name.removeprefix(_OURS) if is_ours else _SCHEMES.get(type_name)
    if scheme not in _SCHEMES.values():
        raise ConfigError(
            f"{path} is on a file system of type {type_name!r}, which cloudckpt does not "
            "support: store the run on S3, Google Cloud Storage, Azure or a mounted disk"
        )
    return str(CheckpointURI.parse(f"{scheme}://{path}"))
