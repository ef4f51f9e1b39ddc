"""What an ended request teaches: the estimators of its pools, and the error of predicted cache hits.

All of it comes after the request, from its record, so that the way of a request shows none of it.
"""

import logging
from collections.abc import Iterator

from slagate.pools.estimator.accuracy import BASES, Accuracy
from slagate.pools.estimator.estimator import Estimator
from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Pool
from slagate.pools.grid.grid import Stage
from slagate.router.receipts.record import Pairs, Prefilled, Record
from slagate.router.scheduling.policy import StageChoice
from slagate.router.scheduling.targets import AGG_ITL_SHARE, ITL_SHARE, TTFT_SHARE

log = logging.getLogger(__name__)


def accuracies(pool: Pool) -> Iterator[tuple[str, Accuracy, float]]:
    """Each latency of a pool, how right it is predicted, and the part of a target that may be filled.

    TTFT of a decode pool is that of requests which it serves alone.
    """
    if pool.stage is not Stage.DECODE:
        yield "ttft", pool.estimator.ttft, TTFT_SHARE
    elif pool.whole is not None:
        yield "ttft", pool.whole.ttft, TTFT_SHARE
    if pool.stage is not Stage.PREFILL:
        share = ITL_SHARE if pool.stage is Stage.DECODE else AGG_ITL_SHARE
        yield "itl", pool.estimator.itl, share


def update_estimators(record: Record, itl_s: float | None, fleet: Fleet) -> None:
    """Correct the estimators of a request's pools by its legs and ITL, and count its cache hits.

    Before that, what was predicted of it is paired with what became of it.
    """
    _pair(record.pairs(itl_s), fleet)
    for prefilled in record.prefilled:
        _learn_prefill(prefilled, fleet)
    if not record.decoded or record.decision is None:
        return
    fleet.answers.observe(record.sla.objective, record.stats.n_tokens)
    choice = record.decision.stages[-1]
    pool = fleet.pool(choice.pool, choice.pool_stage)
    estimator = _estimator(choice, pool)
    if pool is None or estimator is None:
        return
    scored, row, first_s = choice.won, choice.row, record.stats.first_token_s
    assert row is not None
    assert scored.itl_s is not None
    rows = scored.pool.rows
    if record.decode_started_s is not None and first_s is not None:
        # What was predicted before it was corrected: the transfer and a step.
        used = scored.pool.estimator.coefficients
        work_s = (scored.first_response_s(row) - used.prefill_offset_s) / used.prefill_scale
        estimator.observe_first_response(work_s, first_s - record.decode_started_s)
    if itl_s is None:
        return
    itl_s = max(0.0, itl_s - record.stalled_s / (record.stats.n_tokens - 1))
    batch: float
    batch, tokens = scored.decoding(row)
    if rows.names[row] == pool.table.names[row]:
        # The batch was one thing when the answer began, another when it ended.
        tokens_then = choice.ask.isl_tokens + choice.ask.growth_tokens
        last_batch, last_tokens = pool.table.decoding(row, tokens_then)
        batch, tokens = (batch + last_batch) / 2, (tokens + last_tokens) / 2
    if choice.pool_stage is Stage.AGG:
        itl_s /= rows.pace.item(row)  # which is learnt from prompts
    else:
        profiled_s = estimator.profiled_itl_s(batch, tokens)
        pool.table.observe_steps(row, rows.names[row], itl_s / profiled_s)
    estimator.observe_itl(batch, tokens, itl_s)


def _pair(pairs: Pairs, fleet: Fleet) -> None:
    """Keep what was predicted of a request beside what became of it."""
    for name, pair in zip(Pairs._fields, pairs, strict=True):
        if pair is None:
            continue
        choice = pair.choice
        pool, predicted_by = fleet.pool(choice.pool, choice.pool_stage), choice.won.pool.estimator
        estimator = _estimator(choice, pool, of_prompt=name == "ttft")
        if pool is None or estimator is None:
            continue
        accuracy = estimator.ttft if name == "ttft" else estimator.itl
        before = accuracy.basis
        if name == "ttft":
            estimator.pair_ttft(predicted_by, pair.predicted_s, pair.later_s, pair.actual_s)
        else:
            estimator.pair_itl(predicted_by, pair.predicted_s, pair.actual_s)
        if accuracy.basis != before:
            about = {"stage": choice.stage.value, "pool": pool.name, "latency": name}
            about |= {"from": before, "to": accuracy.basis}
            if BASES.index(accuracy.basis) > BASES.index(before):
                log.warning("predictions.fell_back", extra=about)
            else:
                log.info("predictions.recovered", extra=about)


def _learn_prefill(prefilled: Prefilled, fleet: Fleet) -> None:
    choice, cached_tokens = prefilled.choice, prefilled.cached_tokens
    scored, row = choice.won, choice.row
    assert row is not None
    pool = fleet.pool(choice.pool, choice.pool_stage)
    address = scored.pool.rows.names[row][0]
    if (member := _member(choice, address, pool, fleet)) is not None:
        member.prefix_error.add_prompt(scored.pool.cached.cached_tokens.item(row), cached_tokens)
    estimator = _estimator(choice, pool, of_prompt=True)
    if pool is None or estimator is None or prefilled.seconds is None:
        return
    before, rows = scored.pool.estimator, scored.pool.rows
    own_s = before.work_s(choice.ask.isl_tokens - cached_tokens, cached_tokens)
    own_s = rows.pace.item(row) * (own_s + prefilled.joined_s)
    estimator.observe_first_response(own_s, prefilled.seconds, queued_s=scored.waiting_s(row))


def _member(choice: StageChoice, address: str, pool: Pool | None, fleet: Fleet) -> Member | None:
    """The chosen worker, which has this address; None: it has left."""
    member = None if pool is None else pool.members.get(address)
    if member is None:
        # It may drain, and its pool with it.
        wanted = (choice.pool_stage, choice.pool, address)
        found = (each for each in fleet.all_members() if each.is_draining)
        member = next((m for m in found if (m.stage, m.pool, m.address) == wanted), None)
    return member


def _estimator(
    choice: StageChoice, pool: Pool | None, *, of_prompt: bool = False
) -> Estimator | None:
    """What learns from a choice, or with `of_prompt` from how long the prompt of one took.

    None: its pool has gone, or is of other workers by now.
    """
    predicted_by = choice.won.pool.estimator.profile
    if pool is None or pool.estimator.profile is not predicted_by:
        return None
    is_bypass = choice.pool_stage is not choice.stage
    return pool.whole if of_prompt and is_bypass else pool.estimator
