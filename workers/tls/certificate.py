"""What a certificate says of itself, from its DER: the standard library reads only a peer's.

    TBSCertificate ::= SEQUENCE { [0] version, serialNumber, signature, issuer, validity, subject, ... }

As RFC 5280, section 4.1, has it.
"""

from datetime import datetime, timezone
from typing import NamedTuple


class Certificate(NamedTuple):
    """Names are as `openssl x509` writes them, for people; times are Unix seconds."""

    subject: str
    issuer: str
    serial: str  # hexadecimal
    begins_at_s: float
    ends_at_s: float


def read_certificate(der: bytes) -> Certificate:
    """Raises `ValueError` for what is no certificate."""
    try:
        signed = _Der(der).into().into()
        signed.skip(0xA0)  # the version, where there is one
        serial = (signed.content().lstrip(b"\0") or b"\0").hex().upper()
        signed.skip()  # signature
        issuer = signed.into().name()
        times = signed.into()
        begins_at_s, ends_at_s = times.time(), times.time()
        return Certificate(signed.into().name(), issuer, serial, begins_at_s, ends_at_s)
    except IndexError as error:
        raise ValueError("the certificate is cut short") from error


def utc(at_s: float) -> str:
    """Unix seconds as a date and time.

    >>> utc(1e9)
    '2001-09-09 01:46:40 UTC'
    """
    return datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


_KINDS = {
    "550403": "CN",
    "550406": "C",
    "550407": "L",
    "550408": "ST",
    "55040a": "O",
    "55040b": "OU",
    "0992268993f22c640119": "DC",
    "2a864886f70d010901": "emailAddress",
}
"""Parts of a name, by the DER of their object identifiers."""

_ENCODINGS = {0x14: "latin-1", 0x1C: "utf-32-be", 0x1E: "utf-16-be"}
"""Of strings, by tag; all others are UTF-8, or ASCII, which is a part of it."""


class _Der:
    """Goes through DER (ITU-T X.690), element by element. Raises `IndexError` behind the last."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def _next(self) -> tuple[int, bytes]:
        tag, n_bytes, start = self._data[0], self._data[1], 2
        if n_bytes & 0x80:
            start += n_bytes & 0x7F
            n_bytes = int.from_bytes(self._data[2:start], "big")
        content = self._data[start : start + n_bytes]
        self._data = self._data[start + n_bytes :]
        return tag, content

    def content(self) -> bytes:
        """The next element, as it is."""
        return self._next()[1]

    def into(self) -> "_Der":
        """The inside of the next element."""
        return _Der(self.content())

    def skip(self, tag: int | None = None) -> None:
        """Leave out the next element; with a tag, only if it has that."""
        if tag is None or self._data[0] == tag:
            self._next()

    def name(self) -> str:
        """All elements, as the parts of a name; those of a kind that is not known have its number."""
        parts = []
        while self._data:
            several = self.into()
            while several._data:
                part = several.into()
                kind = part.content().hex()
                tag, text = part._next()
                value = text.decode(_ENCODINGS.get(tag, "utf-8"), errors="replace")
                shown = "".join(
                    c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value
                )
                parts.append(f"{_KINDS.get(kind, kind)}={shown}")
        return ", ".join(parts)

    def time(self) -> float:
        """The next element, a time of either form, as Unix seconds."""
        tag, content = self._next()
        text = content.decode("ascii")
        if tag == 0x17:  # UTCTime has two digits of the year: 1950 to 2049
            text = ("19" if text >= "50" else "20") + text
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()
