"""The record of one request: its decision, the calls to workers, and what really happened.

Prompt text and token ids never appear in it.
"""

from typing import NamedTuple

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
from slagate.workers.runtime.cooperative import Steps


class StreamStats(msgspec.Struct, gc=False):
    """Counts and times of what was sent to the client; seconds are on the gateway's clock."""

    n_messages: int = 0
    n_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int | None = None  # of the prompt; None: the engine does not say

    def count_tokens(self, n_tokens: int, now_s: float) -> None:
        """Count tokens that were passed on to the client at `now_s`."""
        self.n_tokens += n_tokens
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s


MAX_RECEIPT_BYTES = 4096
"""Of the trailer: grpcio clients begin to fail calls with more than 8 KiB of metadata."""

TOP_CANDIDATES = 4
MAX_MESSAGE = 200


class ReceiptNumber(msgspec.Struct, frozen=True, gc=False):
    """The number of a receipt among those of its gateway, its time, and its configuration's version."""

    number: int  # from 1 on
    unix_s: float
    config_version: str


class Attempt(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One call to a chosen worker, and the gRPC status that it ended with."""

    choice: StageChoice
    status: str  # name of the gRPC code
    message: str

    def to_message(self) -> gw.Attempt:
        """The attempt as a message."""
        winner = self.choice.winner
        assert winner is not None, "it was called"
        return gw.Attempt(
            stage=WIRE_STAGE[self.choice.stage],
            pool=winner.pool,
            worker=winner.view.address,
            status=self.status,
            message=self.message,
            chosen=candidate_message(winner, model=self.choice.ask.model),
        )


class Prefilled(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A prefill that went well, for the estimators to learn from."""

    choice: StageChoice
    cached_tokens: int  # as the engine found
    seconds: float | None  # from the call to the first token, or to the handoff
    joined_s: float = 0.0  # work of later prompts in the step in which it ended


class Pair(NamedTuple):
    """A prediction that a choice was made by, and what became of it; both in seconds."""

    choice: StageChoice
    predicted_s: float  # of TTFT until the leg's first response
    later_s: float  # predicted from that on; 0 for ITL
    actual_s: float


class Pairs(NamedTuple):
    """TTFT from the choice on, and ITL less the waits for other prompts; None: it was not predicted."""

    ttft: Pair | None
    itl: Pair | None


NO_PAIRS = Pairs(None, None)


class Latencies(NamedTuple):
    """Latencies of a request in seconds, and whether they met its targets."""

    ttft_s: float | None  # from arrival to the first token; None without a token
    itl_s: float | None  # mean between tokens; None for fewer than two
    ttft_met: bool | None  # None without a latency or a target
    itl_met: bool | None


class Record(msgspec.Struct, gc=False, eq=False):
    """One request's record while it runs. Seconds are on the gateway's clock.

    It refers to nothing but values: not to the request's task, its call, its workers or an exception, which
    would refer back to it.
    """

    started_s: float
    request_id: str = ""
    sla: Sla = Sla()
    max_tokens: int = 0  # output budget
    decision: Decision | None = None
    attempts: tuple[Attempt, ...] = ()
    waited_s: float = 0.0  # for a worker below its limits
    stats: StreamStats = msgspec.field(default_factory=StreamStats)
    cached_tokens: int | None = None  # of the prompt, as the engine found; None: it does not say
    prefilled: tuple[Prefilled, ...] = ()  # more than one where prefill was done again
    decoded: bool = False  # whether decoding went well
    decode_started_s: float | None = None  # when the decode leg that went well was called
    stalled_s: float = 0.0  # that the answer waited for other prompts on an aggregated worker

    def attempt(self, stage: Stage, status: Status) -> None:
        """Add the status with which the call to the stage's chosen worker ended."""
        assert self.decision is not None
        choice = self.decision.stage(stage)
        self.attempts += (Attempt(choice, status.code.name, status.message[:MAX_MESSAGE]),)

    def n_attempts(self, stage: Stage) -> int:
        """Calls made to workers of one stage."""
        return sum(1 for attempt in self.attempts if attempt.choice.stage is stage)

    def latencies(self) -> Latencies:
        """The latencies up to now, compared with the targets."""
        stats, sla = self.stats, self.sla
        first_s, last_s = stats.first_token_s, stats.last_token_s
        ttft_s = itl_s = ttft_met = itl_met = None
        if first_s is not None:
            ttft_s = first_s - self.started_s
            if sla.ttft_ms is not None:
                ttft_met = ttft_s * 1000 <= sla.ttft_ms
            if last_s is not None and stats.n_tokens > 1:
                itl_s = (last_s - first_s) / (stats.n_tokens - 1)
                if sla.itl_ms is not None:
                    itl_met = itl_s * 1000 <= sla.itl_ms
        return Latencies(ttft_s, itl_s, ttft_met, itl_met)

    def pairs(self, itl_s: float | None) -> Pairs:
        """What was predicted of the request, beside what it was; `itl_s` is that of `latencies`.

        There is none of a request that did not end well, or of which a leg was tried again: things went
        another way than was predicted.
        """
        decision, attempts, first_s = self.decision, self.attempts, self.stats.first_token_s
        n_legs = len(decision.stages) if decision is not None and self.decoded else 1
        if decision is None or first_s is None or len(attempts) != n_legs:
            return NO_PAIRS
        for attempt in attempts:
            if attempt.status != "OK":
                return NO_PAIRS
        choice, ttft, itl = decision.stages[0], None, None
        scored, row = choice.won, choice.row
        assert row is not None, "it was served"
        if scored.pool.estimator.predicts_prefill:
            # Where the first token was all, nothing came behind the first leg.
            later_s = scored.later_s if self.decoded else 0.0
            actual_s = first_s - self.started_s - choice.ask.elapsed_s
            ttft = Pair(choice, scored.first_response_s(row), later_s, actual_s)
        choice = decision.stages[-1]
        scored, row = choice.won, choice.row
        if itl_s is not None and self.decoded and scored.pool.estimator.predicts_itl:
            assert row is not None, "it was served"
            assert scored.itl_s is not None, "it decodes"
            stalled_s = self.stalled_s / (self.stats.n_tokens - 1)
            itl = Pair(choice, scored.itl_s.item(row), 0.0, max(0.0, itl_s - stalled_s))
        return Pairs(ttft, itl)

    @property
    def predicted_cached_tokens(self) -> int | None:
        """Prompt tokens predicted to be cached on the first stage's worker; None: no worker was chosen."""
        winner = None if self.decision is None else self.decision.stages[0].winner
        return None if winner is None else winner.view.cached_tokens

    @property
    def choices(self) -> list[StageChoice]:
        """Every choice made for the request: those that retries replaced, oldest first, then the last."""
        if self.decision is None:
            return []
        last = self.decision.stages
        replaced: list[StageChoice] = []
        for attempt in self.attempts:
            if attempt.choice not in last and attempt.choice not in replaced:  # compared as objects
                replaced.append(attempt.choice)
        return [*replaced, *last]

    def trailer(self, outcome: Outcome, now_s: float, stamp: ReceiptNumber) -> gw.Receipt:
        """The receipt for trailing metadata, without what is over `MAX_RECEIPT_BYTES`."""
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
        """Make, in steps, the receipt with all that is needed to decide again."""
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
        ttft_s, itl_s, ttft_met, itl_met = self.latencies()
        ttft, itl = self.pairs(itl_s)
        stalled_s = self.stalled_s / max(1, self.stats.n_tokens - 1)
        predicted_s = None
        if ttft is not None:
            predicted_s = ttft.choice.ask.elapsed_s + ttft.predicted_s + ttft.later_s
        return gw.Receipt(
            decision=gw.Decision(
                request_id=self.request_id[:MAX_MESSAGE], sla=sla_message(self.sla)
            ),
            attempts=[attempt.to_message() for attempt in self.attempts],
            actual=gw.Actual(
                outcome=outcome.value,
                ttft_ms=in_ms(ttft_s),
                itl_ms=in_ms(itl_s),
                output_tokens=self.stats.n_tokens,
                cached_tokens=self.cached_tokens,
                predicted_cached_tokens=self.predicted_cached_tokens,
                predicted_ttft_ms=in_ms(predicted_s),
                predicted_itl_ms=None if itl is None else in_ms(itl.predicted_s),
                stalled_ms=in_ms(stalled_s or None),
                ttft_met=ttft_met,
                itl_met=itl_met,
                total_ms=(now_s - self.started_s) * 1000,
                waited_ms=None if self.decision is None else self.waited_s * 1000,
            ),
            **msgspec.structs.asdict(stamp),
        )
