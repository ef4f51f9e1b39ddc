"""Errors of a worker call, and how they travel: as gRPC statuses and as `EngineError`s in a stream."""

import re

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status

STATUS_OF_ENGINE_ERROR: dict[int, grpc.StatusCode] = {
    oe.ERROR_CODE_UNSPECIFIED: grpc.StatusCode.INTERNAL,
    oe.ERROR_CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    oe.ERROR_CODE_UNSUPPORTED_FEATURE: grpc.StatusCode.UNIMPLEMENTED,
    oe.ERROR_CODE_ROLE_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    oe.ERROR_CODE_MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    oe.ERROR_CODE_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    oe.ERROR_CODE_REQUEST_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    oe.ERROR_CODE_DUPLICATE_REQUEST: grpc.StatusCode.ALREADY_EXISTS,
    oe.ERROR_CODE_KV_SESSION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    oe.ERROR_CODE_KV_TRANSFER_FAILED: grpc.StatusCode.UNAVAILABLE,
    oe.ERROR_CODE_CANCELLED: grpc.StatusCode.CANCELLED,
    oe.ERROR_CODE_INTERNAL: grpc.StatusCode.INTERNAL,
}
"""The status for each code of an `EngineError`; OpenEngine itself has it for only some codes."""


class WorkerError(Exception):
    """A call to a worker failed; `status` says why. It is the worker's, or that of the connection.

    `address` is the worker's, host:port, or empty where it was not called over the network.
    """

    def __init__(self, status: Status, *, address: str = "") -> None:
        super().__init__(f"{status.code.name}: {status.message}")
        self.status = status
        self.address = address


class RequestRefused(WorkerError):
    """A worker does not take on a call, and has started nothing for it.

    The call is wrong (INVALID_ARGUMENT, ...) or cannot be served now (UNAVAILABLE, ...).
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(Status(code, message))


def status_of_engine_error(error: oe.EngineError) -> Status:
    """The gRPC status that stands for an in-stream `EngineError`; unknown codes read as INTERNAL."""
    code = STATUS_OF_ENGINE_ERROR.get(error.code, grpc.StatusCode.INTERNAL)
    return Status(code, error.message)


MAX_MESSAGE_BYTES = 600
"""Of a status message, in UTF-8. It travels percent-encoded, up to three bytes for one, in headers of which
grpcio takes 8 KiB, and a receipt of 4 KiB, in base64, may travel in the same headers."""

_ADDRESS = re.compile(
    r"(?:ipv4:|ipv6:|unix:|dns:///?)\S+"  # gRPC peer and target names
    r"|\[[0-9a-fA-F]*:[0-9a-fA-F:%.]*\](?::\d+)?"  # [v6]:port
    r"|\b(?:localhost|(?:[\w-]+\.)+[A-Za-z][\w-]*):\d{1,5}\b"  # name:port
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"  # v4 with or without port
)
_PATH = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]+")
_PYTHON = re.compile(
    r"<class '[^']*'>"
    r"|<\w*(?:Rpc|Rendezvous)\w*\b.*>"  # repr of a grpc error: status, details and peer of some call
    r"|(?<![\w.])(?:[A-Za-z_]\w*\.)+[A-Z]\w*\b"  # module.path.ClassName
    r"|Traceback \(most recent call last\):.*",
    re.DOTALL,
)


def scrub(message: str) -> str:
    """A worker's message as clients may see it: short, without addresses, file paths and Python dumps."""
    # Cut first: an engine's error may quote what a client sent, and these patterns look far ahead.
    message = _PYTHON.sub("(internal)", cut(message))
    return cut(_PATH.sub("(path)", _ADDRESS.sub("(address)", message)))


def cut(message: str) -> str:
    """The first `MAX_MESSAGE_BYTES` of a message."""
    return message.encode(errors="replace")[:MAX_MESSAGE_BYTES].decode(errors="ignore")


def invalid(field: str, reason: str) -> RequestRefused:
    """An error to raise, INVALID_ARGUMENT, for a `field` that no worker could take."""
    return RequestRefused(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {reason}")


def unsupported(field: str, reason: str) -> RequestRefused:
    """An error to raise, UNIMPLEMENTED, for a `field` that asks for what this worker cannot do."""
    return RequestRefused(grpc.StatusCode.UNIMPLEMENTED, f"{field}: {reason}")


def not_found(field: str, reason: str) -> RequestRefused:
    """An error to raise, NOT_FOUND, for a `field` that names what this worker does not have."""
    return RequestRefused(grpc.StatusCode.NOT_FOUND, f"{field}: {reason}")
