"""S3 and stores with its API, see :mod:`cloudckpt.stores.s3.store`."""

from cloudckpt.errors import MissingDependencyError

try:  # before any module of this package imports them
    import boto3  # noqa: F401
    import botocore  # noqa: F401
except ImportError as exc:
    raise MissingDependencyError(
        "s3:// and hf:// need boto3; install it with: pip install 'cloudckpt[s3]'", cause=exc
    ) from exc
