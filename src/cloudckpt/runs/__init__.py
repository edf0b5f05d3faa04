"""The life of the checkpoints of a run: which there are, which are kept, copied, deleted."""
