"""Why a server cannot be called, in words of the options: it is dialled once more, to look.

What gRPC says of a failed handshake is made for who wrote it, and often is only that the other end has
closed. Here is no event loop: this runs once, when a command has failed already.
"""

import socket
import ssl
from contextlib import closing, suppress

from slagate.proto.rpc.address import Address, parse_address
from slagate.workers.tls.context import client_context, explained, is_no_tls
from slagate.workers.tls.files import Certificate, TlsFiles, read_certificate, utc
from slagate.workers.tls.reloading import ClientTls

LIMIT_S = 5.0
"""For each thing that the other end may say, or not."""

_SETTINGS = 4
"""The type of the frame that HTTP/2 begins with, in either direction."""

_EMPTY_FRAME = bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _EMPTY_FRAME

_CLOSES = "closes new connections without a word: it may have as many as it takes"

# Of X509_verify_cert (OpenSSL's x509_vfy.h).
_NOT_YET_VALID, _EXPIRED = 9, 10
_OF_NO_CA = {18, 19, 20, 21}
_WRONG_NAME = {62, 64}


def why_not(target: str, tls: ClientTls | None) -> str:
    """What keeps a call from getting to `target`, and what to do; empty where nothing does, or is found."""
    try:
        address = parse_address(target)
    except ValueError:
        return ""  # gRPC knows other kinds of them
    try:
        with closing(_connected(address)) as to:
            return _why_not_plain(address, to) if tls is None else _why_not_tls(address, to, tls)
    except TimeoutError:
        return ""
    except OSError as error:
        return f"cannot connect to {address}: {error.strerror or error}"


def _connected(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=LIMIT_S)


def _why_not_plain(address: Address, to: socket.socket) -> str:
    said = _said_to_http2(to)
    if _is_http2(said):
        return ""
    if _speaks_tls(address):
        return (
            f"{address} speaks TLS: give --tls-ca (and --tls-cert and --tls-key, where it asks for a"
            " certificate) in place of --insecure"
        )
    return f"{address} does not speak gRPC" if said else f"{address} {_CLOSES}"


def _why_not_tls(address: Address, to: socket.socket, tls: ClientTls) -> str:
    name = tls.files.server_name or address.host
    try:
        with tls.current.context.wrap_socket(to, server_hostname=name) as shaken:
            if shaken.selected_alpn_protocol() != "h2":
                return f"{address} does not speak gRPC, which is HTTP/2 (ALPN h2)"
            # With TLS 1.3 a server looks at our certificate when for us the handshake is over. Nothing is
            # sent to it, as a server that closes on unread bytes would take its last words back.
            return "" if shaken.recv(1) else _why_not_ours(address, tls, "")
    except ssl.SSLCertVerificationError as error:
        return _why_not_theirs(address, tls, name, error)
    except (ssl.SSLEOFError, ConnectionError):
        return _not_shaken(address, tls)
    except ssl.SSLError as error:
        if is_no_tls(error):
            return _not_shaken(address, tls)
        if "alert" in explained(error):
            return _why_not_ours(address, tls, explained(error))
        return f"TLS with {address} failed: {explained(error)}"


def _not_shaken(address: Address, tls: ClientTls) -> str:
    """The other end does not speak TLS, or has closed without a word."""
    with closing(_connected(address)) as to:
        if _is_http2(_said_to_http2(to)):
            return f"{address} speaks plaintext: give --insecure in place of {_given(tls.files)}"
    if _speaks_tls(address):
        return _why_not_ours(address, tls, "")
    return f"{address} does not speak TLS"


def _why_not_ours(address: Address, tls: ClientTls, alert: str) -> str:
    own = tls.current.own
    is_taken = False if alert else _is_taken(address, tls)
    if is_taken:
        return f"{address} {_CLOSES}"
    if is_taken is None:
        ours = "ask for a client certificate" if own is None else f"not take {tls.files.cert}"
        return f"{address} {_CLOSES}, or {ours}"
    if own is None:
        return f"{address} asks for a client certificate: give --tls-cert and --tls-key"
    return (
        f"{address} does not take {tls.files.cert} ({own.subject}, issued by {own.issuer})"
        f"{alert and f', it says {alert!r}'}: --tls-cert has to be of a CA in the server's --tls-client-ca"
    )


