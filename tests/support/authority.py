"""Certificates for servers and clients of tests, from an authority that exists for them alone."""

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_PEM = serialization.Encoding.PEM
_DAY = datetime.timedelta(days=1)
_NOW = datetime.datetime.now(datetime.timezone.utc)


class Authority:
    """Signs certificates. ``bundle`` is the file with its own."""

    def __init__(self, folder: Path, name: str = "cloudckpt tests") -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issued = 0
        certificate = self._signed(self._name, self._key, _NOW + _DAY, _usage("key_cert_sign"))
        self.bundle = str(self._folder / "authority.pem")
        Path(self.bundle).write_bytes(certificate)

    def issue(self, *, host: str = "127.0.0.1", expired: bool = False) -> str:
        """A file with a certificate, for a server at ``host`` or for a client, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        end = _NOW - 9 * _DAY if expired else _NOW + _DAY
        at = x509.SubjectAlternativeName([_general_name(host)])
        usage = _usage("digital_signature")
        certificate = self._signed(_named("a test's"), key, end, usage, at)
        self._issued += 1
        path = self._folder / f"{self._issued}.pem"
        secret = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(certificate + secret)
        return str(path)

    def server(self, certificate: str | None = None) -> ssl.SSLContext:
        """The side of a server that shows ``certificate``, by default one for 127.0.0.1."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.issue() if certificate is None else certificate)
        return context

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        end: datetime.datetime,
        usage: x509.KeyUsage,
        *more: x509.ExtensionType,
    ) -> bytes:
        """A certificate, with the extensions that Python 3.13 wants to see."""
        ours = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(end - 2 * _DAY)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(usage.key_cert_sign, None), critical=True)
            .add_extension(usage, critical=True)
        )
        for extension in (ours, issuer, *more):
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(use: str) -> x509.KeyUsage:
    kinds = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
        "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{kind: kind == use for kind in kinds})
