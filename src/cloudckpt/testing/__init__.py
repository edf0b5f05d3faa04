"""For tests of stores and of programs that save checkpoints: a contract, faults, servers."""
