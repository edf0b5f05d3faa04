"""Measurements of cloudckpt against a reference of plain sockets and against its peers."""
