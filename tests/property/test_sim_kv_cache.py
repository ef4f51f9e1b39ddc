"""The block pool against a dumb model: lists of states, counted from scratch each time."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slagate.workers.sim_kv_cache import (
    Allocation,
    SimKvCache,
    block_states,
    seed_state,
    token_bytes,
)

BLOCK_TOKENS = 2
SEED = seed_state("m")


def states_of(choices: list[int]) -> list[bytes]:
    """One block per choice, so that equal leading choices are an equal prefix."""
    tokens = [choice for choice in choices for _ in range(BLOCK_TOKENS)]
    return block_states(token_bytes(tokens), SEED, BLOCK_TOKENS)


class Held:
    def __init__(self, allocation: Allocation, states: list[bytes], n_committed: int) -> None:
        self.allocation = allocation
        self.states = states
        self.n_committed = n_committed
        self.n_blocks = len(states)
        self.n_reserved = allocation.reserved_blocks


class PoolMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 12))
    def start(self, total: int) -> None:
        self.cache = SimKvCache(total, BLOCK_TOKENS)
        self.held: list[Held] = []
        # Committed states nobody holds, oldest release first.
        self.idle: list[bytes] = []

    def referenced(self) -> set[bytes]:
        return {state for one in self.held for state in one.states[: one.n_committed]}

    def n_private(self) -> int:
        return sum(one.n_blocks - one.n_committed for one in self.held)

    def used(self) -> int:
        return len(self.referenced()) + self.n_private()

    def trim(self) -> None:
        excess = self.used() + len(self.idle) - self.cache.total_blocks
        if excess > 0:
            del self.idle[:excess]

    @rule(choices=st.lists(st.integers(0, 2), min_size=1, max_size=5), reserve=st.integers(0, 3))
    def allocate(self, choices: list[int], reserve: int) -> None:
        states = states_of(choices)
        referenced = self.referenced()
        n_hits = 0
        while n_hits < len(states) and (
            states[n_hits] in referenced or states[n_hits] in self.idle
        ):
            n_hits += 1
        assert self.cache.match(states) == n_hits
        wanted = {*states[:n_hits]} - referenced
        needed = len(wanted) + len(states) - n_hits + reserve
        room = self.cache.total_blocks - self.used() - sum(one.n_reserved for one in self.held)
        allocation = self.cache.allocate(states, n_blocks=len(states), reserve_blocks=reserve)
        assert (allocation is not None) == (needed <= room)
        if allocation is not None:
            assert allocation.shared == states[:n_hits]
            self.held.append(Held(allocation, states, n_hits))
            self.idle = [state for state in self.idle if state not in wanted]
            self.trim()

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.held:
            one = data.draw(st.sampled_from(self.held))
            upto = data.draw(st.integers(one.n_committed, len(one.states)))
            states = one.states[one.n_committed : upto]
            self.cache.commit(one.allocation, states)
            one.n_committed = upto
            self.idle = [state for state in self.idle if state not in states]

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        growable = [one for one in self.held if one.n_reserved]
        if growable:
            one = data.draw(st.sampled_from(growable))
            self.cache.grow(one.allocation)
            one.n_reserved -= 1
            one.n_blocks += 1
            self.trim()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            one = data.draw(st.sampled_from(self.held))
            self.held.remove(one)
            self.cache.release(one.allocation)
            still = self.referenced()
            let_go = one.states[: one.n_committed][::-1]
            self.idle += [state for state in let_go if state not in still]

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.used_blocks == self.used()
            assert self.cache.cached_blocks == len(self.idle)
            assert self.used() + len(self.idle) <= self.cache.total_blocks

    @invariant()
    def whatever_is_cached_has_its_whole_prefix_cached(self) -> None:
        if hasattr(self, "cache"):
            present = {*self.idle} | self.referenced()
            for one in self.held:
                committed = one.states[: one.n_committed]
                assert self.cache.match(committed) == len(committed)
            for choices in ([a, b] for a in range(3) for b in range(3)):
                parent, child = states_of(choices)
                assert child not in present or parent in present


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
