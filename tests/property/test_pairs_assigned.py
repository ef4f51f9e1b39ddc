"""No request gets a pair of workers that does not fit while one that fits is there, however it came to it.

Random histories of a dispatcher over two pools a stage, whose workers are of random kinds: requests with
and without targets, retries of one stage, start-overs, workers that fail and come back, and requests that
wait. Every decision is held against all pairs of rows that may be chosen, looked at one by one.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.grid import Stage, StageGrid
from slagate.pools.inflight.pair_key import ANY_PAIR, NO_KEY, PairFit, PairKey, fit
from slagate.proto import gateway_pb2 as gw
from slagate.router.request.errors import GatewayError, NoWorker, Overloaded
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.policy import Decision, StageChoice, choose
from slagate.router.scheduling.score import RoutingRequest, score_pool
from slagate.router.scheduling.wait_queue import Assignment, PendingAssignment
from support.builders import MODEL, PROFILE, model_info
from support.fleet.files import disagg_file
from support.seeds import each_seed, n_in

N_STEPS = 120
N_HISTORIES = n_in(gate=20, long=200)

KINDS = [
    PairKey("nixl", "ucx", "cpp", "fp8", "v1", 32, NO_KEY),
    PairKey("nixl", "ucx", "cpp", "bfloat16", "v1", 32, NO_KEY),
    PairKey("ucx", "", "cpp", "fp8", "v1", 32, NO_KEY),
    PairKey("nixl", "ucx", "cpp", "auto", "v1", 32, NO_KEY),
    PairKey("nixl", "ucx", "python", "fp8", "v2", 32, NO_KEY),
    PairKey("nixl", "ucx", "cpp", "fp8", "auto", 32, NO_KEY),
    ANY_PAIR,
]
"""They differ in transport, KV type and manager; one may fit others, one says nothing."""


def mixed_fleet(rng: random.Random) -> Fleet:
    """Two pools a stage, of up to three workers of some of the kinds; all are ready."""
    content: dict[str, Any] = disagg_file()
    content["enable_priority_retry"] = rng.random() < 0.5
    content["scheduling"] = {"spill": "any", "admission": rng.choice(["off", "on"])}
    names = [*content["prefill_pools"], *content["decode_pools"]]
    content["pools"] = {
        name: {
            "workers": [f"{name}-{at}:1" for at in range(rng.randint(1, 3))],
            "max_inflight": rng.randint(1, 3),
            "cost": rng.randint(1, 3),
        }
        | ({"profile": PROFILE, "tp": rng.choice([1, 2])} if rng.random() < 0.8 else {})
        for name in names
    }
    fleet = Fleet(prepare(parse_config(content, source="fleet.json", serving=True)))
    kinds = rng.sample(KINDS, rng.randint(2, 3))
    for member in fleet.members():
        member.set_models({MODEL: model_info()})
        member.probe_ok()
        member.pair = rng.choice(kinds)
        for row in member.ranks.rows:
            fleet.pools[member.pool].table.set_pair(row, member.pair)
    return fleet


def open_kinds(
    stage: Stage, ask: RoutingRequest, grid: StageGrid, pools: Mapping[str, PoolSnapshot]
) -> Iterator[PairKey]:
    """The kind of each row that may be chosen, were there no other stage."""
    for name in grid.pool_names:
        rows, may_be = pools[name].rows, score_pool(stage, ask, pools[name]).is_open
        for row in may_be.nonzero()[0].tolist():
            yield rows.pairs.keys[rows.pairs.ids.item(row)]


class Watched:
    """The policy, with each of its decisions checked as it is made."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def __call__(
        self,
        ask: RoutingRequest,
        stages: Mapping[Stage, StageGrid],
        pools: Mapping[str, PoolSnapshot],
        *,
        rng: random.Random,
        config: gw.GatewayConfig,
    ) -> Decision:
        decision = choose(ask, stages, pools, rng=rng, config=config)
        kinds = {of: list(open_kinds(of, ask, stages[of], pools)) for of in stages}
        if ask.partner is not None:
            other = Stage.DECODE if Stage.PREFILL in stages else Stage.PREFILL
            kinds[other] = [ask.partner]
        best = max(
            (fit(one, two) for one in kinds[Stage.PREFILL] for two in kinds[Stage.DECODE]),
            default=PairFit.NO,
        )
        chosen = [choice for choice in decision.stages if choice.row is not None]
        is_whole = len(chosen) == len(stages)
        assert is_whole == (best is not PairFit.NO), "it has workers where some fit, and only there"
        if is_whole:
            self._check(ask, decision, best)
        self.seen["chosen" if is_whole else "nobody fits"] += 1
        self.seen["retry"] += ask.partner is not None
        any_kinds = all(kinds.values()) and not is_whole
        self.seen["all stages open, no pair"] += any_kinds
        return decision

    def _check(self, ask: RoutingRequest, decision: Decision, best: PairFit) -> None:
        keys = [choice.pair_keys[0] for choice in decision.stages]
        if ask.partner is not None:
            first = decision.stages[0].stage is Stage.PREFILL
            keys = [*keys, ask.partner] if first else [ask.partner, *keys]
        assert fit(*keys) is best, (keys, best)
        self.seen[f"fit {best.name}"] += 1
        if len(decision.stages) == 2:
            prefill, decode = decision.stages
            self._check_times(ask, prefill, decode)

    def _check_times(self, ask: RoutingRequest, prefill: StageChoice, decode: StageChoice) -> None:
        """TTFT is judged with the first token of the decode worker that was chosen, and no other."""
        assert decode.row is not None
        later_s = ask.later_s + decode.won.first_response_s(decode.row)
        assert prefill.won.later_s == later_s
        self.seen["again"] += prefill.pairing is not None
        self.seen["judged again"] += prefill.pairing is not None and prefill.is_met is not None


