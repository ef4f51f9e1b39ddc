"""The files of TLS, read and checked: certificate chain, private key, CA bundle."""

import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from slagate.workers.runtime.usage import UsageError
from slagate.workers.runtime.waiting import file_stamp

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_KEY = re.compile(rb"-----BEGIN (\w+ )*PRIVATE KEY-----")
_ENCRYPTED = re.compile(rb"BEGIN ENCRYPTED PRIVATE KEY|Proc-Type: *4,ENCRYPTED")


class Certificate(NamedTuple):
    """A certificate. Names are as in RFC 4514, but not reversed; times are Unix seconds."""

    subject: str
    issuer: str
    serial: str  # hexadecimal
    begins_at_s: float
    ends_at_s: float


def read_certificate(der: bytes) -> Certificate:
    """Read a certificate in DER. Raises `ValueError` for other bytes."""
    # Imported here, as only processes with TLS need it, and it takes long.
    from cryptography import x509

    def shown(name: x509.Name) -> str:
        kinds = {x509.NameOID.EMAIL_ADDRESS: "emailAddress"}
        text = ", ".join(part.rfc4514_string(kinds) for part in name.rdns)
        return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)

    try:
        found = x509.load_der_x509_certificate(der)
    except x509.InvalidVersion as error:
        raise ValueError(str(error)) from error
    serial = found.serial_number
    return Certificate(
        subject=shown(found.subject),
        issuer=shown(found.issuer),
        serial=f"{serial:0{(serial.bit_length() + 7) // 8 * 2}X}",
        begins_at_s=found.not_valid_before_utc.timestamp(),
        ends_at_s=found.not_valid_after_utc.timestamp(),
    )


def utc(at_s: float) -> str:
    """Unix seconds as a date and time.

    >>> utc(1e9)
    '2001-09-09 01:46:40 UTC'
    """
    return datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


class TlsError(UsageError):
    """A file for TLS cannot be used; the message names the option, the file and the reason."""


class PemFile(NamedTuple):
    """A file, and the option that it was given by."""

    option: str
    path: Path

    def __str__(self) -> str:
        return f"{self.option} {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files with which a side shows who it is, and checks the other side.

    A server needs a certificate; with a CA bundle, its clients need one, too. A client needs a CA bundle,
    and may have a certificate.
    """

    cert: PemFile | None = None
    key: PemFile | None = None
    ca: PemFile | None = None
    server_name: str = ""  # clients expect it in place of the host that they dial

    def stamp(self) -> object:
        """A value that is different once a file was written; never raises."""
        return [None if file is None else file_stamp(file.path) for file in self._all()]

    def _all(self) -> tuple[PemFile | None, PemFile | None, PemFile | None]:
        return self.cert, self.key, self.ca


class Pems(NamedTuple):
    """What the files had when they were read, and the context made of it."""

    chain: bytes  # empty without such a file, as are key and ca
    key: bytes
    ca: bytes
    context: ssl.SSLContext
    own: Certificate | None  # the first one of the chain
    warnings: tuple[str, ...]  # CA certificates that are not valid now


def read(files: TlsFiles, make: Callable[[], ssl.SSLContext], *, now_s: float) -> Pems:
    """Read and check the files, into a context that `make` makes. `now_s` is in Unix seconds.

    Raises `TlsError`.
    """
    before = files.stamp()
    context = make()
    warnings: list[str] = []
    own, chain, key, ca = None, b"", b"", b""
    if files.cert is not None and files.key is not None:
        blocks, key = _certificates(files.cert), _private_key(files.key)
        chain, own = b"".join(blocks), _certificate(files.cert, blocks[0])
        _check_times(files.cert, blocks[:1], now_s)
        _load_chain(context, files.cert, files.key)
    if files.ca is not None:
        blocks = _certificates(files.ca)
        in_time, late = _sorted_by_time(files.ca, blocks, now_s)
        if not in_time:
            raise TlsError(late[0])
        warnings += late
        ca = b"".join(blocks)
        try:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise TlsError(f"{files.ca} cannot be used: {reason(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    if files.stamp() != before:
        # One file may be new, and another one still the old one.
        raise TlsError(f"{files.cert or files.ca} or what belongs to it changed while it was read")
    return Pems(chain, key, ca, context, own, tuple(warnings))


def reason(error: Exception) -> str:
    """The message of OpenSSL, without its code and source line."""
    return re.sub(r"^\[[^]]*\] | \(_ssl\.c:\d+\)$", "", str(error)) or type(error).__name__


def _content(file: PemFile) -> bytes:
    try:
        return file.path.read_bytes()
    except (OSError, ValueError) as error:
        raise TlsError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def _certificates(file: PemFile) -> list[bytes]:
    blocks = _CERTIFICATE.findall(_content(file))
    if not blocks:
        raise TlsError(f"{file} has no certificate (PEM)")
    return [block.rstrip() + b"\n" for block in blocks]


def _private_key(file: PemFile) -> bytes:
    content = _content(file)
    if _ENCRYPTED.search(content):
        raise TlsError(f"{file} has a passphrase, and nobody to ask for it")
    if not _KEY.search(content):
        raise TlsError(f"{file} has no private key (PEM)")
    return content


def _load_chain(context: ssl.SSLContext, cert: PemFile, key: PemFile) -> None:
    try:
        context.load_cert_chain(cert.path, key.path, password=b"")
    except (ssl.SSLError, OSError, ValueError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{key} is not the key of {cert}") from error
        raise TlsError(f"{cert} with {key} cannot be used: {reason(error)}") from error


# --- times


def _check_times(file: PemFile, blocks: Sequence[bytes], now_s: float) -> None:
    """Raises `TlsError` for a certificate that is not valid at this time."""
    _, late = _sorted_by_time(file, blocks, now_s)
    if late:
        raise TlsError(late[0])


def _certificate(file: PemFile, block: bytes) -> Certificate:
    try:
        return read_certificate(ssl.PEM_cert_to_DER_cert(block.decode("ascii")))
    except ValueError as error:
        raise TlsError(f"{file} has a certificate that cannot be read") from error


def _sorted_by_time(
    file: PemFile, blocks: Sequence[bytes], now_s: float
) -> tuple[list[bytes], list[str]]:
    """The certificates that are valid now, and what is wrong with the others."""
    in_time, late = [], []
    for number, block in enumerate(blocks, 1):
        found = _certificate(file, block)
        which = f"certificate {number}" if len(blocks) > 1 else "the certificate"
        if now_s >= found.ends_at_s:
            late.append(f"{file}: {which} expired on {utc(found.ends_at_s)}")
        elif now_s < found.begins_at_s:
            late.append(f"{file}: {which} is not valid before {utc(found.begins_at_s)}")
        else:
            in_time.append(block)
    return in_time, late
