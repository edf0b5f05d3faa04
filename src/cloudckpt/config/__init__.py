"""The options: frozen, validated, and each settable by an environment variable.

An option given to the constructor wins over its ``CLOUDCKPT_*`` variable, and that over the
default. Sizes are bytes (variables also take ``64MiB``), times are seconds.
"""

from cloudckpt.config.azure import AzureOptions
from cloudckpt.config.background import BackgroundOptions
from cloudckpt.config.gcs import GCSOptions
from cloudckpt.config.general import Config, RetryPolicy
from cloudckpt.config.options import MIB, Switch, documented_options
from cloudckpt.config.s3 import S3Options

__all__ = [
    "MIB",
    "AzureOptions",
    "BackgroundOptions",
    "Config",
    "GCSOptions",
    "RetryPolicy",
    "S3Options",
    "Switch",
    "documented_options",
]
