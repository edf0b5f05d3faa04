"""The format of a checkpoint: object names, tensor envelopes, indexes, metadata, the commit."""
