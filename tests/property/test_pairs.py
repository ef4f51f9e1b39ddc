"""Prefill and decode as pairs: against a model that looks at every pair of workers, one by one."""

import random
from collections.abc import Callable
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.pair_key import ANY_PAIR, NO_KEY, PairFit, PairKey, all_fit, fit, misfit
from slagate.pools.inflight.row_view import RowView, State
from slagate.router.scheduling.policy import Decision, StageChoice, choose
from slagate.router.scheduling.score import LIMITS
from support.builders import ask, one_cell, pool_view, view

KEYS = st.builds(
    PairKey,
    transport=st.sampled_from(["", "nixl", "ucx", "auto"]),
    library=st.sampled_from(["", "ucx", "libfabric"]),
    runtime=st.sampled_from(["", "cpp", "python"]),
    kv_dtype=st.sampled_from(["", "fp8", "auto"]),
    manager=st.sampled_from(["", "v1", "v2", "auto"]),
    block_tokens=st.sampled_from([0, 32, 64]),
    handoff_key=st.sampled_from(["", NO_KEY, "0123", "4567"]),
)
STATES = st.sampled_from([State.READY, State.READY, State.READY, State.NOT_READY, State.JOINING])


@st.composite
def stages(draw: st.DrawFn) -> dict[Stage, list[list[RowView]]]:
    """Two pools a stage of up to three workers each, with keys of which some are equal."""
    keys = draw(st.lists(KEYS, min_size=1, max_size=3))
    found: dict[Stage, list[list[RowView]]] = {}
    for stage in (Stage.PREFILL, Stage.DECODE):
        found[stage] = [
            [
                view(
                    f"{stage.value}{pool}{at}:1",
                    state=(state := draw(STATES)),
                    inflight=draw(st.integers(0, 2)),
                    max_inflight=2,
                    pair=ANY_PAIR if state is State.JOINING else draw(st.sampled_from(keys)),
                )
                for at in range(draw(st.integers(0, 3)))
            ]
            for pool in range(2)
        ]
    return found


def decided(of: dict[Stage, list[list[RowView]]], *, partner: PairKey | None = None) -> Decision:
    names = {stage: [f"{stage.value}-0", f"{stage.value}-1"] for stage in of}
    pools: dict[str, PoolSnapshot] = {}
    for stage, of_stage in of.items():
        pools |= {
            name: pool_view(name, rows) for name, rows in zip(names[stage], of_stage, strict=True)
        }
    grids = {stage: one_cell(stage, *names[stage], retry=True) for stage in of}
    return choose(ask(partner=partner), grids, pools, rng=random.Random(3))


def is_open(row: RowView) -> bool:
    return row.state is State.READY and row.inflight < row.max_inflight


def may_open(row: RowView) -> bool:
    """Whether it is worth waiting for, or open already."""
    return row.state is State.JOINING or row.state is State.READY


def best_fit(prefills: list[RowView], decodes: list[RowView]) -> PairFit:
    """The best of all pairs, looked at one by one. What a joining worker will say is not known."""
    return max(
        (
            PairFit.MAYBE
            if State.JOINING in (one.state, other.state)
            else fit(one.pair, other.pair)
            for one, other in product(prefills, decodes)
        ),
        default=PairFit.NO,
    )


def is_refused(choices: tuple[StageChoice, ...]) -> bool:
    """Whether the dispatcher would refuse the request."""
    return any(choice.row is None and not choice.reasons & LIMITS for choice in choices)


def row_of(choice: StageChoice) -> RowView:
    winner = choice.winner
    assert winner is not None
    return winner.view


def which(rows: list[RowView], test: Callable[[RowView], bool]) -> list[RowView]:
    return [row for row in rows if test(row)]


@given(stages())
def test_a_pair_that_fits_is_chosen_where_there_is_one(
    of: dict[Stage, list[list[RowView]]],
) -> None:
    prefills, decodes = ([row for pool in pools for row in pool] for pools in of.values())
    now = best_fit(which(prefills, is_open), which(decodes, is_open))
    decision = decided(of)
    prefill, decode = decision.stages
    if now is PairFit.NO:
        assert prefill.row is None or decode.row is None
        # It waits for a pair that fits, and only for that.
        ever = best_fit(which(prefills, may_open), which(decodes, may_open))
        assert is_refused(decision.stages) == (ever is PairFit.NO)
    else:
        assert fit(row_of(prefill).pair, row_of(decode).pair) is now
    again = decided(of)
    assert [c.worker for c in again.stages] == [c.worker for c in decision.stages]


@given(stages(), KEYS, st.sampled_from([Stage.PREFILL, Stage.DECODE]))
def test_a_retry_of_one_stage_fits_the_worker_of_the_other(
    of: dict[Stage, list[list[RowView]]], partner: PairKey, stage: Stage
) -> None:
    rows, other = [row for pool in of[stage] for row in pool], [view(pair=partner)]

    def best(found: list[RowView]) -> PairFit:
        return best_fit(found, other) if stage is Stage.PREFILL else best_fit(other, found)

    now = best(which(rows, is_open))
    (choice,) = decided({stage: of[stage]}, partner=partner).stages
    if now is PairFit.NO:
        assert choice.row is None
        assert is_refused((choice,)) == (best(which(rows, may_open)) is PairFit.NO)
    else:
        assert best([row_of(choice)]) is now


@given(KEYS, KEYS)
def test_a_fit_is_what_every_field_says(prefill: PairKey, decode: PairKey) -> None:
    found = fit(prefill, decode)
    assert (misfit(prefill, decode) == "") == (found is not PairFit.NO)
    assert all_fit([prefill], [decode]) == (found is PairFit.YES)
    assert fit(prefill, prefill) is fit(ANY_PAIR, ANY_PAIR) is PairFit.YES
    assert fit(prefill, ANY_PAIR) is PairFit.YES
    # What a worker does not say never keeps it from a handoff, but that it seals none.
    assert (fit(ANY_PAIR, decode) is PairFit.YES) == (decode.handoff_key in ("", NO_KEY))
    without_key = decode._replace(handoff_key=NO_KEY), prefill._replace(handoff_key=NO_KEY)
    assert fit(*without_key) is fit(*reversed(without_key))
