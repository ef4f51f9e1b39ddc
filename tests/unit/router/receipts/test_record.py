import grpc
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slagate.pools.grid.grid import Stage, StageGrid
from slagate.pools.inflight.row_view import State
from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.status import OK, Status
from slagate.router.receipts.messages import decision_steps
from slagate.router.receipts.record import MAX_RECEIPT_BYTES, TOP_CANDIDATES, ReceiptNumber, Record
from slagate.router.request.errors import Outcome
from slagate.router.request.sla import MAX_TEXT, Sla
from slagate.router.scheduling.policy import Decision, choose
from slagate.router.scheduling.words import explained
from slagate.workers.runtime.cooperative import run_at_once
from support.builders import MODEL, ask, one_cell, pool_view, profiled, rng, view

Code = grpc.StatusCode
STAGES = (Stage.PREFILL, Stage.DECODE)
STAMP = ReceiptNumber(12, 1.7e9, "0123456789abcdef")


def decision(
    *, sla: Sla | None = None, n_workers: int = 6, name: str = "pool", worker: str = "w"
) -> Decision:
    """Two stages, one pool each, of `n_workers` with growing load."""
    stages: dict[Stage, StageGrid] = {s: one_cell(s, f"{name}-{s.value}") for s in STAGES}
    pools = {
        f"{name}-{s.value}": pool_view(
            f"{name}-{s.value}",
            [
                view(f"{worker}{i}:1", inflight=i, queued_s=float(i), device_tokens=32)
                for i in range(n_workers)
            ],
            speed=profiled(),
        )
        for s in STAGES
    }
    return choose(ask(isl_tokens=4242, sla=sla), stages, pools, rng=rng())


def record(of: Decision | None = None, *, sla: Sla | None = None) -> Record:
    made = Record(10.0)
    made.request_id = "client-1"
    made.sla = sla or Sla()
    made.decision = of
    return made


def receipt(of: Record, outcome: Outcome = Outcome.COMPLETED) -> gw.Receipt:
    made = of.trailer(outcome, 12.0, STAMP)
    assert made.ByteSize() <= MAX_RECEIPT_BYTES
    assert gw.Receipt.FromString(made.SerializeToString()) == made
    return made


def full(of: Record) -> gw.Receipt:
    return run_at_once(of.full(Outcome.COMPLETED, 12.0, STAMP))


def in_full(of: Decision) -> gw.Decision:
    return run_at_once(decision_steps(of, request_id="r", max_tokens=1))


def test_a_receipt_says_what_was_decided_and_what_happened() -> None:
    sla = Sla(100.0, 50.0, 3, "chat", "acme", "s-1", receipt=True)
    of = record(decision(sla=sla), sla=sla)
    of.max_tokens = 64
    of.cached_tokens = 0
    of.waited_s = 0.25
    of.attempt(Stage.PREFILL, OK)
    of.stats.count_tokens(1, 10.25)
    of.stats.count_tokens(4, 10.45)
    got = receipt(of)
    assert got.decision.sla == gw.Sla(
        ttft_ms=100, itl_ms=50, priority=3, objective="chat", fairness_id="acme", session_id="s-1"
    )
    assert (got.decision.request_id, got.decision.isl_tokens) == ("client-1", 4242)
    assert got.decision.max_tokens == 64
    # Of the decode workers that meet 50 ms the fullest; a prefill in 100 ms is beyond all.
    assert [choice.worker for choice in got.decision.stages] == ["w0:1", "w5:1"]
    assert [choice.is_met for choice in got.decision.stages] == [False, True]
    for choice in got.decision.stages:
        assert len(choice.candidates) == TOP_CANDIDATES
        assert choice.candidates_total == 6
        assert choice.candidates[0].worker == choice.worker
        assert list(choice.cell) == [0, 0]
        assert choice.pool_order == [choice.pool]
    prefill, decode = got.decision.stages
    assert prefill.candidates[1].predicted_ttft_ms > 1000
    assert not prefill.candidates[0].HasField("predicted_itl_ms")
    assert decode.candidates[0].HasField("predicted_itl_ms")
    (attempt,) = got.attempts
    assert attempt == gw.Attempt(
        stage=gw.STAGE_PREFILL,
        pool="pool-prefill",
        worker="w0:1",
        status="OK",
        chosen=prefill.candidates[0],
    )
    actual = got.actual
    assert (actual.outcome, actual.output_tokens, actual.total_ms) == ("completed", 5, 2000.0)
    assert actual.ttft_ms == pytest.approx(250.0)
    assert actual.itl_ms == pytest.approx(50.0)
    assert actual.HasField("cached_tokens")
    assert (actual.ttft_met, actual.itl_met) == (False, True)
    assert (actual.waited_ms, actual.predicted_cached_tokens) == (250.0, 32)
    assert (got.number, got.unix_s, got.config_version) == msgspec.structs.astuple(STAMP)
    assert got.decision.model == MODEL


