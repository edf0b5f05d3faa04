"""The HTTP client: connections, bodies, TLS, proxies, and connections that stall."""
