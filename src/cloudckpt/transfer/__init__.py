"""Transfers: pure plans of parts and ranges, and the engine that carries them out."""
