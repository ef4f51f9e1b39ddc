"""The channel of grpc that control calls go over; with other certificates comes another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
from anyio.abc import TaskGroup

from slagate.proto import openengine_pb2_grpc as oe_grpc
from slagate.proto.rpc.client_call import MAX_MESSAGE_BYTES
from slagate.proto.rpc.status import Status
from slagate.workers.tls.reloading import ClientTls, closed_hint

CHANNEL_OPTIONS = (
    # Each hop has its own receive limit, and the default of 4 MiB would cut long prompts and outputs.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A worker that restarts must be found again in seconds, not after grpc's two minutes.
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
    # Else a connection whose host has vanished would be kept until TCP gives up. Workers permit pings every
    # 10 s while a call is in flight. grpc waits a minute for an unanswered ping, whatever the keepalive
    # timeout, unless it is told otherwise.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The loopback or fleet network is never behind the proxy of the environment.
    ("grpc.enable_http_proxy", 0),
)


# How grpc begins and ends its message where a server closes a new connection.
_UNCONNECTED = "failed to connect"
_CLOSED = "Socket closed"


def channel_to(address: str, tls: ClientTls | None) -> grpc.aio.Channel:
    """A channel to this address, in plaintext without `tls`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return tls.grpc_channel(address, CHANNEL_OPTIONS)


class ControlChannel:
    """Gives calls a stub with the certificates that are current; `tasks` owns the closing of old channels.

    A channel connects again with what it was made with, so one that is out of date takes no new calls, and
    is closed when its last call has ended.
    """

    def __init__(self, address: str, tls: ClientTls | None, tasks: TaskGroup) -> None:
        self._address = address
        self._tls = tls
        self._tasks = tasks
        # The first one is made with the first call: it may be that there are only streams.
        self._newest: _Channel | None = None
        self._channels: set[_Channel] = set()

    @contextmanager
    def stub(self) -> Iterator[Any]:
        """Context manager that yields the stub for one call, which must end before it exits."""
        used = self._newest
        if used is None or (self._tls is not None and self._tls.current is not used.made_with):
            old, used = used, _Channel(self._address, self._tls)
            self._newest = used
            self._channels.add(used)
            if old is not None:
                self._close_if_unused(old)
        used.n_calls += 1
        try:
            yield used.stub
        finally:
            used.n_calls -= 1
            self._close_if_unused(used)

    def explained(self, status: Status) -> Status:
        """The status, with a hint at TLS where grpc only says that the server has closed."""
        message = status.message
        if message.startswith(_UNCONNECTED) and message.endswith(_CLOSED):
            return status._replace(message=message + closed_hint(self._tls))
        return status

    async def close(self) -> None:
        """Close the channels, which ends every call."""
        for each in self._channels:
            await each.channel.close()

    def _close_if_unused(self, channel: "_Channel") -> None:
        if channel is not self._newest and not channel.n_calls:
            self._channels.discard(channel)
            self._tasks.start_soon(channel.channel.close, None)


class _Channel:
    def __init__(self, address: str, tls: ClientTls | None) -> None:
        self.made_with = None if tls is None else tls.current
        self.channel = channel_to(address, tls)
        self.stub = oe_grpc.ControlStub(self.channel)
        self.n_calls = 0
