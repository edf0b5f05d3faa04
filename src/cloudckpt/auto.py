"""Installs cloudckpt on import, for tools that can import a module but not make a call.

``import cloudckpt.auto`` is ``cloudckpt.install()`` with the options of the environment; see
docs/configuration.md.
"""

from cloudckpt.integrations.install import install

__all__: list[str] = []

install()
