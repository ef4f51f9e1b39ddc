"""Every way a request can end, in one table: error -> (gRPC status, outcome).

The outcome `internal` means a bug of ours and nothing else; no refusal of ours reads INTERNAL, but for what
gRPC itself says that of. A worker's own code is kept, INTERNAL included, under another outcome. Outcomes
are labels of `slagate_requests_total`, so the set is closed.
"""

from enum import Enum

import grpc

from slagate.pools.grid.grid import Stage
from slagate.proto.rpc.status import Status


class Outcome(Enum):
    """How a request ended; each request has exactly one outcome. The value is a label of metrics."""

    __hash__ = object.__hash__  # a member is one object; `Enum` hashes its name, in Python

    COMPLETED = "completed"
    INVALID = "invalid"  # the request is wrong, whatever the fleet does
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"  # every worker that may serve it is at its limit
    UNAVAILABLE = "unavailable"  # no worker that may serve it is up
    WORKER_FAILED = "worker_failed"
    SLOW_CLIENT = "slow_client"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    INTERNAL = "internal"


RETRY_PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata that gRPC's own retry policy obeys: when it is worth trying again."""

NO_RETRY_MS = -1
"""By a negative value gRPC clients do not try again."""


class GatewayError(Exception):
    """An error that ends a request; each subclass has a gRPC status code and an outcome."""

    code = grpc.StatusCode.INTERNAL
    outcome = Outcome.INTERNAL
    retry_after_ms: int | None = None

    def status(self) -> Status:
        """The gRPC status for the client, with `RETRY_PUSHBACK` where a retry later may help."""
        pushback = self.retry_after_ms
        trailers = () if pushback is None else ((RETRY_PUSHBACK, str(pushback)),)
        return Status(self.code, str(self), trailers)


class InvalidRequest(GatewayError):
    """A field of the request, or a key of its metadata, is wrong; `field` is which."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    outcome = Outcome.INVALID

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


class Malformed(GatewayError):
    """What arrived is no valid gRPC call; `code` is the one that gRPC defines for the fault."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    outcome = Outcome.INVALID

    def __init__(self, message: str, *, code: grpc.StatusCode = code) -> None:
        super().__init__(message)
        self.code = code


class UnknownModel(GatewayError):
    """No worker serves this model, or is known to have served it."""

    code = grpc.StatusCode.NOT_FOUND
    outcome = Outcome.INVALID


class Unsupported(InvalidRequest):
    """A field asks for what this gateway does not do."""

    code = grpc.StatusCode.UNIMPLEMENTED


class TooLarge(InvalidRequest):
    """A field is over a limit of the gateway."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    outcome = Outcome.TOO_LARGE


class Overloaded(GatewayError):
    """Every worker that may serve the request is at its limit, and no more may wait for one."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    outcome = Outcome.OVERLOADED
    default_retry_ms = 1000

    def __init__(self, message: str, *, retry_after_ms: int = default_retry_ms) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class NoWorker(GatewayError):
    """No worker that may serve the request is up."""

    code = grpc.StatusCode.UNAVAILABLE
    outcome = Outcome.UNAVAILABLE
    retry_after_ms = 1000


class SlowClient(GatewayError):
    """The client did not take its tokens, and its buffer is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    outcome = Outcome.SLOW_CLIENT


class Aborted(GatewayError):
    """The client called Control.Abort for this request."""

    code = grpc.StatusCode.CANCELLED
    outcome = Outcome.CANCELLED


class DeadlineExceeded(GatewayError):
    """The client's deadline, or the gateway's default limit, has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    outcome = Outcome.DEADLINE


class Draining(GatewayError):
    """The gateway is shutting down, and the time for running requests is over."""

    code = grpc.StatusCode.UNAVAILABLE
    outcome = Outcome.UNAVAILABLE
    retry_after_ms = 1000


OUTCOME_OF_WORKER_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: Outcome.INVALID,
    grpc.StatusCode.OUT_OF_RANGE: Outcome.INVALID,
    grpc.StatusCode.NOT_FOUND: Outcome.INVALID,
    grpc.StatusCode.UNIMPLEMENTED: Outcome.INVALID,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Outcome.OVERLOADED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Outcome.DEADLINE,
}
"""What a worker's answer says of the request; any other code is the worker's failure."""


class LegFailed(GatewayError):
    """A worker refused a leg or failed in it: has the worker's code, and the stage in its message."""

    def __init__(self, stage: Stage, status: Status, *, retryable: bool) -> None:
        super().__init__(f"{stage.value}: {status.message or status.code.name}")
        self.stage = stage
        self.code = status.code
        self.outcome = OUTCOME_OF_WORKER_CODE.get(status.code, Outcome.WORKER_FAILED)
        if status.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            self.retry_after_ms = 1000
        self.retryable = retryable  # another worker may do better, and nothing would happen twice


class ErrorRelayed(GatewayError):
    """The client got the worker's error event behind its tokens, so the call itself ends with OK."""

    code = grpc.StatusCode.OK
    outcome = Outcome.WORKER_FAILED

    def status(self) -> Status:
        """OK without a message: the client has the error event already."""
        return Status(self.code)


INTERNAL = Status(grpc.StatusCode.INTERNAL, "internal error of the gateway; see its log")
CANCELLED = Status(grpc.StatusCode.CANCELLED, "cancelled by the client")
