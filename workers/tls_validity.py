"""From when to when a certificate is valid, from its DER: the standard library reads only a peer's."""

from datetime import datetime, timezone


def validity(der: bytes) -> tuple[float, float]:
    """Begin and end, Unix seconds: RFC 5280, section 4.1. Raises `ValueError` for what is no certificate.

    TBSCertificate ::= SEQUENCE { [0] version, serialNumber, signature, issuer, validity, ... }
    """
    try:
        signed = _Der(der).into().into()
        signed.skip(0xA0)  # the version, where there is one
        for _ in ("serialNumber", "signature", "issuer"):
            signed.skip()
        times = signed.into()
        return times.time(), times.time()
    except IndexError as error:
        raise ValueError("the certificate is cut short") from error


def utc(at_s: float) -> str:
    """Unix seconds as a date and time.

    >>> utc(1e9)
    '2001-09-09 01:46:40 UTC'
    """
    return datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


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

    def into(self) -> "_Der":
        """The inside of the next element."""
        return _Der(self._next()[1])

    def skip(self, tag: int | None = None) -> None:
        """Leave out the next element; with a tag, only if it has that."""
        if tag is None or self._data[0] == tag:
            self._next()

    def time(self) -> float:
        """The next element, a time of either form, as Unix seconds."""
        tag, content = self._next()
        text = content.decode("ascii")
        if tag == 0x17:  # UTCTime has two digits of the year: 1950 to 2049
            text = ("19" if text >= "50" else "20") + text
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()
