"""Google Cloud Storage, see :mod:`cloudckpt.stores.gcs.store`."""