def _is_taken(address: Address, tls: ClientTls) -> bool | None:
    """Whether it is not our certificate, or that we have none: a handshake of TLS 1.2 ends behind that.

    None: it does not speak TLS 1.2.
    """
    context = _with_own(tls)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        with closing(_connected(address)) as to, context.wrap_socket(to):
            return True
    except ssl.SSLError as error:
        return None if error.reason == "TLSV1_ALERT_PROTOCOL_VERSION" else False
    except OSError:
        return False


def _why_not_theirs(
    address: Address, tls: ClientTls, name: str, error: ssl.SSLCertVerificationError
) -> str:
    which, code = f"the certificate of {address}", error.verify_code
    found = _shown(address, tls)
    if found is not None:
        which = f"{which} ({found.subject}, issued by {found.issuer})"
    if code in _OF_NO_CA:
        return f"{which} is of no CA in {tls.files.ca}: give the CA that issued it with --tls-ca"
    if code in _WRONG_NAME:
        names = _names(address, tls)
        return f"{which} is for {names} and not for {name}: give a name of it with --tls-name"
    if code == _EXPIRED:
        until = "" if found is None else f"; its own time ends on {utc(found.ends_at_s)}"
        return f"{which}, or a CA of it, has expired{until}"
    if code == _NOT_YET_VALID:
        since = "yet" if found is None else f"before {utc(found.begins_at_s)}"
        return f"{which} is not valid {since} (or the clock here is wrong)"
    return f"{which} cannot be verified: {error.verify_message}"


def _shown(address: Address, tls: ClientTls) -> Certificate | None:
    """The server's certificate, whatever it is. None: it cannot be had, or read."""
    context = _with_own(tls)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with closing(_connected(address)) as to, context.wrap_socket(to) as shaken:
            return read_certificate(shaken.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        # A server of TLS 1.2 asks for ours before it has shaken hands.
        return None


def _names(address: Address, tls: ClientTls) -> str:
    """What a server's certificate is for, if it is of our CA."""
    context = _with_own(tls)
    context.check_hostname = False
    context.load_verify_locations(cadata=tls.current.ca.decode("ascii"))
    try:
        with closing(_connected(address)) as to, context.wrap_socket(to) as shaken:
            said = shaken.getpeercert() or {}
    except OSError:
        return "other names"  # as in `_shown`
    names = said.get("subjectAltName", ())
    return ", ".join(":".join(map(str, each)) for each in names) or "no name"


def _with_own(tls: ClientTls) -> ssl.SSLContext:
    context = client_context()
    if tls.files.cert is not None and tls.files.key is not None:
        context.load_cert_chain(tls.files.cert.path, tls.files.key.path)
    return context


def _said_to_http2(to: socket.socket) -> bytes:
    """The first words of the other end."""
    said = b""
    with suppress(OSError):
        to.sendall(_HELLO)
        while len(said) < len(_EMPTY_FRAME) and (more := to.recv(64)):
            said += more
    return said


def _is_http2(said: bytes) -> bool:
    return len(said) >= len(_EMPTY_FRAME) and said[3] == _SETTINGS


def _speaks_tls(address: Address) -> bool:
    context = client_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with closing(_connected(address)) as to, context.wrap_socket(to):
            return True
    except ssl.SSLError as error:
        return "alert" in explained(error)  # in words of TLS
    except OSError:
        return False


def _given(files: TlsFiles) -> str:
    """The options that speak of TLS."""
    said = [each.option for each in (files.ca, files.cert, files.key) if each is not None]
    return " and ".join(said + ["--tls-name"] * bool(files.server_name))
