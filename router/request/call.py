"""One client call, as the code that serves it sees it."""

from dataclasses import dataclass, field

from slagate.proto.rpc.sinks import ResponseWriter
from slagate.proto.rpc.status import Metadata
from slagate.router.request.errors import GatewayError
from slagate.router.request.running import CancelHandle


@dataclass(slots=True)
class ClientCall:
    """One Generate call as the front hands it over."""

    data: bytes
    metadata: Metadata
    peer: str  # who may abort it
    timeout_s: float | None  # what is left of the client's deadline
    out: ResponseWriter  # what the front writes to the client
    running: CancelHandle = field(default_factory=CancelHandle)
    refusal: GatewayError | None = None  # the front's: there is no request to serve
