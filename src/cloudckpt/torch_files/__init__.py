"""Writes ``torch.save`` files to a store atomically, reads them, and broadcasts them to ranks."""
