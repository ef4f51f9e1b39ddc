"""How a connection ends: a GOAWAY in two steps that loses no request on its way, and the close."""

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

import anyio

ANSWER_LIMIT_S = 1.0
"""Seconds for the client to answer the ping. Then the final GOAWAY is sent all the same."""

LINGER_S = 5.0
"""Seconds for a peer to read what was written to it, the reason included, before its connection closes."""

_ASKED = b"farewell"


END_LIMIT_S = 1.0
"""Seconds for peers at the end of a process, which does not stay for them."""


class ClosingTransport:
    """A transport between `close` and the end of its connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._all = _closing.setdefault(asyncio.get_running_loop(), set())
        self._all.add(self)
        self.transport = transport
        self.is_over = anyio.Event()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    def transport_closed(self) -> None:
        """Stop waiting: the transport is closed."""
        self._timer.cancel()
        self._all.discard(self)
        self.is_over.set()


_closing: WeakKeyDictionary[asyncio.AbstractEventLoop, set[ClosingTransport]] = WeakKeyDictionary()


def close_in_time(transport: asyncio.Transport) -> ClosingTransport | None:
    """Close a transport when all is written, and abort it after `LINGER_S`: its peer may not read.

    Whoever hears that the transport is closed calls `transport_closed` of what is returned.
    """
    # One of TLS waits for the peer's goodbye too, half a minute by default. It does not count what waits
    # below it, and nothing at all once it is closed.
    is_tls = transport.get_extra_info("ssl_object") is not None
    is_waiting = is_tls or transport.get_write_buffer_size() > 0
    transport.close()
    return ClosingTransport(transport) if is_waiting else None


async def all_closed() -> None:
    """Wait for the connections of this loop that were closed: the last thing before the loop ends.

    A transport of TLS that hears its peer's goodbye while its loop is closed raises from there.
    """
    waiting = list(_closing.get(asyncio.get_running_loop(), ()))
    with anyio.move_on_after(END_LIMIT_S):
        for each in waiting:
            await each.is_over.wait()
    for each in waiting:
        if not each.is_over.is_set():
            each.transport.abort()
            await each.is_over.wait()


class GracefulGoaway:
    """A GOAWAY in two steps: the notice admits all streams, the final one names the last taken.

    Between them goes a ping: its ACK shows that the client has read the notice, and that all it
    sent before has arrived (RFC 9113, section 6.8). The callbacks send the three frames.
    """

    def __init__(
        self,
        *,
        notice: Callable[[], None],
        ping: Callable[[bytes], None],
        last_word: Callable[[], None],
    ) -> None:
        self._notice = notice
        self._ping = ping
        self._last_word = last_word
        self._on_retired: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self, on_retired: Callable[[], None]) -> None:
        """Send the notice; `on_retired` is called once nothing new can come."""
        self._on_retired.append(on_retired)
        self._notice()
        self._ping(_ASKED)
        self._timer = asyncio.get_running_loop().call_later(ANSWER_LIMIT_S, self._finish)

    def ping_acked(self, about: bytes) -> None:
        """Take the ACK of a ping; if it is the one of `start`, send the final GOAWAY."""
        if self._timer is not None and about == _ASKED:
            self._finish()

    def stop(self) -> None:
        """Send nothing more: the connection is over. Calls `on_retired`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._on_retired.pop()()

    def _finish(self) -> None:
        self._last_word()
        self.stop()
