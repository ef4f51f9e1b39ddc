"""A pool: workers that are alike, and the leases on them."""

from typing import NamedTuple

from slagate.pools.estimator import Estimator
from slagate.pools.member import Lease, Member, MemberView, Stage, State, Work


class PoolView(NamedTuple):
    """A pool as the policy sees it."""

    name: str
    estimator: Estimator
    members: tuple[MemberView, ...]


class Pool:
    """Owns its members: nobody else takes a lease on one."""

    def __init__(
        self, name: str, *, stage: Stage, index: int, members: list[Member], estimator: Estimator
    ) -> None:
        self.name = name
        self.stage = stage
        self.index = index
        self.estimator = estimator
        self.members = {member.address: member for member in members}
        self.requests_total = 0
        self.retries_total = 0
        self.spills_total = 0

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"Pool({self.name}, {list(self.members.values())})"

    def view(self) -> PoolView:
        """The pool as it stands now."""
        return PoolView(self.name, self.estimator, tuple(m.view() for m in self.members.values()))

    def lease(self, address: str, work: Work) -> Lease:
        """Take capacity on a ready worker with room: the policy's choice, in the same step, no await."""
        member = self.members[address]
        assert member.state is State.READY, member
        assert member.inflight < member.max_inflight, member
        self.requests_total += 1
        member.last_chosen = self.requests_total
        return Lease(member, work)
