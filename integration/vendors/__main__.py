"""Prints how our requests differ from those of the vendors' clients: all clouds, or those named."""

import sys

from .report import CLOUDS, compare, report

failed = False
for cloud in sys.argv[1:] or CLOUDS:
    comparison = compare(cloud)
    print(*report(cloud, comparison), sep="\n")
    failed |= bool(comparison.problems())
sys.exit(failed)
