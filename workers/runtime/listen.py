"""What every long-running command shares: listening on an address, and the end on a signal."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import anyio
import grpc.aio
from anyio.abc import TaskStatus

from slagate.proto.rpc.address import Address

T = TypeVar("T")

BACKLOG = 1024
"""Connections that wait to be accepted."""


@contextmanager
def given_by(option: str) -> Iterator[None]:
    """An address that cannot be listened on within the block is told with the option that it is from."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{option}: {error}") from error


def bind(
    server: grpc.aio.Server,
    address: Address,
    credentials: grpc.ServerCredentials | None = None,
) -> Address:
    """Bind a gRPC server and return the real address. Raises `OSError` when that cannot be.

    Without `credentials` it serves plaintext.
    """
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        # gRPC's log has the reason; a socket says it to whoever asks.
        listen_on(address, backlog=0).close()
        raise OSError(f"cannot listen on {address}: gRPC does not say why") from error
    return Address(address.host, port)


def listen_on(address: Address, *, shared: bool = False, backlog: int = BACKLOG) -> socket.socket:
    """A socket that listens there. Raises `OSError` when that cannot be.

    With `shared` others of this user may do so too, and the kernel spreads connections over all. With a
    `backlog` of 0 it is bound only: that keeps the port, and takes no connection.
    """
    try:
        family, kind, protocol, _, at = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Those that are accepted inherit it: a host that vanished does not keep its place for ever.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if family == socket.AF_INET6:
                # A wildcard means every address, also those of IPv4.
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if shared:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(at)
            if backlog:
                listening.listen(backlog)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {address}: {reason}") from error
    return listening


@asynccontextmanager
async def stopped(*, again: Callable[[], None] | None = None) -> AsyncIterator[anyio.Event]:
    """Within the block, an event that is set by SIGTERM or SIGINT.

    `again` is called when the same signal comes once more. Without it the second one ends the process at
    once, by what the kernel does with it, whatever the loop is busy with. One of each kind is not that:
    Ctrl-C reaches a child from the terminal, and then the parent's SIGTERM follows.
    """
    event = anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def watch(*, task_status: TaskStatus[None]) -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                task_status.started()
                seen = set()
                async for number in signals:
                    event.set()
                    if again is None:
                        signal.signal(number, signal.SIG_DFL)
                    elif number in seen:
                        again()
                    seen.add(number)

        # Not before the handlers are in place: who reads the ready line may send a signal at once.
        await tasks.start(watch)
        yield event
        tasks.cancel_scope.cancel()


async def unless_stopped(
    work: Callable[[], Awaitable[T]], *, again: Callable[[], None] | None = None
) -> T | None:
    """What `work` returns, or None after SIGINT or SIGTERM, which end it; `again` is as in `stopped`."""
    result = None
    async with stopped(again=again) as signalled, anyio.create_task_group() as tasks:

        async def watch() -> None:
            await signalled.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        result = await work()
        tasks.cancel_scope.cancel()
    return result


def ignore_hangups() -> None:
    """SIGHUP does nothing from now on; by default it ends the process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@asynccontextmanager
async def on_sighup(act: Callable[[], None]) -> AsyncIterator[None]:
    """Within the block, `act` with each SIGHUP; behind it SIGHUP does nothing.

    Not by the loop's own handlers: it gives SIGHUP back to the default when it takes one away, and for that
    moment SIGHUP ends the process.
    """
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGHUP, lambda _number, _frame: loop.call_soon_threadsafe(act))
    try:
        yield
    finally:
        ignore_hangups()


MAX_READY_LINE_BYTES = 64 << 10
"""What a parent reads at most of a child's stdout before that line ends."""


def ready_line(**fields: str | int | list[int]) -> None:
    """Print the one line on stdout that says the process serves, and where."""
    sys.stdout.write(json.dumps({"event": "ready"} | fields) + "\n")
    sys.stdout.flush()
