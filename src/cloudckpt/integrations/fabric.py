"""Lightning Fabric: strategies and a plugin that save to URIs and load from them.

>>> from cloudckpt.integrations.fabric import CloudModelParallelStrategy  # doctest: +SKIP
>>> fabric = Fabric(strategy=CloudModelParallelStrategy(parallelize))  # doctest: +SKIP
>>> fabric.save("s3://bucket/run/step-10", state)  # doctest: +SKIP
>>> fabric.load("s3://bucket/run/step-10", state)  # doctest: +SKIP

All ranks save their shards in one commit. Paths that are not URIs are handled by Lightning.
Tested with lightning 2.5.6 and 2.6.
"""

from __future__ import annotations

from cloudckpt.errors import MissingDependencyError
from cloudckpt.integrations.lightning_state import FabricOnStores, PluginOnStores

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
]


class CloudCheckpointIO(PluginOnStores, TorchCheckpointIO):  # type: ignore[misc]
    """Plugin for jobs on one device: saves whole checkpoints to URIs, and loads them.

    >>> trainer = Trainer(plugins=[CloudCheckpointIO()])  # doctest: +SKIP

    On several ranks use the strategies of this module: with Lightning's own strategies, the other
    ranks would wait at the next barrier forever if the save on the first rank failed.
    """


class CloudDDPStrategy(FabricOnStores, DDPStrategy):  # type: ignore[misc]
    """Fabric's ``DDPStrategy`` that also saves to URIs, with the work divided among the ranks."""


class CloudModelParallelStrategy(FabricOnStores, ModelParallelStrategy):  # type: ignore[misc]
    """Fabric's ``ModelParallelStrategy`` (FSDP2, tensor parallelism) that also saves to URIs."""


class CloudFSDPStrategy(FabricOnStores, FSDPStrategy):  # type: ignore[misc]
    """Fabric's ``FSDPStrategy`` (FSDP1) that also saves to URIs."""
