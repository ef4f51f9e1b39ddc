"""What each request leaves behind: the decision, the attempts, and what really happened.

Prompt text and token ids never appear in it.
"""

from slagate.pools.member import Stage
from slagate.proto import gateway_pb2 as gw
from slagate.router.errors import Outcome
from slagate.router.policy import Candidate, Decision, StageChoice
from slagate.router.sla import Sla
from slagate.router.splice import Tally
from slagate.workers.worker import Status

MAX_RECEIPT_BYTES = 4096
"""Of the trailer: grpcio clients begin to fail calls with more than 8 KiB of metadata."""

TOP_CANDIDATES = 4
MAX_MESSAGE = 200

WIRE_STAGE = {
    Stage.PREFILL: gw.STAGE_PREFILL,
    Stage.DECODE: gw.STAGE_DECODE,
    Stage.AGG: gw.STAGE_AGG,
}


def decision_message(
    decision: Decision, *, request_id: str, max_tokens: int, top: int | None
) -> gw.Decision:
    """The wire form; `top` cuts the list of candidates, None keeps all."""
    return gw.Decision(
        request_id=request_id,
        sla=_sla_message(decision.ask.sla),
        isl_tokens=decision.ask.isl_tokens,
        max_tokens=max_tokens,
        stages=[_choice_message(choice, top) for choice in decision.stages],
        text=decision.explain(),
    )


def _sla_message(sla: Sla) -> gw.Sla:
    return gw.Sla(
        ttft_ms=sla.ttft_ms,
        itl_ms=sla.itl_ms,
        priority=sla.priority,
        objective=sla.objective,
        fairness_id=sla.fairness_id,
        session_id=sla.session_id,
    )


def _choice_message(choice: StageChoice, top: int | None) -> gw.StageChoice:
    return gw.StageChoice(
        stage=WIRE_STAGE[choice.stage],
        cell=choice.cell.index,
        base_pool=choice.base_pool,
        pool=choice.pool,
        overridden=choice.overridden,
        targets=[gw.Target(**target._asdict()) for target in choice.targets],
        worker="" if choice.winner is None else choice.winner.view.address,
        candidates=[_candidate_message(c) for c in choice.candidates[:top]],
        candidates_total=len(choice.scored),
        pool_order=choice.pool_order,
        draw=choice.draw,
    )


def _candidate_message(candidate: Candidate) -> gw.Candidate:
    return gw.Candidate(
        worker=candidate.view.address,
        pool=candidate.pool,
        inflight=candidate.view.inflight,
        queued_tokens=candidate.view.queued_tokens,
        score_s=candidate.score_s,
        predicted_ttft_ms=_ms(candidate.predicted_ttft_s),
        predicted_itl_ms=_ms(candidate.predicted_itl_s),
        excluded=candidate.excluded,
        queued_s=candidate.view.queued_s,
        context_tokens=candidate.view.context_tokens,
        suspect=candidate.view.suspect,
        last_chosen=candidate.view.last_chosen,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


class Record:
    """One request's record while it runs. Seconds are on the gateway's clock."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.request_id = ""
        self.sla = Sla()
        self.max_tokens = 0
        self.decision: Decision | None = None
        self.attempts: list[gw.Attempt] = []
        self.tally = Tally()
        self.cached_tokens: int | None = None

    def attempt(self, stage: Stage, status: Status) -> None:
        """Note how the call to the stage's chosen worker went."""
        assert self.decision is not None
        winner = self.decision.stage(stage).winner
        assert winner is not None
        self.attempts.append(
            gw.Attempt(
                stage=WIRE_STAGE[stage],
                pool=winner.pool,
                worker=winner.view.address,
                status=status.code.name,
                message=status.message[:MAX_MESSAGE],
                chosen=_candidate_message(winner),
            )
        )

    def n_attempts(self, stage: Stage) -> int:
        """Calls made to workers of one stage."""
        return sum(1 for attempt in self.attempts if attempt.stage == WIRE_STAGE[stage])

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token; None without one."""
        first_s = self.tally.first_token_s
        return None if first_s is None else first_s - self.started_s

    @property
    def itl_s(self) -> float | None:
        """Mean between tokens; None for fewer than two."""
        tally = self.tally
        if tally.n_tokens < 2 or tally.first_token_s is None or tally.last_token_s is None:
            return None
        return (tally.last_token_s - tally.first_token_s) / (tally.n_tokens - 1)

    def ttft_met(self) -> bool | None:
        """Whether the TTFT target was met; None without a target or a token."""
        return _met(self.ttft_s, self.sla.ttft_ms)

    def itl_met(self) -> bool | None:
        """Whether the ITL target was met; None without a target or two tokens."""
        return _met(self.itl_s, self.sla.itl_ms)

    def receipt(self, outcome: Outcome, now_s: float) -> gw.Receipt:
        """The receipt, cut to what fits a trailer."""
        receipt = gw.Receipt(
            attempts=self.attempts,
            actual=gw.Actual(
                outcome=outcome.value,
                ttft_ms=_ms(self.ttft_s),
                itl_ms=_ms(self.itl_s),
                output_tokens=self.tally.n_tokens,
                cached_tokens=self.cached_tokens,
                ttft_met=self.ttft_met(),
                itl_met=self.itl_met(),
                total_ms=(now_s - self.started_s) * 1000,
            ),
        )
        if self.decision is None:
            receipt.decision.request_id = self.request_id[:MAX_MESSAGE]
            receipt.decision.sla.CopyFrom(_sla_message(self.sla))
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
        return gw.Receipt(actual=receipt.actual)


def _met(actual_s: float | None, target_ms: float | None) -> bool | None:
    if actual_s is None or target_ms is None:
        return None
    return actual_s * 1000 <= target_ms
