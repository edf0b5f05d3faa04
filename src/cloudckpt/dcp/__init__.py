"""The adapters that torch.distributed.checkpoint calls."""
