"""What a checkpoint is: names, the envelope around a tensor, indexes, metadata, the commit."""
