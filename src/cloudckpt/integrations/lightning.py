"""Lightning's checkpoints on URIs: strategies of its ``Trainer``, its plugin, and its callback.

>>> trainer = Trainer(  # doctest: +SKIP
...     strategy=CloudModelParallelStrategy(),
...     callbacks=[CloudModelCheckpoint("s3://bucket/run", every_n_train_steps=1000)],
... )
>>> trainer.fit(model, ckpt_path=cloudckpt.latest("s3://bucket/run"))  # doctest: +SKIP

A checkpoint has the model as ``state_dict`` and the optimizers as ``optimizer_0`` and so on, tensor
by tensor, and what else the trainer keeps (loops, callbacks, hyperparameters) as one value. Paths
that are no URIs go Lightning's way. Tested with lightning 2.5.6 and 2.6.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from cloudckpt import api
from cloudckpt.config import Config
from cloudckpt.errors import MissingDependencyError
from cloudckpt.integrations.fabric import (
    CloudCheckpointIO,
    check_sharded,
    config_of,
    refuse_storage_options,
)
from cloudckpt.integrations.fsspec import register
from cloudckpt.integrations.parts import VALUES, Parts, packed, remove, uri_of
from cloudckpt.integrations.saves import Saves, close, then
from cloudckpt.runs.catalog import CheckpointSummary, list_checkpoints

try:
    import fsspec
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.lightning needs Lightning's Trainer: pip install 'lightning>=2.5'"
    ) from exc

__all__ = [
    "CloudCheckpointIO",
    "CloudFSDPMixin",
    "CloudFSDPStrategy",
    "CloudModelCheckpoint",
    "CloudModelParallelStrategy",
]


class _OnStores:
    """What the Trainer's strategies that shard do otherwise on a URI: all ranks save their shards
    to it, in one commit.
    """

    config: Config | None = None
    saves: Saves | None = None  # in the background

    def __init__(
        self,
        *args: Any,
        config: Config | None = None,
        asynchronous: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            *args: Lightning's.
            config: The options of saving and loading.
            asynchronous: Whether a save copies the state and goes on in the background. What fails
                then is raised by the next save, or at the end, on all ranks.
            **kwargs: Lightning's.
        """
        super().__init__(*args, **kwargs)
        if config is not None:
            self.config = config
        if asynchronous:
            self.saves = Saves(config_of(self), asynchronous=True)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Saves on all ranks; to a URI, or where Lightning would.

        Raises:
            ConfigError: If the strategy was told to gather the state on one rank.
            CloudCheckpointError: As :func:`cloudckpt.save`.
        """
        uri = uri_of(self.broadcast(filepath))  # type: ignore[attr-defined]
        if uri is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        refuse_storage_options(storage_options, uri)
        check_sharded(self, uri)
        values = dict(checkpoint)
        parts = {"state_dict": values.pop("state_dict")}
        for index, state in enumerate(values.pop("optimizer_states", [])):
            parts[f"optimizer_{index}"] = state
        if self.is_global_zero:  # type: ignore[attr-defined]
            parts[VALUES] = packed(values)
        saves = getattr(self, "saves", None)
        if saves is None:
            api.save(parts, checkpoint_id=uri, config=config_of(self))
        else:
            saves.save(parts, uri)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the model, and the optimizers of a trainer that fits, on any number of ranks.

        Returns:
            What else the trainer had kept.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        uri = uri_of(self.broadcast(checkpoint_path))  # type: ignore[attr-defined]
        if uri is None:
            more = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.6
            return dict(super().load_checkpoint(checkpoint_path, **more))  # type: ignore[misc]
        if (saves := getattr(self, "saves", None)) is not None:
            saves.finish()
        module = self.lightning_module  # type: ignore[attr-defined]
        model = self.model  # type: ignore[attr-defined]
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if is_fitting else []  # type: ignore[attr-defined]
        parts = Parts(
            {"state_dict": model},
            {f"optimizer_{index}": (model, one) for index, one in enumerate(optimizers)},
        )
        strict = module.strict_loading
        return parts.load(uri, config_of(self), strict=strict, weights_only=weights_only)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint, if it is there; the first rank does it."""
        uri = uri_of(filepath)
        if uri is None:
            super().remove_checkpoint(filepath)  # type: ignore[misc]
        elif self.is_global_zero:  # type: ignore[attr-defined]
            then(self.saves, functools.partial(remove, uri, config_of(self)))

    def teardown(self) -> None:
        """Waits for what is saved in the background.

        Raises:
            CloudCheckpointError: If that fails, and nothing else has.
        """
        close(self.saves)
        super().teardown()  # type: ignore[misc]


class CloudModelParallelStrategy(_OnStores, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism) that saves to URIs, too."""


class CloudFSDPMixin(_OnStores):
    """For a class of yours that derives from Lightning's ``FSDPStrategy``; stands before that.

    >>> class Strategy(CloudFSDPMixin, MyFSDPStrategy):  # doctest: +SKIP
    ...     config = cloudckpt.Config(connections=32)

    Attributes:
        config: The options of saving and loading; None for those of ``install``.
    """


class CloudFSDPStrategy(CloudFSDPMixin, FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy`` (FSDP1) that saves shards, and to URIs, too."""

    def __init__(self, *args: Any, state_dict_type: str = "sharded", **kwargs: Any) -> None:
        """As Lightning's, and as :class:`CloudFSDPMixin`."""
        super().__init__(*args, state_dict_type=state_dict_type, **kwargs)


class CloudModelCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    """Lightning's ``ModelCheckpoint``, with names of which ``cloudckpt.latest`` finds the newest.

    Checkpoints are ``<dirpath>/step-<step>``, without ``.ckpt``, as they are no files. One that a
    job saves again is replaced when the new one is committed. ``save_top_k``, ``save_last`` and
    ``ckpt_path="last"`` are Lightning's; the trainer needs a strategy or plugin of ours.
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
            config: The options of looking for checkpoints.
            **kwargs: Lightning's.

        Raises:
            InvalidURIError: If ``dirpath`` can't be a location.
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

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """For ``ckpt_path="last"``: the newest that is committed; Lightning loses the scheme."""
        if self._root is None:
            return set(super()._find_last_checkpoints(trainer))
        return newest_in(self._root, self._config)


def newest_in(folder: str, config: Config | None) -> set[str]:
    """The committed checkpoint of a folder that was written last, whatever it is called, if any."""
    found = [one for one in list_checkpoints(folder, config=config) if one.is_committed]
    newest = max(found, key=_age, default=None)
    return set() if newest is None else {newest.uri}


def _age(one: CheckpointSummary) -> tuple[float, bool, int]:
    """Of those of the same second (stores tell no more) Lightning has written ``last`` last."""
    is_last = one.uri.rpartition("/")[2].startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST)
    return one.modified or 0.0, is_last, one.step or -1


def _serve(scheme: str, config: Config | None) -> None:
    """Lightning asks fsspec about folders, which may know nobody who serves the scheme."""
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError):
        register(config)
