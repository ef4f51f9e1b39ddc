"""What a certificate says of itself, read by `cryptography`: the standard library reads only a peer's."""

from datetime import datetime, timezone
from typing import NamedTuple


class Certificate(NamedTuple):
    """Names are as in RFC 4514, but in the order of the certificate; times are Unix seconds."""

    subject: str
    issuer: str
    serial: str  # hexadecimal
    begins_at_s: float
    ends_at_s: float


def read_certificate(der: bytes) -> Certificate:
    """Raises `ValueError` for what is no certificate."""
    # Only with TLS: it takes its time to import.
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