class History:
    """Requests that come, are tried again, and end, in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fleet = mixed_fleet(self.rng)
        self.watched = Watched()
        self.now_s = 100.0
        for pool in self.fleet.pools.values():
            pool.table.now_s = lambda: self.now_s
        self.dispatcher = Dispatcher(
            self.fleet,
            rng=random.Random(seed),
            choose=self.watched,
            now_s=lambda: self.now_s,
        )
        self.held: list[tuple[RoutingRequest, Assignment]] = []
        # With the assignment that a retry of one stage is to be part of.
        self.waiting: list[tuple[PendingAssignment, Assignment | None]] = []

    def step(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.01, 0.3])
        act = self.rng.choice(
            [self.arrive, self.arrive, self.end, self.retry, self.start_over, self.turn, self.leave]
        )
        act()
        self.settle()

    def submit(self, ask: RoutingRequest, of: Assignment | None, **more: Any) -> None:
        try:
            self.waiting.append((self.dispatcher.submit(ask, **more), of))
        except NoWorker:
            assert not any(member.is_up for member in self.fleet.members())

    def arrive(self) -> None:
        targets = {
            "ttft_ms": self.rng.choice([None, 20.0, 150.0, 1000.0]),
            "itl_ms": self.rng.choice([None, 3.0, 6.0, 40.0]),
        }
        isl_tokens = self.rng.choice([100, 2000, 7000])
        self.submit(RoutingRequest(MODEL, isl_tokens, Sla(**targets)), None)  # type: ignore[arg-type]

    def end(self) -> None:
        if self.held:
            self.held.pop(self.rng.randrange(len(self.held)))[1].release()

    def leave(self) -> None:
        """A client that waits goes away."""
        if self.waiting and self.rng.random() < 0.3:
            pending, of = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            with pending:
                pass
            if of is not None:
                of.release()

    def retry(self) -> None:
        """One stage again, as `ActiveRequest.try_elsewhere`."""
        if not self.held:
            return
        ask, assignment = self.held.pop(self.rng.randrange(len(self.held)))
        stage = self.rng.choice([Stage.PREFILL, Stage.DECODE])
        lost = assignment.leases[stage]
        (stays,) = (each.member for of, each in assignment.leases.items() if of is not stage)
        lost.release()
        if stage is Stage.DECODE:
            assignment.leases[Stage.PREFILL].release()  # its prompt is computed
        asked = replace(ask, excluded=ask.excluded | {lost.member.address}, partner=stays.pair)
        self.submit(asked, assignment, stages=(stage,), since_s=self.now_s - 0.1)

    def start_over(self) -> None:
        """Both stages again, as `ActiveRequest.start_over`."""
        if self.held:
            ask, assignment = self.held.pop(self.rng.randrange(len(self.held)))
            assignment.release()
            stages = tuple(assignment.leases)
            self.submit(replace(ask, partner=None), None, stages=stages, since_s=self.now_s - 0.1)

    def turn(self) -> None:
        """A worker fails its probes, or is back."""
        members: list[Member] = list(self.fleet.members())
        member = self.rng.choice(members)
        for _ in range(3):
            _ = member.probe_ok() if self.rng.random() < 0.7 else member.probe_failed("slow")

    def settle(self) -> None:
        """Take what was assigned, or refused; what a refused one gives back may settle others."""
        while any(pending.outcome is not None for pending, _ in self.waiting):
            self.settle_once()
        self.watched.seen["waits"] += len(self.waiting)

    def settle_once(self) -> None:
        still: list[tuple[PendingAssignment, Assignment | None]] = []
        for pending, of in self.waiting:
            outcome = pending.outcome
            if outcome is None:
                still.append((pending, of))
                continue
            self.watched.seen[type(outcome).__name__] += 1
            if isinstance(outcome, GatewayError):
                assert isinstance(outcome, NoWorker | Overloaded), outcome
                if of is not None:
                    of.release()
                continue
            if of is not None:
                of.adopt(outcome)
            self.check_held(of or outcome)
            self.held.append((pending.ask, of or outcome))
        self.waiting = still

    def check_held(self, assignment: Assignment) -> None:
        prefill, decode = (member.pair for member in assignment.members)
        assert fit(prefill, decode) is not PairFit.NO
        choices = {choice.stage: choice.worker for choice in assignment.decision.stages}
        held = {stage: lease.member.address for stage, lease in assignment.leases.items()}
        assert choices == held

    def close(self) -> None:
        """All requests end: what waits gets workers as soon as there are some, or is refused."""
        for member in self.fleet.members():
            for _ in range(3):
                member.probe_ok()
        while self.held or self.waiting:
            self.settle()
            assert self.held or not self.waiting, "nothing is held, and a request still waits"
            self.end()
        assert self.dispatcher.n_waiting == 0
        assert all(member.ranks.inflight == 0 for member in self.fleet.members())


def test_no_pair_that_does_not_fit_is_assigned_while_one_that_fits_is_there() -> None:
    seen: Counter[str] = Counter()

    def history(seed: int) -> None:
        of = History(seed)
        for _ in range(N_STEPS):
            of.step()
        of.close()
        seen.update(of.watched.seen)

    each_seed(N_HISTORIES, history)
    wanted = {
        *("fit YES", "fit MAYBE", "again", "judged again", "retry", "waits"),
        *("all stages open, no pair", "Assignment", "NoWorker", "Overloaded"),
    }
    assert {kind for kind in wanted if seen[kind] < N_HISTORIES / 2} == set(), seen
