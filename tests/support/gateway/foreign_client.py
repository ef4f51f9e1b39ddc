"""An OpenEngine client that shares no generated code with the product: only the published tables."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import grpc

from support.limits import HANG_S
from support.openengine_tables import METHODS, tables

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A connection of its own for each client: whose request it is depends on that.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

Metadata = Iterable[tuple[str, str | bytes]]


class Answer(NamedTuple):
    """One Generate call, read to its end."""

    tokens: list[int]
    events: list[str]  # in order; consecutive token events are one
    request_ids: set[str]
    reason: str  # of `finished`; empty without one
    finished: Any
    usage: Any
    session: Any  # of `prefill_ready`; None without one
    error: Any  # the terminal EngineError; None without one
    code: grpc.StatusCode
    details: str
    trailers: dict[str, str | bytes]

    @property
    def failed(self) -> bool:
        """Refused by status or by a terminal error event."""
        return self.code is not grpc.StatusCode.OK or self.error is not None

    @property
    def message(self) -> str:
        """The words of the failure."""
        return self.details if self.error is None else self.error.message


class Client:
    """One connection. Use as a context manager."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._calls = {name: method.of(self._channel) for name, method in METHODS.items()}

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def start(
        self, request: Any, metadata: Metadata = (), *, timeout_s: float | None = HANG_S
    ) -> Any:
        """Begin a Generate call; iterating over it gives the responses."""
        return self._calls["Generate"](request, metadata=tuple(metadata), timeout=timeout_s)

    def generate(self, request: Any, metadata: Metadata = ()) -> Answer:
        """A Generate call, read to its end."""
        return read(self.start(request, metadata))

    def start_bytes(self, data: bytes) -> Any:
        """Begin a Generate call with whatever bytes."""
        method = METHODS["Generate"]
        call: Any = self._channel.unary_stream(
            method.path, response_deserializer=tables()[method.response].FromString
        )
        return call(data, timeout=HANG_S)

    def control(self, method: str, **fields: Any) -> Any:
        """A unary call of the Control service. Raises `grpc.RpcError`."""
        request = tables()[METHODS[method].request](**fields)
        return self._calls[method](request, timeout=HANG_S)

    def subscribe(self, **fields: Any) -> Any:
        """Begin a SubscribeKvEvents call."""
        request = tables()["SubscribeKvEventsRequest"](**fields)
        return self._calls["SubscribeKvEvents"](request, timeout=HANG_S)

    def load(self) -> Any:
        return self.control("GetLoad")

    def load_attribute(self, name: str) -> int:
        """A number from GetLoad's attributes."""
        return int(self.load().attributes[name])


def read(call: Any) -> Answer:
    """Read a Generate call to its end."""
    tokens: list[int] = []
    events: list[str] = []
    last: dict[str, Any] = {}
    ids: set[str] = set()
    try:
        for response in call:
            event = response.WhichOneof("event")
            ids.add(response.request_id)
            if event == "token":
                tokens += [token.token_id for token in response.token.tokens]
            if event != "token" or events[-1:] != ["token"]:
                events.append(event)
            last[event] = response
    except grpc.RpcError:
        pass  # the status says it
    end = last.get("finished") or last.get("prefill_ready") or last.get("error")
    finished = last["finished"].finished if "finished" in last else None
    return Answer(
        tokens=tokens,
        events=events,
        request_ids=ids,
        reason="" if finished is None else _reason(finished.reason),
        finished=finished,
        usage=None if end is None else end.usage,
        session=last["prefill_ready"].prefill_ready.kv_session if "prefill_ready" in last else None,
        error=last["error"].error if "error" in last else None,
        code=call.code(),
        details=call.details() or "",
        trailers=dict(call.trailing_metadata() or ()),
    )


def read_tokens(call: Any, n_tokens: int) -> list[int]:
    """Read a call until at least this many tokens have come; the call stays open."""
    tokens: list[int] = []
    while len(tokens) < n_tokens:
        tokens += [token.token_id for token in next(call).token.tokens]
    return tokens


def request(
    tokens: Sequence[int],
    max_tokens: int | None = 8,
    *,
    request_id: str = "r-1",
    model: str = "meta-llama/Meta-Llama-3.1-8B",
    **fields: Any,
) -> Any:
    """A GenerateRequest; `fields` are further fields of it, nested ones as dicts."""
    message: Any = tables()["GenerateRequest"](request_id=request_id, model=model, **fields)
    message.token_ids.ids.extend(tokens)
    if max_tokens is not None:
        message.stopping.max_tokens = max_tokens
    return message


def endless(tokens: Sequence[int], n_tokens: int = 15_000, **fields: Any) -> Any:
    """A request whose answer does not end by itself while a test looks at it: minutes at true speed.

    A worker's KV cache has room for less than thirty of them, so many take fewer tokens each.
    """
    return request(tokens, n_tokens, stopping={"ignore_eos": True}, **fields)


def prefill_leg(message: Any) -> Any:
    """The request as the context-only leg that a prefill worker takes."""
    leg = type(message)()
    leg.CopyFrom(message)
    leg.extra["request_type"] = "context_only"
    leg.stopping.max_tokens = 1
    return leg


def decode_leg(message: Any, session: Any) -> Any:
    """The request as the generation-only leg that a decode worker takes."""
    leg = type(message)()
    leg.CopyFrom(message)
    leg.kv.session.CopyFrom(session)
    return leg


def _reason(number: int) -> str:
    enum: Any = tables()["GenerationFinished"].DESCRIPTOR.fields_by_name["reason"].enum_type
    return str(enum.values_by_number[number].name)
