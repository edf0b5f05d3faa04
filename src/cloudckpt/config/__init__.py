"""The options: frozen, validated, and each settable by an environment variable.

An option given to the constructor takes precedence over its ``CLOUDCKPT_*`` variable, and the
variable over the default. Sizes are in bytes (variables also accept ``64MiB``), times in seconds.
"""

from cloudckpt.config.clouds import AzureOptions, GCSOptions, S3Options
from cloudckpt.config.general import BackgroundOptions, Config, RetryPolicy, config_or_default
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
    "config_or_default",
    "documented_options",
    "whole_number",
]
