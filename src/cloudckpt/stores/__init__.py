"""Object stores: the interface (``base``), and a module or package for each kind of store."""
