"""Why a save fails in new surroundings: what it needs is tried, one thing after the other."""

from cloudckpt.doctor.examination import examine
from cloudckpt.doctor.findings import Finding

__all__ = ["Finding", "examine"]
