"""Moves bytes in parallel: plans of parts and ranges, and the code that carries them out."""
