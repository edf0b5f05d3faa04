"""Object stores: the interface (``base``), and one module for each kind of store."""
