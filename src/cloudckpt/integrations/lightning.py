"""Lightning's checkpoints on URIs: ``Trainer`` strategies, the plugin and the callback.

>>> trainer = Trainer(  # doctest: +SKIP
...     strategy=CloudModelParallelStrategy(),
...     callbacks=[CloudModelCheckpoint("s3://bucket/run", every_n_train_steps=1000)],
... )
>>> trainer.fit(model, ckpt_path=cloudckpt.latest("s3://bucket/run"))  # doctest: +SKIP

A checkpoint holds the model as ``state_dict`` and the optimizers as ``optimizer_0`` and so on,
tensor by tensor, and whatever else the trainer keeps (loops, callbacks, hyperparameters) as one
value. Paths that are not URIs are handled by Lightning. Tested with lightning 2.5.6 and 2.6.
"""

from __future__ import annotations

from typing import Any

from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import MissingDependencyError
from cloudckpt.integrations.fabric import CloudCheckpointIO, DDPOnStores
from cloudckpt.integrations.fsspec import register
from cloudckpt.integrations.lightning_folder import may_be_removed, newest_in
from cloudckpt.integrations.lightning_sharded import TrainerOnStores
from cloudckpt.integrations.parts import uri_of

try:
    import fsspec
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.lightning needs Lightning's Trainer: pip install 'lightning>=2.5'"
    ) from exc

__all__ = [
    "CloudCheckpointIO",
    "CloudDDPStrategy",
    "CloudFSDPMixin",
    "CloudFSDPStrategy",
    "CloudModelCheckpoint",
    "CloudModelParallelStrategy",
]


class CloudModelParallelStrategy(TrainerOnStores, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism) that also saves to URIs."""


class CloudDDPStrategy(DDPOnStores, DDPStrategy):  # type: ignore[misc]
    """Lightning's ``DDPStrategy`` that also saves to URIs."""


class CloudFSDPMixin(TrainerOnStores):
    """Mixin for your own subclass of Lightning's ``FSDPStrategy``; goes before it in the bases.

    >>> class Strategy(CloudFSDPMixin, MyFSDPStrategy):  # doctest: +SKIP
    ...     config = cloudckpt.Config(connections=32)

    Attributes:
        config: Options for saving and loading; None for those of ``install``.
    """


class CloudFSDPStrategy(CloudFSDPMixin, FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy`` (FSDP1) that saves shards, also to URIs."""

    def __init__(self, *args: Any, state_dict_type: str = "sharded", **kwargs: Any) -> None:
        """As Lightning's, and as :class:`CloudFSDPMixin`."""
        super().__init__(*args, state_dict_type=state_dict_type, **kwargs)


class CloudModelCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    """Lightning's ``ModelCheckpoint``, naming checkpoints so that ``cloudckpt.latest`` works.

    Checkpoints are ``<dirpath>/step-<step>``, without ``.ckpt``, as they are not files. A
    checkpoint that a job saves again is replaced when the new one is committed. ``save_top_k``,
    ``save_last`` and ``ckpt_path="last"`` are Lightning's; the trainer needs one of our strategies
    or plugins.
    """

    FILE_EXTENSION = ""

    def __init__(
        self,
        dirpath: str,
        filename: str = "step-{step}",
        *,
        auto_insert_metric_name: bool = False,
        enable_version_counter: bool = False,
        config: Config | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            dirpath: The folder of the run, for example ``s3://bucket/run``.
            filename: Lightning's.
            auto_insert_metric_name: Lightning's.
            enable_version_counter: Lightning's.
            config: Options for finding checkpoints.
            **kwargs: Lightning's.

        Raises:
            InvalidURIError: If ``dirpath`` is not a valid location.
        """
        self._root = uri_of(dirpath)
        self._config = config
        if self._root is not None:
            _serve(self._root.partition("://")[0], config)
        super().__init__(
            dirpath,
            filename,
            auto_insert_metric_name=auto_insert_metric_name,
            enable_version_counter=enable_version_counter,
            **kwargs,
        )
        if self._root is not None and self._root.startswith("file://"):
            self.dirpath = self._root  # Lightning has made it relative to the working directory

    def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; if the first rank can't look into the folder, all ranks raise."""
        if self._root is None:
            super().setup(trainer, *args, **kwargs)
            return
        setup = super().setup
        Meeting.of(None, False).begin(lambda: setup(trainer, *args, **kwargs))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """The newest committed one, for ``ckpt_path="last"``; Lightning loses the scheme."""
        if self._root is None:
            return set(super()._find_last_checkpoints(trainer))
        return newest_in(self._root, self._config, self.CHECKPOINT_NAME_LAST)

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        """Never removes what another run saved, or what this run resumed from."""
        if self._root is None:
            return bool(super()._should_remove_checkpoint(trainer, previous, current))
        return previous != current and may_be_removed(previous, self._root, trainer.ckpt_path)


def _serve(scheme: str, config: Config | None) -> None:
    """Registers the scheme: Lightning asks fsspec about folders, which may not know it."""
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError):
        register(config)
