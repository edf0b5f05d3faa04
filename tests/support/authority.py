"""Certificates for servers and clients of tests, from an authority that exists for them alone."""

import datetime
import itertools
import ssl
from pathlib import Path

import trustme


class Authority:
    """Signs certificates. ``bundle`` is the file with its own."""

    def __init__(self, folder: Path, name: str = "cloudckpt tests") -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._authority = trustme.CA(organization_name=name)
        self._numbers = itertools.count(1)
        self.bundle = str(self._folder / "authority.pem")
        self._authority.cert_pem.write_to_path(self.bundle)

    def issue(self, *, host: str = "127.0.0.1", expired: bool = False) -> str:
        """A file with a certificate, for a server at ``host`` or for a client, and its key."""
        now = datetime.datetime.now(datetime.timezone.utc)
        end = now + datetime.timedelta(days=-9 if expired else 1)
        made = self._authority.issue_cert(host, not_after=end)
        path = str(self._folder / f"{next(self._numbers)}.pem")
        made.private_key_and_cert_chain_pem.write_to_path(path)
        return path

    def server(self, certificate: str | None = None) -> ssl.SSLContext:
        """The side of a server that shows ``certificate``, by default one for 127.0.0.1."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.issue() if certificate is None else certificate)
        return context
