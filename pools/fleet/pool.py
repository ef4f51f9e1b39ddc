"""A pool: workers that are alike, and the leases on them."""

import random
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from slagate.pools.estimator.estimator import Estimator, FrozenEstimator
from slagate.pools.fleet.lease import Lease
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.ranks import Limits, Work
from slagate.pools.grid.stage import Stage
from slagate.pools.inflight.rows import Ints, Rows, RowView
from slagate.pools.inflight.shared_counts import PoolCell
from slagate.pools.inflight.table import LoadTable
from slagate.pools.kv_events.follower import WorkerFollower
from slagate.pools.prefix.cached import Cached, nothing_cached
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.overlap import PoolCaches, Prompt
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.runtime.cooperative import CooperativeScheduler
from slagate.workers.worker import Worker


class PoolView(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A pool as the policy sees it for one prompt: frozen, so that a decision can be made again from it."""

    name: str
    estimator: FrozenEstimator
    rows: Rows
    cached: Cached
    n_leases: int  # all that were ever taken, `last_chosen` of the newest

    @property
    def cached_tokens(self) -> Ints:
        """Leading prompt tokens that each row has cached."""
        return self.cached.cached_tokens

    @property
    def device_tokens(self) -> Ints:
        """Those of them that are all on the device."""
        return self.cached.device_tokens

    @property
    def host_tokens(self) -> Ints:
        """The others."""
        return self.cached.host_tokens

    def view(self, row: int) -> RowView:
        """One row, as plain values."""
        cached = self.cached
        return self.rows.view(
            row,
            device_tokens=(device_tokens := cached.device_tokens.item(row)),
            host_tokens=cached.cached_tokens.item(row) - device_tokens,
        )


class Pool:
    """Owns its members: nobody else takes a lease on one.

    With `prefix` it knows what its workers have cached; decode pulls its KV, so there it is of no use.
    """

    def __init__(
        self,
        name: str,
        *,
        stage: Stage,
        index: int,
        estimator: Estimator,
        limits: Limits | None = None,
        prefix: bool = True,
        load_table: Callable[[str], LoadTable] = lambda _: LoadTable(),
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        """`load_table` makes its table, by the pool's `key`."""
        self._now_s = now_s
        self.name = name
        self.stage = stage
        self.index = index
        self.estimator = estimator
        self._limits = limits or Limits()
        self.overlaps = PoolCaches(now_s=now_s) if prefix and stage is not Stage.DECODE else None
        self.key = f"{stage.value} {name}"  # the same in every gateway
        self._table = load_table(self.key)
        self.members: dict[str, Member] = {}
        self._leaving: dict[str, Member] = {}
        self._newest_lease = 0  # its number

    @property
    def requests_total(self) -> int:
        """Legs given to the pool, since the gateway started."""
        return self._table.totals[PoolCell.REQUESTS]

    @property
    def retries_total(self) -> int:
        """Legs of the pool that were tried again elsewhere."""
        return self._table.totals[PoolCell.RETRIES]

    @property
    def spills_total(self) -> int:
        """Legs that the pool got because one before it in the order had nobody."""
        return self._table.totals[PoolCell.SPILLS]

    def count_retry(self) -> None:
        """Count one more in `retries_total`."""
        self._table.count(PoolCell.RETRIES)

    def count_spill(self) -> None:
        """Count one more in `spills_total`."""
        self._table.count(PoolCell.SPILLS)

    @property
    def all_members(self) -> Iterator[Member]:
        """Members, and those that drain."""
        yield from [*self.members.values(), *self._leaving.values()]

    @property
    def is_empty(self) -> bool:
        """Whether it has no worker, none that drains either."""
        return not self.members and not self._leaving

    @property
    def limits(self) -> Limits:
        """The most that a worker gets at once."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        if limits != self._limits:
            self._limits = limits
            for member in self.all_members:
                member.limits = limits

    def join(self, address: str) -> Member | None:
        """Make the worker of an address a member; None: it was draining, and goes on as it was."""
        member = self._leaving.pop(address, None)
        if member is not None:
            self.members[address] = member
            member.resume()
            return None
        member = Member(
            address, pool=self.name, stage=self.stage, table=self._table, limits=self._limits
        )
        member.on_left.append(partial(self._left, member))
        self.members[address] = member
        return member

    def drain(self, address: str) -> None:
        """A member is to go: it takes no new work from now on, and leaves when the old is done."""
        member = self._leaving[address] = self.members.pop(address)
        member.drain(self._now_s())

    def close(self) -> None:
        """It is empty, and the configuration has it no more."""
        self._table.close()

    def _left(self, member: Member) -> None:
        del self._leaving[member.address]
        if self.overlaps is not None:
            for row in member.ranks.rows:
                self.overlaps.leave(row)
        member.ranks.give_up()

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"Pool({self.name}, {list(self.members.values())})"

    @property
    def n_model_changes(self) -> int:
        """Times that a worker said what it serves."""
        return self._table.n_model_changes

    def view(self, prompt: Prompt | None = None) -> PoolView:
        """The pool as it stands now, for a prompt; None: nothing of it is cached anywhere."""
        rows = self._table.rows()
        if self.overlaps is None or prompt is None:
            cached = nothing_cached(len(rows))
        else:
            cached = self.overlaps.cached(prompt, len(rows))
        newest = self._newest_lease
        if self._table.is_shared:
            newest = max(newest, int(rows.last_chosen.max(initial=0)))
        return PoolView(self.name, self.estimator.frozen(), rows, cached, newest)

    def follower(
        self, member: Member, worker: Worker, *, turns: CooperativeScheduler, rng: random.Random
    ) -> WorkerFollower | None:
        """What follows the KV events of a member's worker; None: nobody needs them here."""
        overlaps = self.overlaps
        if overlaps is None or member.events is None:
            return None

        def on_holder(rank: int, holder: Holder | None) -> None:
            if holder is not None and not member.has_row_for_each_rank:
                return
            if rank < len(member.ranks.rows):
                row = member.ranks.rows[rank]
                overlaps.set_holder(row, holder, block_tokens=member.block_tokens)

        return WorkerFollower(
            worker,
            member.events,
            index_of=overlaps.index_of,
            on_holder=on_holder,
            n_served=lambda: member.n_served,
            turns=turns,
            rng=rng,
        )

    def identified(self, member: Member) -> None:
        """A member's worker is another incarnation: what was sent to the one before is gone."""
        if self.overlaps is None or member.info is None or member.has_left:
            return
        n_blocks = member.info.capacity.total_kv_blocks // member.ranks.n_used
        for row in member.ranks.rows:
            self.overlaps.set_worker(
                row, block_tokens=member.block_tokens, capacity_blocks=n_blocks or None
            )

    def tidy(self) -> None:
        """Drop what is known and no longer true; called now and then, as nobody may ask for a prompt."""
        if self.overlaps is not None:
            self.overlaps.tidy()

    def set_foreign(self, member: Member, load: tuple[int, int] | None) -> None:
        """Requests that others sent to a worker, and prompt tokens of theirs that wait there.

        None: nobody can tell now.
        """
        if load is None:
            member.ranks.set_foreign(None)
        else:
            member.ranks.set_foreign((load[0], self.estimator.frozen().work_s(load[1], 0)))

    def lease(
        self, row: int, work: Work, prompt: Prompt | None = None, *, n_leases: int | None = None
    ) -> Lease:
        """Take capacity on a ready row with room: the policy's choice, in the same step, no await.

        `n_leases` is that of the view that was decided on.
        """
        address, rank = self._table.name(row)
        member = self.members[address]
        assert self._table.is_up(row), member
        settle = None
        # Where the worker chooses between its ranks, the next prompt may meet another cache.
        if self.overlaps is not None and prompt is not None and member.has_row_for_each_rank:
            settle = self.overlaps.expect(row, prompt)
        before = self._table.newest_lease() if n_leases is None else n_leases
        self._newest_lease = max(self._newest_lease, before) + 1
        self._table.count(PoolCell.REQUESTS)
        self._table.set_chosen(row, self._newest_lease)
        lease = Lease(member, row, work, rank=rank)
        if settle is not None:
            lease.settle = settle
        return lease
