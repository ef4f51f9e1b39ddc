"""A pool: workers that are alike, and the leases on them."""

import random
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from slagate.pools.estimator.estimator import Estimator, FrozenEstimator
from slagate.pools.fleet.member import Member
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.demand import KeptRoom, RoomKeeper
from slagate.pools.inflight.engine_queue import JOIN_S, Work
from slagate.pools.inflight.row_view import RowView
from slagate.pools.inflight.rows import DOWN, Rows
from slagate.pools.inflight.shared_counts import PoolCell
from slagate.pools.inflight.table import LoadTable
from slagate.pools.inflight.worker_rows import Limits
from slagate.pools.kv_events.follower import WorkerFollower
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.match import Cached, nothing_cached
from slagate.pools.prefix.overlap import PoolCaches, Prompt
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.runtime.cooperative import CooperativeScheduler
from slagate.workers.worker import Worker


class PoolSnapshot(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A pool as the policy sees it for one prompt: frozen, so that a decision can be made again from it."""

    name: str
    estimator: FrozenEstimator
    rows: Rows
    cached: Cached
    n_leases: int  # all that were ever taken, `last_chosen` of the newest
    kept: KeptRoom | None = None  # for protected classes; None: none
    whole: FrozenEstimator | None = None  # of `Pool.whole`; None: there is none

    def view(self, row: int) -> RowView:
        """The figures of one row as plain values, with what it has cached of the prompt."""
        cached = self.cached
        return self.rows.view(
            row,
            device_tokens=(device_tokens := cached.device_tokens.item(row)),
            host_tokens=cached.cached_tokens.item(row) - device_tokens,
        )


class Lease:
    """A rank's capacity, held for one leg of a request. Counted when taken, given back exactly once."""

    def __init__(
        self, member: Member, row: int, work: Work, *, number: int, rank: int | None = None
    ) -> None:
        """`number` is the lease's in its pool; `rank` is to be asked for, None: any."""
        self.member = member
        self.row = row
        self.rank = rank
        self.work = work
        # Called once with whether the prompt was `processed`.
        self.on_prefill_end: Callable[..., None] = lambda **_: None
        self._prefill_open = True
        self._open = True
        self.held = member.ranks.add_lease(row, work, number=number)

    def prefill_done(self) -> None:
        """Take the processed prompt off the worker's queue; the lease stays. Idempotent."""
        if self._prefill_open:
            self._prefill_open = False
            member = self.member
            # A decode worker's pace is learnt from its steps.
            is_told = member.stage is not Stage.DECODE
            member.ranks.table.end_prefill(self.row, self.held, is_computed=is_told)
            # A prompt that was all cached leaves no event to wait for.
            member.n_served += self.work.prefill_tokens >= max(1, member.capacity.block_tokens)
            self.on_prefill_end(processed=True)
            if member.limits.max_queued_tokens is not None:
                member.on_change()

    def begin_answer(self) -> None:
        """Note the first token of an answer whose prompt another worker has computed."""
        self.member.ranks.table.begin_answer(self.row, self.held)

    def release(self) -> None:
        """Take all load of the lease off its row and worker. Idempotent."""
        if not self._open:
            return
        was_prefilling, self._prefill_open, self._open = self._prefill_open, False, False
        ranks = self.member.ranks
        if was_prefilling:
            ranks.table.end_prefill(self.row, self.held)
        ranks.end_lease(self.row, self.held)
        # The counts are right from here on, whatever the callbacks do.
        if was_prefilling:
            self.on_prefill_end(processed=False)
        self.member.lease_ended()


class Pool:
    """Workers that serve one stage. It owns them as members, and gives all leases on them.

    With `prefix` it tracks what they have cached, unless it is a decode pool, which pulls its KV.
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
        """`index` is its number in the stage's grid; `load_table` makes its table, given `key`."""
        self._now_s = now_s
        self.name = name
        self.stage = stage
        self.index = index
        self.estimator = estimator
        # Predicts first tokens of requests that a decode pool serves alone, prompt and answer: those of its
        # other requests are transfers. None: it serves none.
        self.whole: Estimator | None = None
        self.limits = limits or Limits()  # the most that a worker gets at once
        self.overlaps = PoolCaches(now_s=now_s) if prefix and stage is not Stage.DECODE else None
        self.key = f"{stage.value} {name}"  # the same in every gateway
        self.table = load_table(self.key)
        self.table.now_s = now_s
        self.table.knows_work = self.overlaps is not None
        self.members: dict[str, Member] = {}
        self._leaving: dict[str, Member] = {}
        self._newest_lease = 0  # its number
        self.room: RoomKeeper | None = None  # None: no protected request came yet

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"Pool({self.name}, {list(self.members.values())})"

    def count_retry(self) -> None:
        """Count a leg of the pool that is tried again on another worker."""
        self.table.count(PoolCell.RETRIES)

    def count_spill(self) -> None:
        """Count a leg that went past earlier pools of its order: by load, or as they had nobody for it."""
        self.table.count(PoolCell.SPILLS)

    @property
    def all_members(self) -> Iterator[Member]:
        """Yield the members, and the workers that drain."""
        yield from [*self.members.values(), *self._leaving.values()]

    @property
    def is_empty(self) -> bool:
        """Whether it has no workers at all, not even one that drains."""
        return not self.members and not self._leaving

    def set_estimator(self, estimator: Estimator, *, bypassed: bool) -> None:
        """Predict as `estimator` does, but keep what was learnt of the same profile.

        With `bypassed` requests may pass the prefill workers by, and be served here alone.
        """
        if not self.estimator.starts_as(estimator):
            self.estimator, self.whole = estimator, None
            self.table.forget_paces()
        if not bypassed:
            self.whole = None
        elif self.whole is None:
            # Of the very profile that decisions of the pool name: by it they find what learns from them.
            known = self.estimator
            self.whole = Estimator(known.profile, source=known.frozen.profile_source)

    def set_limits(self, limits: Limits) -> None:
        """Set the limits of every worker of the pool."""
        if limits != self.limits:
            self.limits = limits
            for member in self.all_members:
                member.set_limits(limits)

    def join(self, address: str) -> Member | None:
        """Make a member of the worker at `address`; None: it was draining, and is one again."""
        member = self._leaving.pop(address, None)
        if member is not None:
            self.members[address] = member
            member.resume()
            return None
        member = Member(
            address, pool=self.name, stage=self.stage, table=self.table, limits=self.limits
        )
        member.on_left.append(partial(self._left, member))
        self.members[address] = member
        return member

    def drain(self, address: str) -> None:
        """Drain a member: it gets no new requests, and leaves when those that it has are done."""
        member = self._leaving[address] = self.members.pop(address)
        member.drain(self._now_s())

    def _left(self, member: Member) -> None:
        del self._leaving[member.address]
        if self.overlaps is not None:
            for row in member.ranks.rows:
                self.overlaps.forget_row(row)
        member.ranks.free_rows()

    def snapshot(self, prompt: Prompt | None = None) -> PoolSnapshot:
        """A frozen copy of the pool, with what each row has cached of `prompt` (None: nothing)."""
        estimator, whole = self.estimator.frozen, None
        table, learnt = self.table, estimator.coefficients
        table.scale = learnt.prefill_scale
        table.offset_s = learnt.prefill_offset_s or JOIN_S
        if self.whole is not None:
            whole = self.whole.frozen.with_itl_of(estimator)
            table.scale = whole.coefficients.prefill_scale
        if self.stage is Stage.DECODE:
            table.step_scale = estimator.coefficients.itl_scale
        rows = table.rows()
        n_rows = len(rows.names)
        if self.overlaps is None or prompt is None:
            cached = nothing_cached(n_rows)
        else:
            cached = self.overlaps.cached(prompt, n_rows)
        newest = self._newest_lease
        if table.is_shared:
            newest = max(newest, int(rows.last_chosen.max(initial=0)))
        kept = None
        if self.room is not None:
            kept = self.room.kept(self._now_s(), n_rows - rows.counts.n_left)
        return PoolSnapshot(self.name, estimator, rows, cached, newest, kept, whole)

    def follower(
        self, member: Member, worker: Worker, *, scheduler: CooperativeScheduler, rng: random.Random
    ) -> WorkerFollower | None:
        """Make the follower of a worker's KV events; None: the pool does not use them."""
        overlaps = self.overlaps
        if overlaps is None or member.events is None:
            return None

        def on_holder(rank: int, holder: Holder | None) -> None:
            if holder is not None and not member.has_row_for_each_rank:
                return
            if rank < len(member.ranks.rows):
                row = member.ranks.rows[rank]
                overlaps.set_holder(row, holder, block_tokens=member.capacity.block_tokens)

        return WorkerFollower(
            worker,
            member.events,
            index_of=overlaps.index_of,
            on_holder=on_holder,
            n_served=lambda: member.n_served,
            scheduler=scheduler,
            rng=rng,
        )

    def worker_replaced(self, member: Member) -> None:
        """Forget how fast a member was, and the prompts sent to it: its worker has restarted."""
        for row in member.ranks.rows:
            self.table.forget_pace(row)
        if self.overlaps is None or member.server_info is None or member.has_left:
            return
        n_blocks = member.server_info.capacity.total_kv_blocks // member.ranks.n_used
        for row in member.ranks.rows:
            self.overlaps.set_worker(
                row, block_tokens=member.capacity.block_tokens, capacity_blocks=n_blocks or None
            )

    def expire_predictions(self) -> None:
        """Drop some expired predictions. Call it regularly: without prompts nothing else does."""
        if self.overlaps is not None:
            self.overlaps.expire_predictions()

    def set_foreign_load(self, member: Member, load: tuple[int, int] | None) -> None:
        """Set a worker's foreign load: (requests, prompt tokens to prefill); None: not known."""
        if load is None:
            member.ranks.set_foreign_load(None)
        else:
            member.ranks.set_foreign_load((load[0], self.estimator.frozen.work_s(load[1], 0)))
        member.on_report()

    def lease(
        self, row: int, work: Work, prompt: Prompt | None = None, *, n_leases: int | None = None
    ) -> Lease:
        """Lease the row that was chosen, with no await since the snapshot that it was chosen from.

        `n_leases` is that snapshot's; None: look it up. `prompt` is predicted to be cached there.
        """
        address, rank = self.table.names[row]
        member = self.members[address]
        assert not self.table.unavailable[row] & DOWN, member
        on_prefill_end = None
        # Where the worker chooses between its ranks, the next prompt may meet another cache.
        if self.overlaps is not None and prompt is not None and member.has_row_for_each_rank:
            on_prefill_end = self.overlaps.predict(row, prompt)
        # From here on nothing may raise: a lease that is counted must get to its owner.
        before = self.table.newest_lease() if n_leases is None else n_leases
        self._newest_lease = max(self._newest_lease, before) + 1
        lease = Lease(member, row, work, number=self._newest_lease, rank=rank)
        if on_prefill_end is not None:
            lease.on_prefill_end = on_prefill_end
        return lease
