"""Decisions on the wire: cut to a few candidates for a trailer, or with all that they were made from."""

import math
from collections.abc import Iterable, Iterator

from msgspec.structs import asdict

from slagate.pools.estimator.accuracy import Calibration
from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.demand import KeptRoom
from slagate.pools.inflight.pair_key import PairKey
from slagate.pools.inflight.table import UNLIMITED
from slagate.proto import gateway_pb2 as gw
from slagate.router.request.sla import Sla
from slagate.router.scheduling.pairs import Pairing
from slagate.router.scheduling.policy import Decision, StageChoice
from slagate.router.scheduling.score import ScoredPool, ScoredRow
from slagate.router.scheduling.words import explained
from slagate.workers.runtime.cooperative import Steps

WIRE_STAGE = {
    Stage.PREFILL: gw.STAGE_PREFILL,
    Stage.DECODE: gw.STAGE_DECODE,
    Stage.AGG: gw.STAGE_AGG,
}
STAGE_OF_WIRE = {wire: stage for stage, wire in WIRE_STAGE.items()}

FIGURES = (
    "inflight", "worker_inflight", "queued_tokens", "queued_s", "context_tokens", "foreign_requests",
    "foreign_s", "last_chosen", "suspect", "device_tokens", "host_tokens", "pace", "join_tokens",
    "takes_whole",
)  # fmt: skip
"""Fields of a `RowView` that a `Candidate` has under the same name."""

FIGURES_WITH_LIMIT = ("max_inflight", "max_queued_tokens", "capacity_tokens")
"""The same, but a `Candidate` has none that is `UNLIMITED`."""

SECONDS_WITH_LIMIT = ("itl_limit_s", "stall_room_s", "join_slack_s", "join_quiet_s")
"""The same, but a `Candidate` has none that is infinite."""

CANDIDATES_A_STEP = 32
"""After so many the event loop runs other tasks: a thousand workers are ten milliseconds of work."""


def decision_message(
    decision: Decision, *, request_id: str, max_tokens: int, top: int
) -> gw.Decision:
    """The decision as a message for a trailer, with at most `top` candidates a stage."""
    stages = (_choice_message(choice, choice.top(top)) for choice in decision.stages)
    return _decision_message(decision, request_id, max_tokens, stages)


def decision_steps(decision: Decision, *, request_id: str, max_tokens: int) -> Steps[gw.Decision]:
    """Make, in steps, the message of a decision with all that is needed to decide again."""
    message = _decision_message(decision, request_id, max_tokens, ())
    for choice in decision.stages:
        message.stages.append((yield from choice_steps(choice)))
    for choice in decision.untaken:
        message.untaken.append((yield from choice_steps(choice)))
    return message


def choice_steps(choice: StageChoice) -> Steps[gw.StageChoice]:
    """Make, in steps, the message of one stage's choice with all that is needed to make it again."""
    message = _choice_message(choice, ())
    message.pools.extend(_pool_look(scored.pool) for scored in choice.scored)
    places: dict[PairKey, int] = {}
    if isinstance(choice.pairing, Pairing):
        message.pairing.CopyFrom(_pairing_message(choice.pairing, choice.scored, places))
    for number, candidate in enumerate(_every_candidate(choice), start=1):
        candidate_of = candidate_message(candidate, model=choice.ask.model)
        candidate_of.pair = places.get(candidate.view.pair, 0)
        message.candidates.append(candidate_of)
        if number % CANDIDATES_A_STEP == 0:
            yield
    return message


def sla_message(sla: Sla) -> gw.Sla:
    """The SLA of a request as a message."""
    return gw.Sla(**{name: getattr(sla, name) for name in gw.Sla.DESCRIPTOR.fields_by_name})


def candidate_message(candidate: ScoredRow, *, model: str) -> gw.Candidate:
    """One scored row as a message; `model` is the request's, which the worker may or may not serve."""
    view = candidate.view
    return gw.Candidate(
        worker=view.address,
        rank=view.rank,
        row=candidate.number,
        pool=candidate.pool,
        state=view.state.value,
        serves_model=model in view.models,
        score_s=candidate.score_s,
        predicted_ttft_ms=in_ms(candidate.predicted_ttft_s),
        predicted_itl_ms=in_ms(candidate.predicted_itl_s),
        excluded=candidate.excluded,
        **{name: getattr(view, name) for name in FIGURES},
        **{
            name: limit
            for name in (*FIGURES_WITH_LIMIT, *SECONDS_WITH_LIMIT)
            if (limit := getattr(view, name)) < UNLIMITED
        },
    )


