"""Where bytes live: one seam (``base``), one file for each kind of store behind it."""
