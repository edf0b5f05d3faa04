"""Diagnoses why a save fails in a new environment: tries each thing that it needs in turn."""

from cloudckpt.doctor.examination import examine
from cloudckpt.doctor.findings import Finding

__all__ = ["Finding", "examine"]
