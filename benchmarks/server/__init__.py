"""A loopback S3 server fast enough that the client under test is what gets measured.

Run it alone with ``python -m benchmarks.server``, or from a benchmark with
`benchmarks.server.process.running_server`, which starts it as a process of its own.
"""
