"""Ray Train V2: checkpoints that are in the run's storage already are reported, and not copied.

Each worker saves with :func:`cloudckpt.save` beneath :func:`run_uri`, and reports where to, with
``checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD``: else Ray copies it once more. Ray removes
what ``num_to_keep`` does not keep, and gives the newest back after a crash.

Tested with ray 2.60.
"""

from __future__ import annotations

from typing import Any

from cloudckpt.errors import ConfigError, MissingDependencyError
from cloudckpt.uri import CheckpointURI, URILike

try:
    import ray.train
except ModuleNotFoundError as error:
    raise MissingDependencyError("this needs Ray: pip install 'ray[train]'", cause=error) from error

__all__ = ["checkpoint", "run_uri", "uri_of"]

_SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "az"}
"""What pyarrow calls the file systems of the clouds, and their schemes here."""


def run_uri() -> str:
    """Where Ray keeps this run, and removes checkpoints; for workers.

    Raises:
        ConfigError: If the run's ``storage_path`` is in no cloud.
    """
    storage = ray.train.get_context().get_storage()
    return _uri(storage.storage_filesystem, storage.experiment_fs_path)


def checkpoint(uri: URILike) -> Any:
    """The ``ray.train.Checkpoint`` of a checkpoint that is beneath :func:`run_uri`.

    Raises:
        ConfigError: If it is elsewhere: Ray would neither take nor remove it.
    """
    location, run = str(CheckpointURI.parse(uri)), run_uri()
    if not location.startswith(f"{run}/"):
        raise ConfigError(f"Ray manages what is beneath {run}: save there", uri=location)
    storage = ray.train.get_context().get_storage()
    return ray.train.Checkpoint(location.partition("://")[2], storage.storage_filesystem)


def uri_of(found: Any) -> str:
    """The URI of a checkpoint that Ray has given, such as by ``ray.train.get_checkpoint()``."""
    return _uri(found.filesystem, found.path)


def _uri(files: Any, path: str) -> str:
    scheme = _SCHEMES.get(files.type_name)
    if scheme is None:
        raise ConfigError(f"{path} is on a file system {files.type_name!r}, and in no cloud")
    return str(CheckpointURI.parse(f"{scheme}://{path}"))
