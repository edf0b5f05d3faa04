"""``install`` and ``uninstall``: torch's own ``save`` and ``load``, and fsspec, take URIs."""

from __future__ import annotations

from cloudckpt.config import Config
from cloudckpt.dcp import install as torch_side
from cloudckpt.fork import late_imports

__all__ = ["install", "uninstall"]


def install(config: Config | None = None, trust_pickle: bool = False) -> None:
    """Makes ``dcp.save``, ``async_save`` and ``load`` use cloudckpt for ``s3://``, ``gs://`` and ``az://``.

    It is for frameworks that pass a path on to torch's distributed checkpoint, or that make torch's
    ``FileSystemWriter`` and ``Reader`` or ``FsspecWriter`` and ``Reader`` themselves: given a
    location in a store, these become ours. The function ``_storage_setup`` and these four
    constructors are all that it replaces in torch; nothing of a framework is changed. A location
    that has lost a slash, as in ``Path("s3://bucket/run")``, raises :class:`InvalidURIError` there,
    and a derived class that only knows files :class:`InstallError`. Other locations, and writers
    and readers of other libraries, are left alone.

    fsspec, through which frameworks list and delete checkpoints, gets our file systems for the
    schemes that no installed package serves (s3fs, gcsfs, adlfs).

    Calling it again replaces the options. It affects only this process and those forked from it:
    with ``async_save(async_checkpointer_type=PROCESS)``, for which torch starts another process,
    pass ``storage_writer=CloudStorageWriter(uri)``, or use :func:`cloudckpt.async_save`.

    Args:
        config: Options of the writers, readers and file systems that are made; read from the
            environment by default. The classes of ``cloudckpt.integrations`` also use them.
        trust_pickle: Whether pickles in the checkpoints that they load may run any code.

    Raises:
        InstallError: If the running torch does not look as expected; nothing is changed.
    """
    torch_side.install(config, trust_pickle)
    with late_imports:
        from cloudckpt.integrations import fsspec
    fsspec.register(config)


def uninstall() -> None:
    """Gives torch its functions back; does nothing if :func:`install` was not called.

    Writers and readers that have become ours stay so, and fsspec keeps our file systems, as it has
    no public function that takes them back.
    """
    torch_side.uninstall()
