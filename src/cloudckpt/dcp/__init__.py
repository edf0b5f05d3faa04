"""The classes and functions that plan, save and load through torch.distributed.checkpoint."""
