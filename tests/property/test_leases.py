"""Any order of taking and giving back leaves the books right (DISAGG-06, I2, I3)."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slagate.pools.fleet.pool import Lease
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.shared_counts import PoolCell
from support.builders import pool

LIMIT = 4
ADDRESSES = ("w1:1", "w2:1")


class Leases(RuleBasedStateMachine):
    """A pool against a plain list of what is held; released leases stay around to be released again."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(*ADDRESSES, max_inflight=LIMIT)
        self.leases: list[Lease] = []
        self.open: dict[int, bool] = {}  # place in `leases` -> prefill still to do

    def held(self, address: str) -> list[int]:
        return [at for at in self.open if self.leases[at].member.address == address]

    @rule(
        address=st.sampled_from(ADDRESSES),
        prompt_tokens=st.integers(1, 200_000),
        context=st.booleans(),
        prefill=st.booleans(),
    )
    def take(self, address: str, prompt_tokens: int, *, context: bool, prefill: bool) -> None:
        member = self.pool.members[address]
        work = Work(
            prompt_tokens if prefill else 0,
            prompt_tokens * 0.1 / 1000 if prefill else 0.0,
            prompt_tokens if context else 0,
        )
        fits = member.state is State.READY and len(self.held(address)) < LIMIT
        try:
            lease = self.pool.lease(ADDRESSES.index(address), work)
        except AssertionError:
            assert not fits
        else:
            assert fits
            self.open[len(self.leases)] = True
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def prefill_done(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.leases) - 1))
        self.leases[at].prefill_done()
        if at in self.open:
            self.open[at] = False

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.leases) - 1))
        self.leases[at].release()
        self.open.pop(at, None)

    @rule(address=st.sampled_from(ADDRESSES), ok=st.booleans())
    def probe(self, address: str, *, ok: bool) -> None:
        member = self.pool.members[address]
        _ = member.probe_ok() if ok else member.probe_failed("slow")

    @invariant()
    def the_books_are_right(self) -> None:
        for address, member in self.pool.members.items():
            held = self.held(address)
            works = [self.leases[at].work for at in held]
            waiting = [self.leases[at].work for at in held if self.open[at]]
            assert member.ranks.inflight == len(held) <= LIMIT
            assert member.ranks.context_tokens == sum(work.context_tokens for work in works)
            assert member.ranks.queued_tokens == sum(work.prefill_tokens for work in waiting)
            assert member.ranks.queued_s >= 0.0
            assert abs(member.ranks.queued_s - sum(work.work_s for work in waiting)) < 1e-9
            if not waiting:
                assert member.ranks.queued_s == 0.0
            row = ADDRESSES.index(address)
            assert self.pool.snapshot().view(row).inflight == member.ranks.inflight


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_disagg_06_a_release_that_comes_twice_or_late_is_harmless() -> None:
    of = pool("w1:1")
    first, second = of.lease(0, Work(10, 1.0, 5)), of.lease(0, Work(20, 2.0, 7))
    first.release()
    first.release()
    first.prefill_done()
    member = of.members["w1:1"]
    assert (member.ranks.inflight, member.ranks.queued_tokens, member.ranks.context_tokens) == (
        1,
        20,
        7,
    )
    second.prefill_done()
    second.release()
    second.release()
    assert (member.ranks.inflight, member.ranks.queued_tokens, member.ranks.queued_s) == (0, 0, 0.0)
    assert of.table.totals[PoolCell.REQUESTS] == 2
