"""Certificates made for a test: a CA, and what it signs."""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from slagate.workers.runtime.clock import unix_s
from slagate.workers.tls.files import PemFile, TlsFiles

DAY_S = 86400.0


class Pair(NamedTuple):
    """A certificate and its key, as files."""

    cert: Path
    key: Path


class Ca:
    """Signs certificates; `path` has its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.pem"
        now_s = unix_s()
        ca = _builder(self._name, self._name, self._key.public_key(), now_s - DAY_S, now_s + DAY_S)
        ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        _write(self.path, ca.sign(self._key, hashes.SHA256()))

    def issue(
        self, name: str, *, host: str = "127.0.0.1", from_s: float = -DAY_S, to_s: float = DAY_S
    ) -> Pair:
        """A certificate for this host, valid between these times from now, in `name`.pem and .key."""
        key = ec.generate_private_key(ec.SECP256R1())
        now_s = unix_s()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        try:
            other: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            other = x509.DNSName(host)
        builder = _builder(subject, self._name, key.public_key(), now_s + from_s, now_s + to_s)
        builder = builder.add_extension(x509.SubjectAlternativeName([other]), critical=False)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        _write(pair.cert, builder.sign(self._key, hashes.SHA256()))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


def files(pair: Pair | None, ca: Path | None, *, name: str = "") -> TlsFiles:
    """One side's files, under the options of a listener."""
    return TlsFiles(
        cert=None if pair is None else PemFile("--tls-cert", pair.cert),
        key=None if pair is None else PemFile("--tls-key", pair.key),
        ca=None if ca is None else PemFile("--tls-ca", ca),
        server_name=name,
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    from_s: float,
    to_s: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_utc(from_s))
        .not_valid_after(_utc(to_s))
    )


def _utc(at_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(at_s), datetime.timezone.utc)


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
