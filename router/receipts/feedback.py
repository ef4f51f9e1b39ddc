"""What an ended request teaches: the estimators of its pools, and the error of predicted cache hits.

All of it comes after the request, from its record, so that the way of a request shows none of it.
"""

from slagate.pools.estimator.estimator import Estimator
from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Pool
from slagate.pools.grid.grid import Stage
from slagate.router.receipts.record import Prefilled, Record
from slagate.router.scheduling.policy import StageChoice


def update_estimators(record: Record, itl_s: float | None, fleet: Fleet) -> None:
    """Correct the estimators of a request's pools by its legs and ITL, and count its cache hits."""
    for prefilled in record.prefilled:
        _learn_prefill(prefilled, fleet)
    if not record.decoded or record.decision is None:
        return
    fleet.answers.observe(record.sla.objective, record.stats.n_tokens)
    choice = record.decision.stages[-1]
    pool = fleet.pool(choice.pool, choice.stage)
    estimator = _estimator(choice, pool)
    if pool is None or estimator is None:
        return
    scored, row, first_s = choice.won, choice.row, record.stats.first_token_s
    assert row is not None
    assert scored.itl_s is not None
    rows = scored.pool.rows
    if record.decode_started_s is not None and first_s is not None:
        # What was predicted before it was corrected: the transfer and a step.
        learnt = scored.pool.estimator.coefficients
        work_s = (scored.ttft_s.item(row) - learnt.prefill_offset_s) / learnt.prefill_scale
        estimator.observe_first_response(work_s, first_s - record.decode_started_s)
    if itl_s is None:
        return
    itl_s = max(0.0, itl_s - record.stalled_s / (record.stats.n_tokens - 1))
    batch, tokens = scored.decoding(row)
    predicted_s = scored.itl_s.item(row)
    # An aggregated worker's pace is learnt from its prompts.
    if choice.stage is Stage.DECODE and predicted_s > 0.0:
        pool.table.observe_pace(row, rows.names[row], itl_s / predicted_s)
    estimator.observe_itl(batch, tokens, seconds=itl_s / rows.pace.item(row))


def _learn_prefill(prefilled: Prefilled, fleet: Fleet) -> None:
    choice, cached_tokens = prefilled.choice, prefilled.cached_tokens
    scored, row = choice.won, choice.row
    assert row is not None
    pool = fleet.pool(choice.pool, choice.stage)
    if (member := _member(choice, pool, fleet)) is not None:
        member.prefix_error.add_prompt(scored.pool.cached.cached_tokens.item(row), cached_tokens)
    estimator = _estimator(choice, pool)
    if pool is None or estimator is None or prefilled.seconds is None:
        return
    before, rows = scored.pool.estimator, scored.pool.rows
    own_s = before.work_s(choice.ask.isl_tokens - cached_tokens, cached_tokens)
    own_s = rows.pace.item(row) * (own_s + prefilled.joined_s)
    queued_s, learnt = scored.waiting_s(row), before.coefficients
    estimator.observe_first_response(own_s, prefilled.seconds, queued_s=queued_s)
    predicted_s = learnt.prefill_offset_s + learnt.prefill_scale * (own_s + queued_s)
    if predicted_s > 0.0 and own_s > 0.0:
        weight = own_s / (own_s + queued_s)
        factor = prefilled.seconds / predicted_s
        pool.table.observe_pace(row, rows.names[row], factor, weight)


def _member(choice: StageChoice, pool: Pool | None, fleet: Fleet) -> Member | None:
    """The chosen worker; None: it has left."""
    member = None if pool is None else pool.members.get(choice.worker or "")
    if member is None:
        # It may drain, and its pool with it.
        wanted = (choice.stage, choice.pool, choice.worker)
        found = (each for each in fleet.all_members() if each.is_draining)
        member = next((m for m in found if (m.stage, m.pool, m.address) == wanted), None)
    return member


def _estimator(choice: StageChoice, pool: Pool | None) -> Estimator | None:
    """What learns from a choice; None: its pool has gone, or is of other workers by now."""
    predicted_by = choice.won.pool.estimator.profile
    if pool is None or pool.estimator.profile is not predicted_by:
        return None
    return pool.estimator
