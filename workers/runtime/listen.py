"""What long-running commands share: they listen, print a ready line, and end by a signal."""

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
"""Connections that may wait to be accepted."""


@contextmanager
def given_by(option: str) -> Iterator[None]:
    """Context manager that puts `option` in front of the message of an `OSError` from its body."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{option}: {error}") from error


def bind(
    server: grpc.aio.Server,
    address: Address,
    credentials: grpc.ServerCredentials | None = None,
) -> Address:
    """Bind a gRPC server, plaintext without `credentials`; the bound address. Raises `OSError`."""
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        # gRPC tells the reason only to its log; binding a socket raises it.
        listen_on(address, backlog=0).close()
        raise OSError(f"cannot listen on {address}: gRPC does not say why") from error
    return Address(address.host, port)


def listen_on(address: Address, *, shared: bool = False, backlog: int = BACKLOG) -> socket.socket:
    """A socket that listens on the address. Raises `OSError`.

    With `shared`, other sockets of this user may listen there, too, and the kernel spreads connections over
    them. With a `backlog` of 0 it is only bound: it keeps the port, and takes no connection.
    """
    try:
        family, kind, protocol, _, at = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted sockets inherit it, so that one of a vanished host is closed some day.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if family == socket.AF_INET6:
                # A wildcard address includes those of IPv4.
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if shared:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(at)
            if backlog:
                listening.listen(backlog)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {address}: {reason}") from error
    return listening


@asynccontextmanager
async def stopped(*, again: Callable[[], None] | None = None) -> AsyncIterator[anyio.Event]:
    """Context manager that yields an event, which SIGTERM and SIGINT set while it is open.

    `again` is called when the same signal comes a second time. Without it, that ends the process
    at once, even if the loop is blocked. One signal of each kind does not: after a Ctrl-C, which a
    terminal also sends to a child, the child gets its parent's SIGTERM.
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

        # Only now are the handlers in place: a reader of the ready line may send a signal at once.
        await tasks.start(watch)
        yield event
        tasks.cancel_scope.cancel()


async def unless_stopped(
    work: Callable[[], Awaitable[T]], *, again: Callable[[], None] | None = None
) -> T | None:
    """The result of `work()`; None if SIGINT or SIGTERM cancelled it; `again` as in `stopped`."""
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
    """Ignore SIGHUP from now on; by default it ends the process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@asynccontextmanager
async def on_sighup(act: Callable[[], None]) -> AsyncIterator[None]:
    """Context manager: the loop calls `act` at each SIGHUP; after its exit, SIGHUP is ignored."""
    # Not by the loop's own handlers: when one is removed, the loop restores the default for a moment, in
    # which a SIGHUP would end the process.
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGHUP, lambda _number, _frame: loop.call_soon_threadsafe(act))
    try:
        yield
    finally:
        ignore_hangups()


MAX_READY_LINE_BYTES = 64 << 10
"""The most that a parent reads of a child's stdout in search of the line's end."""


def ready_line(**fields: str | int | list[int]) -> None:
    """Print the JSON line on stdout that says that the process serves; `fields` say where."""
    sys.stdout.write(json.dumps({"event": "ready"} | fields) + "\n")
    sys.stdout.flush()
