"""TLS contexts for HTTP/2 only, whose handshakes say why they fail."""

import ssl
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from slagate.workers.tls.files import reason

_NOT_TLS = {"HTTP_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"}


def server_context(refused: Callable[[str], None]) -> ssl.SSLContext:
    """The context of a server; `refused` is called with the reason of each failed handshake."""
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.refused = refused
    context.sslobject_class = _Accepted
    # Without session tickets, so that each connection must show its client's certificate.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return _hardened(context)


def client_context() -> ssl.SSLContext:
    """The context of a client, which checks the server's certificate and name."""
    context = _Context(ssl.PROTOCOL_TLS_CLIENT)
    context.sslobject_class = _Dialled
    return _hardened(context)


def explained(error: ssl.SSLError) -> str:
    """Why a handshake failed, for people."""
    if getattr(error, "reason", "") in _NOT_TLS:
        return "the other end does not speak TLS"
    return reason(error)


def _hardened(context: "_Context") -> ssl.SSLContext:
    """Set what HTTP/2 requires (RFC 9113, section 9.2); ciphers are OpenSSL's defaults."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2"])
    return context


class Following(ssl.SSLContext):
    """Stands for the context that is current; event loops use nothing of a context but `wrap_bio`."""

    _current: Callable[[], ssl.SSLContext]

    def __new__(cls, current: Callable[[], ssl.SSLContext]) -> "Following":
        """`current` gives the context for the next connection."""
        self = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        self._current = current
        return self

    @override
    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self._current().wrap_bio(*args, **options)


class _Context(ssl.SSLContext):
    refused: Callable[[str], None]


class _Dialled(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        if self.selected_alpn_protocol() != "h2":
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, "the peer does not speak HTTP/2 (ALPN h2)")


class _Accepted(_Dialled):
    _refusal: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self.context.refused(explained(error))  # type: ignore[attr-defined]
            if getattr(error, "reason", None) in {None, *_NOT_TLS}:
                raise  # there is no alert to send, or the other end would not read it
            # An event loop drops a failed connection at once, without sending the alert that tells the peer
            # why. When told to wait for more data, it sends the alert; the next data, or its time limit,
            # ends it.
            self._refusal = error
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "refused") from error
