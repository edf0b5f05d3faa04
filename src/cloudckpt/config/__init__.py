"""The options: frozen, validated, and each settable by an environment variable.

An option given to the constructor wins over its ``CLOUDCKPT_*`` variable, and that over the
default. Sizes are bytes (variables also take ``64MiB``), times are seconds.
"""

from cloudckpt.config.clouds import AzureOptions, GCSOptions, S3Options
from cloudckpt.config.general import BackgroundOptions, Config, RetryPolicy
from cloudckpt.config.options import MIB, Switch, documented_options, whole_number

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
    "whole_number",
]