def test_what_is_not_known_is_absent_and_not_zero() -> None:
    got = receipt(record(), Outcome.INVALID)
    assert got.decision == gw.Decision(request_id="client-1", sla=gw.Sla())
    assert got.actual == gw.Actual(outcome="invalid", total_ms=2000.0)
    assert full(record()).decision == got.decision


def test_a_mean_needs_two_tokens_and_a_verdict_needs_a_target() -> None:
    of = record(decision(), sla=Sla(ttft_ms=1000.0, itl_ms=1000.0))
    of.stats.count_tokens(1, 10.5)
    assert of.latencies()[1:] == (None, True, None)
    of.sla = Sla()
    of.stats.count_tokens(1, 10.6)
    assert of.latencies()[2:] == (None, None)
    assert of.latencies().itl_s == pytest.approx(0.1)


def test_a_target_that_is_hit_exactly_is_met_and_the_tightest_never_is() -> None:
    of = record(decision(), sla=Sla(ttft_ms=500.0))
    of.stats.count_tokens(1, 10.5)
    assert of.latencies().ttft_met is True
    of.sla = Sla(ttft_ms=0.0)
    assert of.latencies().ttft_met is False


def test_attempts_are_counted_by_stage_and_their_words_cut() -> None:
    of = record(decision())
    for stage in (Stage.PREFILL, Stage.DECODE, Stage.DECODE):
        of.attempt(stage, Status(OK.code, "x" * 5000))
    assert [of.n_attempts(stage) for stage in Stage] == [1, 2, 0]
    assert max(len(attempt.message) for attempt in of.attempts) == 200


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(max_examples=60)
@given(
    request_id=NAMES.map(lambda text: (text * 1024)[:1024]),
    text=NAMES.map(lambda text: (text * MAX_TEXT)[:MAX_TEXT]),
    name=NAMES,
    n_repeats=st.sampled_from([1, 5, 100]),
    worker=NAMES,
    message=NAMES,
    n_attempts=st.integers(0, 6),
    decided=st.booleans(),
)
def test_a_receipt_fits_its_trailer_whatever_the_names(
    request_id: str,
    text: str,
    name: str,
    n_repeats: int,
    worker: str,
    message: str,
    n_attempts: int,
    *,
    decided: bool,
) -> None:
    sla = Sla(1.0, 1.0, -1, text, text, text, receipt=True)
    of = record(sla=sla)
    of.request_id = request_id
    if decided:
        of.decision = decision(
            sla=sla, n_workers=20, name=name * n_repeats, worker=worker * n_repeats
        )
    status = Status(OK.code, message * 100)
    for _ in range(n_attempts if decided else 0):
        of.attempt(Stage.DECODE, status)
    got = receipt(of)
    assert got.actual.outcome == "completed"


def test_ordinary_long_names_cost_candidates_before_they_cost_the_winner() -> None:
    host = "worker-" + "x" * 150 + ".prod.example.internal"
    got = receipt(record(decision(name="pool-" + "y" * 60, worker=host)))
    assert [choice.worker for choice in got.decision.stages] == [f"{host}0:1"] * 2
    assert got.decision.request_id == "client-1"


