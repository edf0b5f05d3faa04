"""``torch.save`` files on a store: written whole or not at all, read in parts, sent to ranks."""
