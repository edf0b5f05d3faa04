"""Lightning Fabric's checkpoints on URIs: its strategies, and the plugin it shares with Trainer.

>>> from cloudckpt.integrations.fabric import CloudModelParallelStrategy  # doctest: +SKIP
>>> fabric = Fabric(strategy=CloudModelParallelStrategy(parallelize))  # doctest: +SKIP
>>> fabric.save("s3://bucket/run/step-10", state)  # doctest: +SKIP
>>> fabric.load("s3://bucket/run/step-10", state)  # doctest: +SKIP

Paths that are not URIs are handled by Lightning. Tested with lightning 2.5.6 and 2.6.
"""

from __future__ import annotations

from typing import Any

from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import MissingDependencyError
from cloudckpt.integrations.lightning_sharded import FabricOnStores
from cloudckpt.integrations.lightning_whole import WholeOnStores

try:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.fabric and .lightning need Lightning: pip install 'lightning>=2.5'"
    ) from exc

__all__ = [
    "CloudCheckpointIO",
    "CloudDDPStrategy",
    "CloudFSDPStrategy",
    "CloudModelParallelStrategy",
    "DDPOnStores",
]


class CloudCheckpointIO(WholeOnStores, TorchCheckpointIO):  # type: ignore[misc]
    """Saves whole checkpoints to URIs and loads them, for strategies that do not shard.

    >>> trainer = Trainer(plugins=[CloudCheckpointIO()])  # doctest: +SKIP

    One process saves, tensor by tensor. Strategies that shard (``ModelParallelStrategy``,
    ``FSDPStrategy``) do not use the plugin; use this package's strategies instead. On several
    ranks, use :class:`CloudDDPStrategy`: Lightning's own would leave the other ranks waiting at its
    next barrier if a save failed.
    """


class DDPOnStores:
    """Makes Lightning's DDP save to URIs, and tell every rank if the save on the first fails."""

    def __init__(
        self, *args: Any, config: Config | None = None, checkpoint_io: Any = None, **kwargs: Any
    ) -> None:
        """
        Args:
            *args: Lightning's.
            config: Options for saving and loading.
            checkpoint_io: The plugin that saves; a :class:`CloudCheckpointIO` by default.
            **kwargs: Lightning's.
        """
        plugin = checkpoint_io or CloudCheckpointIO(config)
        super().__init__(*args, checkpoint_io=plugin, **kwargs)  # type: ignore[call-arg]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Saves by the plugin, on the first rank.

        Raises:
            CloudCheckpointError: As :func:`cloudckpt.save`, on all ranks.
        """
        save = super().save_checkpoint  # type: ignore[misc]
        Meeting.of(None, False).begin(lambda: save(*args, **kwargs))


class CloudDDPStrategy(DDPOnStores, DDPStrategy):  # type: ignore[misc]
    """Fabric's ``DDPStrategy`` that also saves to URIs."""


class CloudModelParallelStrategy(FabricOnStores, ModelParallelStrategy):  # type: ignore[misc]
    """Fabric's ``ModelParallelStrategy`` (FSDP2, tensor parallelism) that also saves to URIs."""


class CloudFSDPStrategy(FabricOnStores, FSDPStrategy):  # type: ignore[misc]
    """Fabric's ``FSDPStrategy`` (FSDP1) that also saves to URIs."""
