"""Azure Blob Storage, see :mod:`cloudckpt.stores.azure.store`."""
