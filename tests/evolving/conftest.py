"""Places to save to."""

from dcp.conftest import places

__all__ = ["places"]
