"""The bypass of prefill workers: a decode worker that computes a request's prompt too.

It is tried for a request that has both targets, if the fleet file says so, after its workers for
prefill and decode are chosen. The decode worker is chosen as an aggregated one would be, of those that
say that they take such requests. Nothing counts as cached there, as decode pools have no index of
prefixes. It gets the request

    where it is predicted to meet both targets, and
    where the two workers are predicted to miss one, take longer to the first token, or are not to be had

A request that a priority override has placed in a prefill pool goes there.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Stage, StageGrid
from slagate.proto import gateway_pb2 as gw
from slagate.router.scheduling.pairs import ALONE
from slagate.router.scheduling.policy import Decision, StageChoice, choose_stage


def try_bypass(
    decision: Decision,
    stages: Mapping[Stage, StageGrid],
    pools: Mapping[str, PoolSnapshot],
    *,
    draw: float,
    config: gw.GatewayConfig,
) -> Decision:
    """A decision for prefill and decode, or one for a decode worker alone in its place.

    Where that was tried, each has the other one as `untaken`.
    """
    ask, choices = decision.ask, decision.stages
    has_both = ask.sla.ttft_ms is not None and ask.sla.itl_ms is not None
    if not ask.by_targets or not has_both or choices[0].cell.by_rule:
        return decision
    alone = choose_stage(
        Stage.AGG,
        ask,
        stages[Stage.DECODE],
        _WholeViews(pools),
        draw=draw,
        config=config,
        pairing=ALONE,
        says_elsewhere=False,
    )
    if is_better(alone, choices):
        return Decision(ask, (alone,), untaken=choices)
    return Decision(ask, choices, untaken=(alone,))


class _WholeViews(dict[str, PoolSnapshot]):
    """Views of decode pools that predict the requests which they serve alone."""

    def __init__(self, pools: Mapping[str, PoolSnapshot]) -> None:
        super().__init__()
        self._pools = pools

    def __missing__(self, name: str) -> PoolSnapshot:
        view = self._pools[name]
        self[name] = view = view if view.whole is None else replace(view, estimator=view.whole)
        return view


def is_better(alone: StageChoice, choices: tuple[StageChoice, ...]) -> bool:
    """Whether the worker of `alone` gets a request, rather than those of prefill and decode."""
    of = alone.won.pool.estimator
    is_predicted = of.predicts_prefill and of.predicts_itl
    if not alone.is_met or not is_predicted or "grid" in (of.ttft_basis, of.itl_basis):
        return False
    if any(choice.row is None or choice.is_met is False for choice in choices):
        return True
    prefill, _ = choices
    return prefill.is_met is True and alone.first_token_s < prefill.first_token_s
