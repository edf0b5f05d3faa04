"""Lightning's checkpoints on URIs: ``Trainer`` strategies, the plugin and the callback.

>>> trainer = Trainer(  # doctest: +SKIP
...     strategy=CloudModelParallelStrategy(),
...     callbacks=[CloudModelCheckpoint("s3://bucket/run", every_n_train_steps=1000)],
... )
>>> trainer.fit(model, ckpt_path=cloudckpt.latest("s3://bucket/run"))  # doctest: +SKIP

A checkpoint holds the model as ``state_dict`` and the optimizers as ``optimizer_0`` and so on,
tensor by tensor, the random generators and dataloader positions of each rank, and whatever else the
trainer keeps (loops, callbacks, hyperparameters) as one value. Paths that are not URIs are handled
by Lightning. Tested with lightning 2.5.6 and 2.6.
"""

from __future__ import annotations

from typing import Any

from cloudckpt.config import Config
from cloudckpt.dcp.install import chosen_config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import MissingDependencyError
from cloudckpt.integrations.fabric import CloudCheckpointIO
from cloudckpt.integrations.fsspec import register
from cloudckpt.integrations.lightning_state import TrainerOnStores
from cloudckpt.integrations.parts import uri_of
from cloudckpt.runs.catalog import CheckpointSummary, list_checkpoints
from cloudckpt.uri import CheckpointURI

try:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.lightning needs Lightning's Trainer: pip install 'lightning>=2.5'"
    ) from exc

__all__ = [
    "CloudCheckpointIO",
    "CloudDDPStrategy",
    "CloudFSDPStrategy",
    "CloudModelCheckpoint",
    "CloudModelParallelStrategy",
]


class CloudModelParallelStrategy(TrainerOnStores, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism) that also saves to URIs."""


class CloudDDPStrategy(TrainerOnStores, DDPStrategy):  # type: ignore[misc]
    """Lightning's ``DDPStrategy`` that also saves to URIs; the ranks share the work."""


class CloudFSDPStrategy(TrainerOnStores, FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy`` (FSDP1) that saves shards, also to URIs."""

    def __init__(self, *args: Any, state_dict_type: str = "sharded", **kwargs: Any) -> None:
        """As Lightning's, with ``config`` and ``asynchronous`` as of the others."""
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
            register(chosen_config() or config)  # Lightning asks fsspec about folders
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
        last = self.CHECKPOINT_NAME_LAST

        def age(one: CheckpointSummary) -> tuple[float, bool, int]:
            """Within one second (stores' resolution) Lightning wrote the copy last."""
            is_last = one.uri.rpartition("/")[2].startswith(last)
            return one.modified or 0.0, is_last, one.step or -1

        found = [
            one for one in list_checkpoints(self._root, config=self._config) if one.is_committed
        ]
        newest = max(found, key=age, default=None)
        return set() if newest is None else {newest.uri}

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        """Never removes what another run saved, or what this run resumed from.

        Lightning keeps these rules on local disks only: its callback resumes with the best
        checkpoint of the previous run, and the first save of the new run would delete that.
        """
        if self._root is None:
            return bool(super()._should_remove_checkpoint(trainer, previous, current))
        resumed = trainer.ckpt_path
        is_resumed = bool(resumed) and CheckpointURI.accepts(resumed) and _same(resumed, previous)
        return (
            previous != current
            and not is_resumed
            and previous.startswith(f"{self._root.rstrip('/')}/")
        )


def _same(one: str, other: str) -> bool:
    """Whether two URIs are one location; one of ``az`` need not name its account."""
    places = (CheckpointURI.parse(uri) for uri in (one, other))
    return len({(place.scheme, place.bucket, place.prefix) for place in places}) == 1
