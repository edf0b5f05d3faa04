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


class Authority:
    """Signs certificates. ``bundle`` is the file with its own."""

    def __init__(self, folder: Path, name: str = "cloudckpt tests") -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issued = 0
        certificate = (
            self._certificate(self._name, self._key, 0)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage(key_cert_sign=True, crl_sign=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.bundle = str(self._folder / "authority.pem")
        Path(self.bundle).write_bytes(certificate.public_bytes(_PEM))

    def issue(self, *, host: str = "127.0.0.1", expired: bool = False) -> str:
        """A file with a certificate, for a server at ``host`` or for a client, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            self._certificate(_named("a test's"), key, 10 if expired else 0)
            .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage(digital_signature=True), critical=True)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._issued += 1
        path = self._folder / f"{self._issued}.pem"
        secret = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(certificate.public_bytes(_PEM) + secret)
        return str(path)

    def server(self, certificate: str | None = None) -> ssl.SSLContext:
        """The side of a server that shows ``certificate``, by default one for 127.0.0.1."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.issue() if certificate is None else certificate)
        return context

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days_ago: int
    ) -> x509.CertificateBuilder:
        end = datetime.datetime.now(datetime.timezone.utc) + _DAY - days_ago * _DAY
        subject_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(end - 2 * _DAY)
            .not_valid_after(end)
            .add_extension(subject_key, critical=False)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def usage(**used: bool) -> x509.KeyUsage:
    """Python 3.13 wants to be told what a key is for."""
    kinds = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
        "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{kind: used.get(kind, False) for kind in kinds})