def test_the_wire_decision_keeps_every_candidate_when_told_to() -> None:
    of = decision(n_workers=9)
    message = in_full(of)
    assert [len(choice.candidates) for choice in message.stages] == [9, 9]
    assert message.text == explained(of)


def among_equals(seed: int, n_workers: int = 10) -> Decision:
    """One stage, with a busy worker ahead of idle equals."""
    busy = view("busy:1", inflight=9, queued_s=9.0, queued_tokens=900, context_tokens=77)
    views = [busy, *(view(f"w{i}:1") for i in range(n_workers))]
    pools = {"only": pool_view("only", views)}
    return choose(ask(), {Stage.AGG: one_cell(Stage.AGG, "only")}, pools, rng=rng(seed))


def test_the_winner_among_many_equals_is_always_in_the_receipt() -> None:
    winners = set()
    for seed in range(50):
        (choice,) = receipt(record(among_equals(seed))).decision.stages
        assert len(choice.candidates) == TOP_CANDIDATES
        assert choice.candidates[0].worker == choice.worker
        winners.add(choice.worker)
    assert len(winners) > TOP_CANDIDATES


def test_a_decision_is_enough_to_decide_again() -> None:
    for seed in range(50):
        of = among_equals(seed)
        (choice,) = in_full(of).stages
        assert 0 <= choice.draw < 1
        open_ = [c for c in choice.candidates if not c.excluded]
        best_s = min(c.score_s for c in open_)
        # The configuration's order, in which the draw counts.
        order = [f"w{i}:1" for i in range(10)]
        ties = sorted((c.worker for c in open_ if c.score_s == best_s), key=order.index)
        assert ties[int(choice.draw * len(ties))] == choice.worker


def test_a_candidate_shows_all_that_its_score_was_made_of() -> None:
    figures = {
        "rank": 3,
        "suspect": True,
        "worker_inflight": 10,
        "max_inflight": 64,
        "queued_tokens": 900,
        "max_queued_tokens": 8000,
        "queued_s": 9.25,
        "context_tokens": 77,
        "capacity_tokens": 90_000,
        "foreign_requests": 2,
        "foreign_s": 0.125,
        "last_chosen": 5,
        "device_tokens": 64,
        "host_tokens": 32,
    }
    views = [view("a:1"), view("b:1", inflight=9, **figures), view("c:1", models=["other"])]
    pools = {"only": pool_view("only", views, speed=profiled(), n_leases=17)}
    of = choose(ask(), {Stage.AGG: one_cell(Stage.AGG, "only")}, pools, rng=rng())
    (choice,) = in_full(of).stages
    idle, busy, other = sorted(choice.candidates, key=lambda c: c.worker)
    for name, value in figures.items():
        assert getattr(busy, name) == value, name
    assert (busy.row, busy.pool, busy.state, busy.inflight) == (1, "only", "ready", 9)
    assert [c.serves_model for c in (idle, busy, other)] == [True, True, False]
    assert busy.score_s > idle.score_s
    assert [c.excluded for c in (idle, busy, other)] == ["", "", "does not serve the model"]
    for name in ("rank", "max_inflight", "max_queued_tokens", "capacity_tokens"):
        assert (busy.HasField(name), idle.HasField(name)) == (True, False), name  # type: ignore[arg-type]
    (look,) = choice.pools
    assert (look.name, look.leases, look.coefficients.prefill_scale) == ("only", 17, 1.0)


def test_a_limit_of_zero_is_a_limit() -> None:
    pools = {"only": pool_view("only", [view(max_inflight=0)])}
    of = choose(ask(), {Stage.AGG: one_cell(Stage.AGG, "only")}, pools, rng=rng())
    (candidate,) = in_full(of).stages[0].candidates
    assert candidate.HasField("max_inflight")
    assert candidate.max_inflight == 0


