"""HTTP between a client and an emulator, by the names of requests, with faults."""
