"""Measurements of cloudckpt against a floor of plain sockets and against its peers."""
