"""A loopback object store that is fast enough for the client to be what gets measured.

It speaks S3, Google's JSON and XML APIs and Azure's Blob service, all at one port, told apart by
the path.

Run it alone with ``python -m benchmarks.server``, or from a benchmark with
`benchmarks.server.process.running_server`, which starts it as a process of its own.
"""
