"""Addresses of listeners and peers, as HOST:PORT."""

from typing import NamedTuple


class Address(NamedTuple):
    """Where to listen or connect; to listen on port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """`host:port`, with an IPv6 host in brackets. Raises `ValueError` saying what is wrong.

    >>> parse_address("127.0.0.1:0")
    Address(host='127.0.0.1', port=0)
    """
    if "/" in text:
        raise ValueError(f"{text[:100]!r} is not host:port, which has no scheme and no path")
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host.strip("[]"):
        raise ValueError(f"{text[:100]!r} is not host:port, as in 127.0.0.1:7000")
    if ":" in host and not bracketed:
        raise ValueError(f"{text[:100]!r} has an IPv6 host without brackets")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError(f"{text[:100]!r} has no port from 0 to 65535")
    return Address(host.strip("[]"), int(port))
