"""Saving while training goes on: staged copies, and the threads and processes that save them."""
