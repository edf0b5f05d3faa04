"""``install`` and ``uninstall``: torch's own ``save`` and ``load``, and fsspec, take URIs."""

from __future__ import annotations

from cloudckpt.config import Config
from cloudckpt.dcp import install as torch_side
from cloudckpt.fork import late_imports

__all__ = ["install", "uninstall"]


def install(config: Config | None = None, trust_pickle: bool = False) -> None:
    """Makes torch's ``dcp.save``, ``async_save`` and ``load`` use cloudckpt for URIs of stores.

    These are URIs that begin with ``s3://``, ``gs://``, ``az://`` or ``hf://``.

    Use it with frameworks that pass a path on to torch's distributed checkpoint, or that make
    torch's ``FileSystemWriter``, ``FileSystemReader``, ``FsspecWriter`` or ``FsspecReader``
    themselves: made with a location in a store, these become cloudckpt's writers and readers. In
    torch it replaces the function ``_storage_setup`` and these four constructors; it changes
    nothing in frameworks. A location that has lost a slash, as in ``Path("s3://bucket/run")``,
    raises :class:`InvalidURIError` there, and a derived class that supports only files raises
    :class:`InstallError`. Other locations, and writers and readers of other libraries, work as
    before.

    It also registers cloudckpt's file systems with fsspec, by which frameworks list and delete
    checkpoints, for the schemes that no installed package (s3fs, gcsfs, adlfs) handles.

    Calling it again replaces the options. It affects only this process and those forked from it:
    with ``async_save(async_checkpointer_type=PROCESS)``, for which torch starts another process,
    pass ``storage_writer=CloudStorageWriter(uri)``, or use :func:`cloudckpt.async_save`.

    Args:
        config: Options of the writers, readers and file systems that are made from now on; read
            from the environment by default. The classes of ``cloudckpt.integrations`` use them,
            too.
        trust_pickle: Whether pickles in loaded checkpoints may run any code.

    Raises:
        InstallError: If this cloudckpt does not know the installed torch; nothing is changed then.
        ConfigError: If ``config`` is not a Config.
    """
    torch_side.install(config, trust_pickle)
    with late_imports:
        from cloudckpt.integrations import fsspec
    fsspec.register()


def uninstall() -> None:
    """Restores torch's functions; does nothing if :func:`install` was not called.

    Writers and readers that were made before still use cloudckpt. fsspec keeps cloudckpt's file
    systems, because it has no public function to unregister them; they use the options of the
    environment again.
    """
    torch_side.uninstall()
