"""What each request leaves behind: the decision, the attempts, and what really happened.

Prompt text and token ids never appear in it.
"""

import msgspec

from slagate.pools.grid.grid import Stage
from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.status import Status
from slagate.router.receipts.messages import (
    WIRE_STAGE,
    candidate_message,
    choice_steps,
    decision_message,
    decision_steps,
    in_ms,
    sla_message,
)
from slagate.router.request.errors import Outcome
from slagate.router.request.sla import Sla
from slagate.router.scheduling.policy import Decision, StageChoice
from slagate.router.scheduling.score import ScoredRow
from slagate.workers.runtime.cooperative import Steps


class StreamStats(msgspec.Struct, gc=False):
    """What was sent to the client, and when (seconds on the gateway's clock)."""

    n_messages: int = 0
    n_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int | None = None  # of the prompt; None: the engine does not say

    def count_tokens(self, n_tokens: int, now_s: float) -> None:
        """Count tokens that were just passed on."""
        self.n_tokens += n_tokens
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s


MAX_RECEIPT_BYTES = 4096
"""Of the trailer: grpcio clients begin to fail calls with more than 8 KiB of metadata."""

TOP_CANDIDATES = 4
MAX_MESSAGE = 200


class ReceiptNumber(msgspec.Struct, frozen=True, gc=False):
    """A receipt's place among the others of its gateway."""

    number: int  # from 1 on
    unix_s: float
    config_version: str


class Attempt(msgspec.Struct, frozen=True, gc=False, eq=False):
    """How the call to a chosen worker went."""

    choice: StageChoice
    status: str
    message: str

    @property
    def winner(self) -> ScoredRow:
        """The row that was called."""
        winner = self.choice.winner
        assert winner is not None
        return winner

    def to_message(self) -> gw.Attempt:
        """The attempt on the wire."""
        return gw.Attempt(
            stage=WIRE_STAGE[self.choice.stage],
            pool=self.winner.pool,
            worker=self.winner.view.address,
            status=self.status,
            message=self.message,
            chosen=candidate_message(self.winner, model=self.choice.ask.model),
        )


