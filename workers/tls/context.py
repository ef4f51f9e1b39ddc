"""Contexts of TLS for HTTP/2 only, and handshakes that say why they fail."""

import ssl
from collections.abc import Callable
from typing import Any

from slagate.workers.tls.files import reason

_NOT_TLS = {"HTTP_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"}


def server_context(refused: Callable[[str], None]) -> ssl.SSLContext:
    """For those who connect; `refused` is told of handshakes that fail, and why."""
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.refused = refused
    context.sslobject_class = _Accepted
    # Each connection shows its certificate: none comes in with what an earlier one has shown.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return _hardened(context)


def client_context() -> ssl.SSLContext:
    """For dialling: checks the server's certificate and name."""
    context = _Context(ssl.PROTOCOL_TLS_CLIENT)
    context.sslobject_class = _Dialled
    return _hardened(context)


def explained(error: ssl.SSLError) -> str:
    """What went wrong with a handshake, for people."""
    if getattr(error, "reason", "") in _NOT_TLS:
        return "the other end does not speak TLS"
    return reason(error)


def _hardened(context: "_Context") -> ssl.SSLContext:
    """What HTTP/2 asks for (RFC 9113, section 9.2); ciphers are OpenSSL's own choice."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2"])
    return context


class Following(ssl.SSLContext):
    """Stands for whichever context is current: event loops ask it for nothing but `wrap_bio`."""

    _current: Callable[[], ssl.SSLContext]

    def __new__(cls, current: Callable[[], ssl.SSLContext]) -> "Following":
        """`current` gives the context for the next connection."""
        self = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        self._current = current
        return self

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """As `ssl.SSLContext.wrap_bio`, of the current context."""
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
                raise  # there is no alert, or nobody who reads it
            # Event loops drop at once what failed, with the alert that tells the peer why. They write it
            # when they are told to wait for more, and more, or the end of their patience, ends it.
            self._refusal = error
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "refused") from error
