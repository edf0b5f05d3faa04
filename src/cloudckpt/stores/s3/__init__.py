"""S3 and stores with its API, see :mod:`cloudckpt.stores.s3.store`."""
