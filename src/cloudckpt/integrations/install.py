"""``install`` and ``uninstall``: torch's checkpoint code and fsspec take URIs of stores."""

from __future__ import annotations

from cloudckpt.config import Config
from cloudckpt.dcp import install as torch_side
from cloudckpt.fork import late_imports

__all__ = ["install", "uninstall"]


def install(config: Config | None = None, trust_pickle: bool = False) -> None:
    """Makes ``dcp.save``, ``async_save`` and ``load`` use cloudckpt for ``s3://``, ``gs://`` and ``az://``.

    It is for frameworks that only pass a path on, or that make torch's ``FileSystemWriter`` and
    ``Reader`` or ``FsspecWriter`` and ``Reader`` themselves: given a location in a store, these
    become ours, and they keep their names otherwise. From now on nothing in torch's checkpoint
    code, and neither ``torch.save`` nor ``torch.load``, uses a local folder named ``s3:``, ``gs:``
    or ``az:``: a location that has lost a slash, as in ``Path("s3://bucket/run")``, raises
    :class:`InvalidURIError`, and code that only knows files raises :class:`InstallError`.
    ``HuggingFaceStorageWriter`` and ``Reader``, and the consolidation of safetensors, also take
    locations in stores. Other locations, and writers and readers of other libraries, are left
    alone. fsspec, through which frameworks list and delete checkpoints, gets our file systems for
    the schemes that no installed package serves (s3fs, gcsfs, adlfs). torchtitan, Accelerate and
    Lightning are changed, when they are imported, where they would turn URIs into local folders;
    their code and that of transformers that can only write to local disks refuses URIs, as does
    all of a framework whose shape differs from the known versions.

    Calling it again replaces the options, also for what was installed before; :func:`uninstall`
    reverts it. It affects only this process: call it in each that uses torch's functions.

    Args:
        config: Options of the writers, readers and file systems that are made; read from the
            environment by default.
        trust_pickle: Whether pickles in the checkpoints that they load may run any code.

    Raises:
        InstallError: If the running torch does not look as expected; nothing is changed.
    """
    with late_imports:
        from cloudckpt.hf.torch_classes import changes
        from cloudckpt.integrations import adapting, fsspec
    torch_side.install(config, trust_pickle, changes)
    fsspec.register(config)
    adapting.watch()


def uninstall() -> None:
    """Reverts :func:`install`; does nothing if it was not called.

    Existing writers, readers and file systems of ours stay as they are.
    """
    torch_side.uninstall()
    with late_imports:
        from cloudckpt.integrations import adapting, fsspec
    adapting.unwatch()
    fsspec.unregister()
