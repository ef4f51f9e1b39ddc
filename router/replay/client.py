"""One client of a replay: sends a request of a trace, and notes what it sees."""

from collections.abc import Callable
from typing import NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import ResponseWriter
from slagate.proto.rpc.status import Metadata, Status
from slagate.proto.rpc.varints import varint, varints
from slagate.router.replay.classes import RequestClass
from slagate.router.replay.trace import TraceRow
from slagate.router.request.metadata import (
    FAIRNESS_ID,
    ITL,
    OBJECTIVE,
    PRIORITY,
    RECEIPT,
    RECEIPT_TRAILER,
    SESSION_ID,
    TTFT,
)

_TOKEN_IDS_TAG = oe.GenerateRequest(token_ids=oe.TokenIds(ids=[1])).SerializeToString()[:1]
_IDS_TAG = oe.TokenIds(ids=[1]).SerializeToString()[:1]
_TOKEN_TAG = oe.GenerateResponse(token=oe.TokenOutput(output_index=0)).SerializeToString()[:1]


class Ask(NamedTuple):
    """One request of a replay: a row of the trace as a client sends it."""

    row: TraceRow
    sla: RequestClass
    arrival_s: float  # from the first one on
    tokens: npt.NDArray[np.uint32]  # the prompt
    answer_tokens: int  # of its answer: the row's, or fewer by `max_tokens`
    max_tokens: int
    ignore_eos: bool
    tenant: str = ""

    def request(self, model: str) -> bytes:
        """The serialised request."""
        request = oe.GenerateRequest(
            request_id=f"row-{self.row.number}",
            model=model,
            stopping=oe.StoppingOptions(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos),
        )
        ids = varints(self.tokens).data
        token_ids = _IDS_TAG + varint(len(ids)) + ids
        return request.SerializeToString() + _TOKEN_IDS_TAG + varint(len(token_ids)) + token_ids

    def metadata(self) -> Metadata:
        """Targets, class, priority, conversation and tenant, and that a receipt is wanted."""
        named = [
            (TTFT, f"{self.sla.ttft_ms:g}"),
            (ITL, f"{self.sla.itl_ms:g}"),
            (OBJECTIVE, self.sla.name),
            (PRIORITY, str(self.sla.priority)),
            (SESSION_ID, f"conversation-{self.row.conversation}"),
            (RECEIPT, "1"),
        ]
        if self.tenant:
            named.append((FAIRNESS_ID, self.tenant))
        return tuple(named)


class Answer(ResponseWriter):
    """What a client gets for one request. Times are the loop's."""

    def __init__(self, ask: Ask, now_s: Callable[[], float]) -> None:
        self.ask = ask
        self._now_s = now_s
        self.started_s = now_s()
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.ended_s: float | None = None
        self.tokens: list[int] = []  # once it has ended
        self._token_events: list[bytes] = []
        self.status: Status | None = None
        self.receipt = gw.Receipt()

    @property
    def is_answered(self) -> bool:
        """Whether it got a whole answer."""
        return self.status is not None and self.status.code is grpc.StatusCode.OK

    @property
    def is_refused(self) -> bool:
        """Whether the gateway refused it for load."""
        return self.status is not None and self.status.code is grpc.StatusCode.RESOURCE_EXHAUSTED

    @property
    def ttft_s(self) -> float | None:
        """Seconds from its arrival at the gateway to the first token; None without one."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between two tokens; None for fewer than two."""
        if self.first_s is None or self.last_s is None or len(self.tokens) < 2:
            return None
        return (self.last_s - self.first_s) / (len(self.tokens) - 1)

    @override
    def message(self, data: bytes, /) -> None:
        at = data[1] + 2  # behind the request's id, which is short
        if data[at : at + 1] == _TOKEN_TAG:
            self._token_events.append(data)
            self.last_s = self._now_s()
            if self.first_s is None:
                self.first_s = self.last_s

    @override
    def batch(self, messages: list[bytes], /) -> None:
        for data in messages:
            self.message(data)

    @override
    def finish(self, status: Status, /) -> None:
        self.status, self.ended_s = status, self._now_s()
        # By protobuf's rules the bytes of several messages are those of one with the tokens of all.
        response = oe.GenerateResponse.FromString(b"".join(self._token_events))
        self.tokens = [token.token_id for token in response.token.tokens]
        self._token_events.clear()
        for key, value in status.trailers:
            if key == RECEIPT_TRAILER and isinstance(value, bytes):
                self.receipt = gw.Receipt.FromString(value)

    @property
    @override
    def n_bytes(self) -> int:
        return 0

    @override
    def unsent(self) -> tuple[int, ...]:
        return (0,)

    @override
    def discard(self) -> None:
        pass

    @override
    def on_room(self, tell: Callable[[], None], /) -> None:
        tell()
