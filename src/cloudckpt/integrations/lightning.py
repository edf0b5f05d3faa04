"""Lightning's ``Trainer``: strategies, a plugin and a callback that save to URIs.

>>> trainer = Trainer(  # doctest: +SKIP
...     strategy=CloudModelParallelStrategy(),
...     callbacks=[CloudModelCheckpoint("s3://bucket/run", every_n_train_steps=1000)],
... )
>>> trainer.fit(model, ckpt_path=cloudckpt.latest("s3://bucket/run"))  # doctest: +SKIP

A checkpoint contains the model as ``state_dict`` and the optimizers as ``optimizer_0`` and so on,
tensor by tensor; the random generators and dataloader positions of each rank; and all other state
of the trainer (loops, callbacks, hyperparameters) as one value. Paths that are not URIs are handled
by Lightning. Tested with lightning 2.5.6 and 2.6.
"""

from __future__ import annotations

from typing import Any

from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import MissingDependencyError
from cloudckpt.integrations.fabric import CloudCheckpointIO
from cloudckpt.integrations.fsspec import register
from cloudckpt.integrations.lightning_state import TrainerOnStores
from cloudckpt.integrations.state import uri_of
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
    """Lightning's ``DDPStrategy`` that also saves to URIs, with work divided among the ranks."""


class CloudFSDPStrategy(TrainerOnStores, FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy`` (FSDP1) that also saves to URIs, and always saves shards."""

    def __init__(self, *args: Any, state_dict_type: str = "sharded", **kwargs: Any) -> None:
        """Takes Lightning's arguments, and the options of :class:`TrainerOnStores`.

        ``state_dict_type`` is sharded by default, as saves to URIs need it.
        """
        super().__init__(*args, state_dict_type=state_dict_type, **kwargs)


class CloudModelCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    """Lightning's ``ModelCheckpoint``, with checkpoint names that ``cloudckpt.latest`` recognizes.

    Checkpoints are named ``<dirpath>/step-<step>``, without ``.ckpt``, because they are folders. If
    a job saves a checkpoint again, the old one is replaced by the commit of the new one.
    ``save_top_k``, ``save_last`` and ``ckpt_path="last"`` work as in Lightning. The trainer needs a
    strategy or plugin of this module.
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
        """Makes the callback; three defaults differ from Lightning's, so that names are simple.

        Args:
            dirpath: The folder of the run, for example ``s3://bucket/run``.
            filename: The pattern of checkpoint names; Lightning's default also has the epoch.
            auto_insert_metric_name: As in Lightning, where the default is True.
            enable_version_counter: As in Lightning, where the default is True.
            config: Options for listing checkpoints; None reads them from the environment.
            **kwargs: Other arguments of Lightning's ``ModelCheckpoint``.

        Raises:
            InvalidURIError: If ``dirpath`` is a URI, but not a valid location.
        """
        self._root = uri_of(dirpath)
        self._config = config
        if self._root is not None:
            register(config)  # Lightning lists folders through fsspec
        super().__init__(
            dirpath,
            filename,
            auto_insert_metric_name=auto_insert_metric_name,
            enable_version_counter=enable_version_counter,
            **kwargs,
        )
        if self._root is not None and self._root.startswith("file://"):
            self.dirpath = self._root  # Lightning took it as relative to the working directory

    def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Sets up the callback as Lightning does; an error on the first rank is raised on all."""
        setup = super().setup
        Meeting.of(None, False).begin(lambda: setup(trainer, *args, **kwargs))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Returns a set with the URI of the newest checkpoint, for ``ckpt_path="last"``.

        The newest is the one that was written last, of those that are committed and not abandoned;
        the set is empty if there is none. Lightning's own method would lose the URI's scheme.
        """
        if self._root is None:
            return set(super()._find_last_checkpoints(trainer))
        last = self.CHECKPOINT_NAME_LAST

        def age(one: CheckpointSummary) -> tuple[float, bool, int]:
            """Returns a sort key: time, then whether the checkpoint is the "last" copy, then step.

            Stores report times in whole seconds; Lightning writes the copy after the checkpoint.
            """
            is_last = one.uri.rpartition("/")[2].startswith(last)
            return one.modified or 0.0, is_last, one.step or -1

        found = [
            one
            for one in list_checkpoints(self._root, config=self._config)
            if one.is_committed and not one.is_abandoned
        ]
        newest = max(found, key=age, default=None)
        return set() if newest is None else {newest.uri}

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        """Returns whether to delete the checkpoint ``previous`` after ``current`` was saved.

        A checkpoint outside of the run is never deleted, nor is the one that this run resumed from,
        nor one at the location of ``current``.

        Lightning applies this rule on local disks only. Its callback takes over the best checkpoint
        of the previous run, and the first save of the new run would delete it.
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


def _same(first: str, second: str) -> bool:
    """Returns whether two URIs are the same location; the account of ``az`` URIs is ignored."""
    parsed = (CheckpointURI.parse(uri) for uri in (first, second))
    return len({(uri.scheme, uri.bucket, uri.prefix) for uri in parsed}) == 1