def in_ms(seconds: float | None) -> float | None:
    """Seconds in milliseconds; None stays None."""
    return None if seconds is None else seconds * 1000


def _decision_message(
    decision: Decision, request_id: str, max_tokens: int, stages: Iterable[gw.StageChoice]
) -> gw.Decision:
    return gw.Decision(
        request_id=request_id,
        model=decision.ask.model,
        sla=sla_message(decision.ask.sla),
        isl_tokens=decision.ask.isl_tokens,
        max_tokens=max_tokens,
        stages=stages,
        text=explained(decision),
        admission=decision.admission,
        admission_mode=decision.ask.admission_mode,
    )


def _choice_message(choice: StageChoice, shown: Iterable[ScoredRow]) -> gw.StageChoice:
    winner = choice.winner
    return gw.StageChoice(
        stage=WIRE_STAGE[choice.stage],
        cell=choice.cell.index,
        base_pool=choice.base_pool,
        pool=choice.pool,
        overridden=choice.overridden,
        targets=[gw.Target(**asdict(target)) for target in choice.targets],
        worker="" if winner is None else winner.view.address,
        rank=None if winner is None else winner.view.rank,
        candidates=[candidate_message(each, model=choice.ask.model) for each in shown],
        candidates_total=sum(map(len, choice.scored)),
        pool_order=choice.pool_order,
        draw=choice.draw,
        starved=choice.starved,
        excluded_workers=sorted(choice.ask.excluded),
        config_version=choice.config.version,
        is_met=choice.is_met,
        elapsed_s=choice.ask.elapsed_s,
        later_s=choice.won.later_s,
        answer_tokens=choice.ask.answer_tokens,
        protected=choice.ask.is_protected,
        yields=choice.ask.yields,
        would_meet=choice.would_meet,
    )


def _pairing_message(
    pairing: Pairing, scored: Iterable[ScoredPool], places: dict[PairKey, int]
) -> gw.Pairing:
    """The pairing as a message; puts the place of each key in it into `places`."""
    for key in (
        *(partner.pair for partner in pairing.partners),
        *(key for each in scored for key in each.pool.rows.pairs.keys),
    ):
        places.setdefault(key, len(places))
    return gw.Pairing(
        keys=[gw.PairKey(**key._asdict()) for key in places],
        partners=[
            gw.Pairing.Partner(key=places[partner.pair], is_open=partner.is_open)
            for partner in pairing.partners
        ],
        strict=pairing.strict,
    )


def _every_candidate(choice: StageChoice) -> Iterator[ScoredRow]:
    """The candidates of `StageChoice.top`, but pool by pool, and made one at a time."""
    winner = choice.winner
    if winner is not None:
        yield winner
    for scored in choice.scored:
        for candidate in scored.candidates(scored.order().tolist()):
            if winner is None or (candidate.pool, candidate.row) != (winner.pool, winner.row):
                yield candidate


def _pool_look(pool: PoolSnapshot) -> gw.PoolLook:
    estimator = pool.estimator
    return gw.PoolLook(
        name=pool.name,
        leases=pool.n_leases,
        coefficients=gw.Coefficients(**asdict(estimator.coefficients)),
        ttft_basis=estimator.ttft_basis,
        itl_basis=estimator.itl_basis,
        kept=None if pool.kept is None else _kept_message(pool.kept),
        ttft_calibration=_calibration(estimator.ttft_calibration),
        itl_calibration=_calibration(estimator.itl_calibration),
    )


def _calibration(line: Calibration | None) -> gw.Calibration | None:
    return None if line is None else gw.Calibration(**line._asdict())


def _kept_message(kept: KeptRoom) -> gw.KeptRoom:
    ttft_s, itl_s = (None if s == math.inf else s for s in (kept.ttft_s, kept.itl_s))
    return gw.KeptRoom(rows=kept.n_rows, ttft_s=ttft_s, itl_s=itl_s)
