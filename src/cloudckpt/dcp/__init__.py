"""The adapters that torch.distributed.checkpoint calls."""

from cloudckpt.dcp.torch_log import tell_torchs_logger
from cloudckpt.events import subscribe

subscribe(tell_torchs_logger, progress=False)
