"""What an ended request teaches: the estimators of its pools, and the error of predicted cache hits.

All of it comes after the request, from its record, so that the way of a request shows none of it.
"""

from slagate.pools.estimator.estimator import Estimator
from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Pool
from slagate.router.receipts.record import Prefilled, Record
from slagate.router.scheduling.policy import StageChoice


def update_estimators(record: Record, fleet: Fleet) -> None:
    """Correct the estimators of a request's pools by its prefills and ITL, and count its cache hits."""
    for prefilled in record.prefilled:
        _learn_prefill(prefilled, fleet)
    itl_s = record.latencies().itl_s
    if record.decoded and itl_s is not None and record.decision is not None:
        choice = record.decision.stages[-1]
        estimator = _estimator(choice, fleet.pool(choice.pool, choice.stage))
        assert choice.row is not None
        if estimator is not None:
            estimator.observe_itl(*choice.scored[-1].decoding(choice.row), seconds=itl_s)


def _learn_prefill(prefilled: Prefilled, fleet: Fleet) -> None:
    choice, cached_tokens = prefilled.choice, prefilled.cached_tokens
    scored, row = choice.scored[-1], choice.row
    assert row is not None
    pool = fleet.pool(choice.pool, choice.stage)
    if (member := _member(choice, pool, fleet)) is not None:
        member.prefix_error.add_prompt(scored.pool.cached.cached_tokens.item(row), cached_tokens)
    estimator = _estimator(choice, pool)
    if estimator is not None and prefilled.seconds is not None:
        estimator.observe_prefill(
            choice.ask.isl_tokens - cached_tokens,
            cached_tokens,
            queued_s=scored.waiting_s(row),
            seconds=prefilled.seconds,
        )


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
    predicted_by = choice.scored[-1].pool.estimator.profile
    if pool is None or pool.estimator.profile is not predicted_by:
        return None
    return pool.estimator
