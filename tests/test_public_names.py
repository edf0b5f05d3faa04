"""The public names: a change here is a change for users."""

import importlib
import pkgutil

import cloudckpt
from cloudckpt import errors

PUBLIC = {
    "aio",
    "AzureOptions",
    "CheckpointContents",
    "CheckpointManager",
    "CheckpointSummary",
    "CheckpointURI",
    "CloudStorageReader",
    "CloudStorageWriter",
    "ComparedItem",
    "Comparison",
    "Config",
    "Damage",
    "Copied",
    "copy",
    "FileContent",
    "GCSOptions",
    "Leftovers",
    "Preemption",
    "RetryPolicy",
    "S3Options",
    "StoredItem",
    "Transferred",
    "Verified",
    "__version__",
    "add_safe_metadata_globals",
    "async_save",
    "delete",
    "diff",
    "exists",
    "find_leftovers",
    "latest",
    "list_checkpoints",
    "inspect",
    "install",
    "load",
    "load_file",
    "save",
    "save_file",
    "sweep",
    "uninstall",
    "verify",
    # errors
    "AccessDeniedError",
    "make_sync_checkpointer",
    "make_async_checkpointer",
    "SyncCheckpointer",
    "CommitHook",
    "CheckpointerConfig",
    "Checkpointer",
    "AsyncCheckpointer",
    "close_async_savers",
    "Stager",
    "StagingMemoryError",
    "StagingError",
    "SaveProcessError",
    "SaveInProgressError",
    "SaveFuture",
    "ClosedError",
    "BackgroundOptions",
    "AsyncSaveError",
    "BucketNotFoundError",
    "CheckpointConflictError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CloudCheckpointError",
    "CommitUnknownError",
    "ConfigError",
    "ConnectionLostError",
    "CredentialsError",
    "DifferentCheckpointsError",
    "IncompleteSaveError",
    "InstallError",
    "InvalidRequestError",
    "InvalidURIError",
    "KeyCollisionError",
    "MissingDependencyError",
    "MissingKeyError",
    "ObjectNotFoundError",
    "PreconditionFailedError",
    "ProcessGroupError",
    "RangeNotSatisfiableError",
    "RanksFailedError",
    "ServerError",
    "ShapeMismatchError",
    "StorageFullError",
    "StoreError",
    "TLSError",
    "TensorChangedError",
    "ThrottledError",
    "TransferCancelledError",
    "TransientStoreError",
    "UnsupportedTensorError",
    "UntrustedPickleError",
    "WrongRegionError",
}


def test_the_public_names_are_these():
    assert set(cloudckpt.__all__) == PUBLIC
    assert len(cloudckpt.__all__) == len(PUBLIC)


def test_every_public_name_is_there():
    missing = [name for name in cloudckpt.__all__ if not hasattr(cloudckpt, name)]
    assert missing == []


def test_every_error_is_public():
    assert set(errors.__all__) <= set(cloudckpt.__all__)


def test_what_a_module_exports_is_there():
    for module in pkgutil.walk_packages(cloudckpt.__path__, "cloudckpt."):
        if module.name.endswith(("__main__", ".auto")):
            continue
        try:
            loaded = importlib.import_module(module.name)
        except errors.MissingDependencyError:
            assert ".integrations." in module.name  # its framework is not here
            continue
        missing = [name for name in getattr(loaded, "__all__", ()) if not hasattr(loaded, name)]
        assert missing == [], module.name
