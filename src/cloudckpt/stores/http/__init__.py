"""The HTTP client: connections, bodies, TLS, and connections that stall."""
