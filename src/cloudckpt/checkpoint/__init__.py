"""What a checkpoint is: names, the envelope around a tensor, the manifest, metadata, the commit."""
