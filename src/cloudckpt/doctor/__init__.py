"""Diagnoses why saving or loading fails in an environment, by trying each required step in turn."""

from cloudckpt.doctor.examination import examine
from cloudckpt.doctor.findings import Finding

__all__ = ["Finding", "examine"]
