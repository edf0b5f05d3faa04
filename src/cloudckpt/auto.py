"""Calls ``cloudckpt.install()`` on import, for tools that can import a module but not make a call.

The options are those of environment variables; see docs/configuration.md.
"""

from cloudckpt.integrations.install import install

__all__: list[str] = []

install()
