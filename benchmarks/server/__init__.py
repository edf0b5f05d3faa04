"""A loopback object store that is fast enough for the client to be what gets measured.

It speaks S3.

Run it alone with ``python -m benchmarks.server``, or from a benchmark with
`benchmarks.server.process.running_server`, which starts it as a process of its own.
"""
