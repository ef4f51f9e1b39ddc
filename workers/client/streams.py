"""A worker's streams over gRPC: the only module on the gateway's worker side that carries tokens."""

import anyio.abc
import grpc

from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.client_call import ServerStreamCall, call_headers
from slagate.proto.rpc.connection_pool import ConnectionPool, Dial, dial_tcp
from slagate.proto.rpc.headers import to_headers
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.tls.reloading import ClientTls, closed_hint
from slagate.workers.worker import GENERATE, SUBSCRIBE_KV_EVENTS

_CLOSING = Status(grpc.StatusCode.CANCELLED, "the channel is closing")


class StreamChannel:
    """Starts streams to one worker, over connections that come and go as they are needed."""

    def __init__(
        self,
        address: str,
        tasks: anyio.abc.TaskGroup,
        *,
        settings: Http2Settings | None = None,
        dial: Dial = dial_tcp,
        tls: ClientTls | None = None,
    ) -> None:
        """`tasks` owns the connecting, which is `dial`'s, or that of `tls` where there is one."""
        scheme = b"http" if tls is None else b"https"
        authority = address.encode(errors="replace")
        self._headers = {
            path: call_headers(path, authority, scheme=scheme)
            for path in (GENERATE, SUBSCRIBE_KV_EVENTS)
        }
        self._calls: set[ServerStreamCall] = set()
        self._is_closed = False
        self.links = ConnectionPool(
            address,
            tasks,
            settings=settings or Http2Settings(),
            dial=dial if tls is None else tls.dial,
            hint=closed_hint(tls),
        )

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"StreamChannel({len(self._calls)} calls, {self.links})"

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """As `Worker.generate`."""
        return self._begin(GENERATE, request, metadata, sink, timeout_s)

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """As `Worker.kv_events`."""
        return self._begin(SUBSCRIBE_KV_EVENTS, request, metadata, sink, None)

    def reachable(self) -> None:
        """As `ConnectionPool.reachable`."""
        self.links.reachable()

    def close(self) -> None:
        """End every call and every connection."""
        self._is_closed = True
        for call in list(self._calls):
            call.end_call(_CLOSING)
        self.links.close(_CLOSING.message)

    def _begin(
        self, path: str, request: bytes, metadata: Metadata, sink: Sink, timeout_s: float | None
    ) -> Call:
        try:
            headers = to_headers(metadata) if metadata else ()
        except ValueError as error:
            sink.finish(Status(grpc.StatusCode.INTERNAL, str(error)))
            return EndedCall()
        call = ServerStreamCall(
            self._headers[path],
            request,
            headers,
            sink,
            timeout_s=timeout_s,
            on_end=self._ended,
            again=self.links.start,
        )
        self._calls.add(call)
        if self._is_closed:
            call.end_call(_CLOSING)
        else:
            self.links.start(call)
        return call

    def _ended(self, call: ServerStreamCall) -> None:
        self._calls.discard(call)
        self.links.drop(call)
