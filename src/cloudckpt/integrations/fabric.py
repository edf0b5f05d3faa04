"""Lightning Fabric's checkpoints on URIs: its strategies, and the plugin it shares with Trainer.

>>> from cloudckpt.integrations.fabric import CloudModelParallelStrategy  # doctest: +SKIP
>>> fabric = Fabric(strategy=CloudModelParallelStrategy(parallelize))  # doctest: +SKIP
>>> fabric.save("s3://bucket/run/step-10", state)  # doctest: +SKIP
>>> fabric.load("s3://bucket/run/step-10", state)  # doctest: +SKIP

Paths that are not URIs are handled by Lightning. Tested with lightning 2.5.6 and 2.6.
"""

from __future__ import annotations

from cloudckpt.errors import MissingDependencyError
from cloudckpt.integrations.adapting import watch
from cloudckpt.integrations.lightning_sharded import FabricOnStores
from cloudckpt.integrations.lightning_whole import WholeOnStores

try:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
except ImportError as exc:
    raise MissingDependencyError(
        "cloudckpt.integrations.fabric and .lightning need Lightning: pip install 'lightning>=2.5'"
    ) from exc

__all__ = ["CloudCheckpointIO", "CloudFSDPStrategy", "CloudModelParallelStrategy"]


class CloudCheckpointIO(WholeOnStores, TorchCheckpointIO):  # type: ignore[misc]
    """Saves whole checkpoints to URIs and loads them, for strategies that do not shard.

    >>> trainer = Trainer(plugins=[CloudCheckpointIO()])  # doctest: +SKIP

    One process saves, tensor by tensor. Strategies that shard (``ModelParallelStrategy``,
    ``FSDPStrategy``) do not use the plugin; use this package's strategies instead.
    """


class CloudModelParallelStrategy(FabricOnStores, ModelParallelStrategy):  # type: ignore[misc]
    """Fabric's ``ModelParallelStrategy`` (FSDP2, tensor parallelism) that also saves to URIs."""


class CloudFSDPStrategy(FabricOnStores, FSDPStrategy):  # type: ignore[misc]
    """Fabric's ``FSDPStrategy`` (FSDP1) that also saves to URIs."""


watch("lightning")