class Prefilled(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A prefill that went well."""

    choice: StageChoice
    cached_tokens: int  # as the engine found
    seconds: float | None  # from the call to the first token, or to the handoff


class Record(msgspec.Struct, gc=False, eq=False):
    """One request's record while it runs. Seconds are on the gateway's clock.

    It refers to nothing but values: not to the request's task, its call, its workers or an exception, which
    would refer back to it.
    """

    started_s: float
    request_id: str = ""
    sla: Sla = Sla()
    max_tokens: int = 0
    decision: Decision | None = None
    attempts: tuple[Attempt, ...] = ()
    waited_s: float = 0.0  # for a worker below its limits
    stats: StreamStats = msgspec.field(default_factory=StreamStats)
    cached_tokens: int | None = None
    prefilled: tuple[Prefilled, ...] = ()  # more than one where prefill was done again
    decoded: bool = False  # whether decoding went well

    def attempt(self, stage: Stage, status: Status) -> None:
        """Note how the call to the stage's chosen worker went."""
        assert self.decision is not None
        choice = self.decision.stage(stage)
        self.attempts += (Attempt(choice, status.code.name, status.message[:MAX_MESSAGE]),)

    def n_attempts(self, stage: Stage) -> int:
        """Calls made to workers of one stage."""
        return sum(1 for attempt in self.attempts if attempt.choice.stage is stage)

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token; None without one."""
        first_s = self.stats.first_token_s
        return None if first_s is None else first_s - self.started_s

    @property
    def itl_s(self) -> float | None:
        """Mean between tokens; None for fewer than two."""
        stats = self.stats
        if stats.n_tokens < 2 or stats.first_token_s is None or stats.last_token_s is None:
            return None
        return (stats.last_token_s - stats.first_token_s) / (stats.n_tokens - 1)

    def ttft_met(self) -> bool | None:
        """Whether the TTFT target was met; None without a target or a token."""
        target_ms = self.sla.ttft_ms
        return None if target_ms is None else _met(self.ttft_s, target_ms)

    def itl_met(self) -> bool | None:
        """Whether the ITL target was met; None without a target or two tokens."""
        target_ms = self.sla.itl_ms
        return None if target_ms is None else _met(self.itl_s, target_ms)

    @property
    def predicted_cached_tokens(self) -> int | None:
        """Prompt tokens that its worker was taken to have cached; None without a worker for the prompt."""
        winner = None if self.decision is None else self.decision.stages[0].winner
        return None if winner is None else winner.view.cached_tokens

    @property
    def choices(self) -> list[StageChoice]:
        """Every choice made for it: those that a retry replaced, oldest first, then the last ones."""
        if self.decision is None:
            return []
        last = self.decision.stages
        replaced: list[StageChoice] = []
        for attempt in self.attempts:
            if attempt.choice not in last and attempt.choice not in replaced:  # compared as objects
                replaced.append(attempt.choice)
        return [*replaced, *last]

    def trailer(self, outcome: Outcome, now_s: float, stamp: ReceiptNumber) -> gw.Receipt:
        """The receipt, cut to what fits a trailer."""
        receipt = self._receipt(outcome, now_s, stamp)
        if self.decision is None:
            return receipt
        # Pool names, ids and tenants are the operator's and the client's to choose, so what fits is
        # found by trying: fewer candidates, then no words, then no candidates.
        for top, words in ((TOP_CANDIDATES, True), (TOP_CANDIDATES, False), (1, False), (0, False)):
            receipt.decision.CopyFrom(
                decision_message(
                    self.decision,
                    request_id=self.request_id[:MAX_MESSAGE],
                    max_tokens=self.max_tokens,
                    top=top,
                )
            )
            if not words:
                receipt.decision.text = ""
            if receipt.ByteSize() <= MAX_RECEIPT_BYTES:
                return receipt
        return gw.Receipt(
            actual=receipt.actual,
            config_version=receipt.config_version,
            number=receipt.number,
            unix_s=receipt.unix_s,
        )

    def full(self, outcome: Outcome, now_s: float, stamp: ReceiptNumber) -> Steps[gw.Receipt]:
        """The receipt with all that is needed to decide again."""
        receipt = self._receipt(outcome, now_s, stamp)
        if self.decision is None:
            return receipt
        for choice in self.choices[: -len(self.decision.stages)]:
            receipt.replaced.append((yield from choice_steps(choice)))
        decision = yield from decision_steps(
            self.decision, request_id=self.request_id, max_tokens=self.max_tokens
        )
        receipt.decision.CopyFrom(decision)
        return receipt

    def _receipt(self, outcome: Outcome, now_s: float, stamp: ReceiptNumber) -> gw.Receipt:
        """The receipt with what is known of a request that got no decision."""
        return gw.Receipt(
            decision=gw.Decision(
                request_id=self.request_id[:MAX_MESSAGE], sla=sla_message(self.sla)
            ),
            attempts=[attempt.to_message() for attempt in self.attempts],
            actual=gw.Actual(
                outcome=outcome.value,
                ttft_ms=in_ms(self.ttft_s),
                itl_ms=in_ms(self.itl_s),
                output_tokens=self.stats.n_tokens,
                cached_tokens=self.cached_tokens,
                predicted_cached_tokens=self.predicted_cached_tokens,
                ttft_met=self.ttft_met(),
                itl_met=self.itl_met(),
                total_ms=(now_s - self.started_s) * 1000,
                waited_ms=None if self.decision is None else self.waited_s * 1000,
            ),
            **msgspec.structs.asdict(stamp),
        )


def _met(actual_s: float | None, target_ms: float) -> bool | None:
    return None if actual_s is None else actual_s * 1000 <= target_ms
