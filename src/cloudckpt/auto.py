"""``import cloudckpt.auto`` installs: for whatever can import a module, and can't make a call.

It is ``cloudckpt.install()`` with the options of the environment, see docs/configuration.md.
"""

from cloudckpt.integrations.install import install

__all__: list[str] = []

install()
