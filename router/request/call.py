"""One client's call, as the front hands it to the code that serves it."""

from dataclasses import dataclass, field

from slagate.proto.rpc.sinks import ResponseWriter
from slagate.proto.rpc.status import Metadata
from slagate.router.request.errors import GatewayError
from slagate.router.request.running import CancelHandle


@dataclass(slots=True)
class ClientCall:
    """One Generate call as it came from a client, with where its answer goes and what can cancel it."""

    data: bytes  # the serialised request
    metadata: Metadata
    peer: str  # the client's address: only the same client may abort it
    timeout_s: float | None  # until the client's deadline; None without one
    out: ResponseWriter  # what the front writes to the client
    running: CancelHandle = field(default_factory=CancelHandle)
    refusal: GatewayError | None = None  # why the front has refused it: then `data` is empty
