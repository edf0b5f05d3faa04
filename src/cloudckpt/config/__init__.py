"""The options of saves and loads: frozen, validated, and settable by environment variables.

An option given to the constructor takes precedence over its ``CLOUDCKPT_*`` variable, and the
variable over the default; only three options of :class:`RetryPolicy` have no variable. Sizes are in
bytes (variables also accept ``64MiB``), times in seconds.
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
