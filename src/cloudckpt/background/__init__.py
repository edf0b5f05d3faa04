"""Saving while training continues: staged copies, and the threads and processes that save them."""
