"""TLS for listening and dialling, from files that are read again when they change.

    files ──change──▶ read and checked ──▶ `current`: a new context, for new connections
                                      └──▶ a problem: logged, and `current` stays

Each connection keeps the context of its handshake. A peer that does not agree on HTTP/2 (ALPN "h2") is
refused.
"""

import asyncio
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc
from typing_extensions import override

from slagate.proto.rpc.address import parse_address
from slagate.proto.rpc.connection_pool import MakeProtocol
from slagate.workers.runtime.clock import unix_s
from slagate.workers.runtime.waiting import FileWatch, run_in_daemon_thread
from slagate.workers.tls.files import Pems, TlsError, TlsFiles, read, reason, utc

log = logging.getLogger(__name__)

POLL_S = 1.0
"""How often the files are checked for a change."""

HANDSHAKE_LIMIT_S = 10.0
"""For the handshake of a client that connects."""

REFUSAL_LOG_S = 1.0
"""The least time between log lines about refused handshakes, of which anybody can cause any number."""

_NOT_TLS = {"HTTP_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"}


class TlsSide(ABC):
    """The files of a server or a client, and `current`, their content that is in use."""

    def __init__(self, side: str, files: TlsFiles, *, unix_s: Callable[[], float] = unix_s) -> None:
        """Reads the files. `side` names them in logs. Raises `TlsError`."""
        self.files = files
        self.side = side
        self._unix_s = unix_s
        self._watch = FileWatch(files.stamp, in_use=files.stamp())
        self.current = self._read()
        self._log_current("tls.loaded")

    @abstractmethod
    def _context(self) -> ssl.SSLContext:
        """A context with what the files have now. Raises `TlsError`."""

    async def follow(self, poll_s: float) -> None:
        """Read the files whenever they have changed, or after `reread`, until cancelled."""
        while True:
            await self._watch.changed(poll_s)
            await self._renew()

    def reread(self) -> None:
        """Have `follow` read the files now."""
        self._watch.ask()

    async def _renew(self) -> None:
        try:
            self.current = await run_in_daemon_thread(self._read)
        except TlsError as error:
            log.error("tls.kept", extra={"side": self.side, "reason": str(error)})
        except Exception:
            log.exception("tls.bug", extra={"side": self.side})
        else:
            self._log_current("tls.renewed")

    def _read(self) -> Pems:
        return read(self.files, self._context, now_s=self._unix_s())

    def _log_current(self, event: str) -> None:
        about = {"side": self.side}
        if self.files.ca is not None:
            about["ca"] = str(self.files.ca)
        if (own := self.current.own) is not None:
            about |= {"cert": str(self.files.cert), "subject": own.subject, "issuer": own.issuer}
            about |= {"serial": own.serial, "expires": utc(own.ends_at_s)}
        log.info(event, extra=about)
        for warning in self.current.warnings:
            log.warning("tls.expired", extra={"side": self.side, "reason": warning})


class ServerTls(TlsSide):
    """TLS of a process's listeners. With a CA bundle, clients need a certificate of it."""

    def __init__(self, side: str, files: TlsFiles, *, unix_s: Callable[[], float] = unix_s) -> None:
        self.on_refused: Callable[[], None] = lambda: None
        self._n_refused = 0
        self._logged_at_s = 0.0
        super().__init__(side, files, unix_s=unix_s)
        self.context: ssl.SSLContext = Following(lambda: self.current.context)
        """For `loop.create_server`; each new connection gets the context that is current then."""

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a listener of grpc, which asks at each handshake whether there are new certificates."""
        given = self.current

        def newer() -> Any:
            nonlocal given
            found = self.current
            if found is given:
                return None
            given = found
            return _grpc_configuration(found)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(given),
            newer,
            require_client_authentication=self.files.ca is not None,
        )

    def handshake_refused(self, why: str) -> None:
        """Count a handshake that failed, and log it, at most once in `REFUSAL_LOG_S`."""
        self._n_refused += 1
        self.on_refused()
        now_s = self._unix_s()
        if not 0 <= now_s - self._logged_at_s < REFUSAL_LOG_S:
            self._logged_at_s = now_s
            about = {"side": self.side, "reason": why, "handshakes": self._n_refused}
            log.warning("tls.refused", extra=about)

    def _context(self) -> ssl.SSLContext:
        return server_context(self.handshake_refused)


class ClientTls(TlsSide):
    """TLS for dialling: the server needs a certificate of the CA bundle, for the name that is dialled."""

    async def dial(self, address: str, make: MakeProtocol) -> None:
        """Connect to an address with the protocol that `make` makes. Raises `OSError`."""
        host, port = parse_address(address)
        name = self.files.server_name or host
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(
                make, host, port, ssl=self.current.context, server_hostname=name
            )
        except ssl.SSLError as error:
            raise OSError(f"TLS: {explained(error)}") from error
        except ConnectionResetError as error:
            raise OSError("TLS: the peer closed the connection within the handshake") from error

    def grpc_channel(
        self, address: str, options: "tuple[tuple[str, Any], ...]"
    ) -> grpc.aio.Channel:
        """A channel of grpc with the certificates that are current; it keeps them."""
        pems, name = self.current, self.files.server_name
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key or None, pems.chain or None)
        if name:
            options = (*options, ("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(address, credentials, options=options)

    def _context(self) -> ssl.SSLContext:
        return client_context()


def closed_hint(tls: ClientTls | None) -> str:
    """A hint for the user, where a server has closed a new connection without an error."""
    return "; it may want TLS" if tls is None else "; it may not take our certificate"


@asynccontextmanager
async def following(
    *sides: TlsSide | None, poll_s: float = POLL_S
) -> AsyncIterator[Callable[[], None]]:
    """Context manager that follows the sides' files; yields a function that has them read now."""
    followed = [side for side in sides if side is not None]

    def reread() -> None:
        for side in followed:
            side.reread()

    async with anyio.create_task_group() as tasks:
        for side in followed:
            tasks.start_soon(side.follow, poll_s)
        yield reread
        tasks.cancel_scope.cancel()


def _grpc_configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.chain)], root_certificates=pems.ca or None
    )


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
