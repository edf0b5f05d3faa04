"""``install`` and ``uninstall``: torch's checkpoint code and fsspec take URIs of stores."""

from __future__ import annotations

from cloudckpt.config import Config
from cloudckpt.dcp import install as torch_side
from cloudckpt.fork import late_imports

__all__ = ["install", "uninstall"]


def install(config: Config | None = None, trust_pickle: bool = False) -> None:
    """Makes ``dcp.save``, ``async_save`` and ``load`` use cloudckpt for ``s3://``, ``gs://`` and ``az://``.

    For frameworks that only pass a path on, or that make torch's ``FileSystemWriter`` and
    ``Reader`` or ``FsspecWriter`` and ``Reader`` themselves: these become ours where they are given
    a location in a store, and keep their names for all others. From now on nothing in torch's
    checkpoint code, and neither ``torch.save`` nor ``torch.load``, uses a local folder named
    ``s3:``, ``gs:`` or ``az:``: what can't become ours raises :class:`InvalidURIError` for a
    location that has lost a slash, as in ``Path("s3://bucket/run")``, and :class:`InstallError` for
    what only knows files. ``HuggingFaceStorageWriter`` and ``Reader``, and the consolidation of
    safetensors, take locations in stores, too. Other locations, and writers and readers of other
    libraries, are left alone. fsspec, by which frameworks list and delete checkpoints, gets file
    systems of ours for the schemes that no installed package serves (s3fs, gcsfs, adlfs).
    torchtitan, Accelerate and Lightning are changed, when they are imported, where they make local
    folders of URIs; what in these and transformers can only write to local disks refuses them, and
    so does all of a framework that looks otherwise than the versions that are known.

    Calling it again replaces the options, also for what was installed before; :func:`uninstall`
    reverts it. It holds for this process: call it in each that uses torch's functions.

    Args:
        config: Options of the writers, readers and file systems that are made; read from the
            environment where they are not given.
        trust_pickle: Whether pickles in the checkpoints that they load may run any code.

    Raises:
        InstallError: If the running torch does not look as expected; nothing is changed then.
    """
    with late_imports:
        from cloudckpt.hf.torch_classes import changes
        from cloudckpt.integrations import adapting, fsspec
    torch_side.install(config, trust_pickle, changes)
    fsspec.register(config)
    adapting.watch()


def uninstall() -> None:
    """Reverts :func:`install`; does nothing if it was not called.

    Writers, readers and file systems that have become ours stay so.
    """
    torch_side.uninstall()
    with late_imports:
        from cloudckpt.integrations import adapting, fsspec
    adapting.unwatch()
    fsspec.unregister()