def test_the_choice_of_a_retry_names_the_workers_that_had_failed() -> None:
    pools = {"only": pool_view("only", [view("a:1"), view("b:1", rank=2), view("c:1")])}
    failed = ask(excluded=frozenset({"c:1", "a:1"}))
    of = choose(failed, {Stage.AGG: one_cell(Stage.AGG, "only")}, pools, rng=rng())
    (choice,) = in_full(of).stages
    assert (choice.worker, choice.rank) == ("b:1", 2)
    assert list(choice.excluded_workers) == ["a:1", "c:1"]


def test_a_row_that_went_first_because_it_was_idle_for_long_is_said_to_be_starved() -> None:
    views = [view("warm:1", device_tokens=90, last_chosen=100), view("cold:1")]
    pools = {"only": pool_view("only", views, n_leases=100)}
    of = choose(ask(), {Stage.AGG: one_cell(Stage.AGG, "only")}, pools, rng=rng())
    assert [(c.worker, c.starved) for c in in_full(of).stages] == [("cold:1", True)]


def test_a_large_decision_is_put_together_in_small_steps() -> None:
    steps = decision_steps(decision(n_workers=200), request_id="r", max_tokens=1)
    assert sum(1 for _ in steps) == 2 * (200 // 32)


def test_targets_say_what_was_looked_up_and_what_was_only_assumed() -> None:
    prefill, decode = receipt(record(decision(sla=Sla(ttft_ms=70.0)))).decision.stages
    assert list(prefill.targets) == [gw.Target(field="ttft_ms", ms=70, source="request")]
    assert list(decode.targets) == [gw.Target(field="itl_ms", ms=50, source="grid")]


def test_an_attempt_keeps_its_worker_when_the_stage_is_given_to_another() -> None:
    of = record(among_equals(1))
    of.attempt(Stage.AGG, Status(Code.UNAVAILABLE, "gone"))
    assert of.decision is not None
    first = of.decision.stages[0]
    of.decision = of.decision.replace(among_equals(2).stages[0])
    assert first.winner != of.decision.stages[0].winner
    of.attempt(Stage.AGG, OK)
    got = full(of)
    assert [c.worker for c in got.replaced] == [first.top()[0].view.address]
    assert len(got.replaced[0].candidates) == 11
    assert not receipt(of).replaced
    attempts = receipt(of).attempts
    assert [a.worker for a in attempts] == [
        first.top()[0].view.address,
        of.decision.stages[0].top()[0].view.address,
    ]
    assert [a.chosen.worker for a in attempts] == [a.worker for a in attempts]
    assert [a.status for a in attempts] == ["UNAVAILABLE", "OK"]


def test_a_decision_without_a_winner_has_no_worker() -> None:
    pools = {"only": pool_view("only", [view("w:1", state=State.NOT_READY)])}
    of = choose(ask(), {Stage.AGG: one_cell(Stage.AGG, "only")}, pools, rng=rng())
    (choice,) = in_full(of).stages
    assert (choice.worker, choice.pool) == ("", "only")
    assert choice.candidates[0].excluded == "not_ready"


def test_no_message_of_a_receipt_can_hold_token_ids() -> None:
    """No repeated number but the grid cell: a prompt has nowhere to hide."""

    def repeated_numbers(descriptor: object, seen: set[str]) -> set[str]:
        found: set[str] = set()
        for field in descriptor.fields:  # type: ignore[attr-defined]
            if field.message_type is not None and field.message_type.full_name not in seen:
                seen.add(field.message_type.full_name)
                found |= repeated_numbers(field.message_type, seen)
            elif field.message_type is None and field.type != field.TYPE_STRING:
                repeated = field.default_value == [] or field.type == field.TYPE_BYTES
                found |= {field.full_name} if repeated else set()
        return found

    assert repeated_numbers(gw.Receipt.DESCRIPTOR, set()) == {"slagate.v1.StageChoice.cell"}
