"""The workers that a request holds."""

from slagate.pools.lease import Lease
from slagate.pools.member import Member, Stage
from slagate.router.policy import Decision


class Assignment:
    """The workers a request holds: one lease a stage, all released by `release`."""

    def __init__(self, decision: Decision, leases: dict[Stage, Lease]) -> None:
        self.decision = decision
        self._leases = leases

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages the request goes through, in order."""
        return tuple(self._leases)

    @property
    def members(self) -> list[Member]:
        """The workers the request holds."""
        return [lease.member for lease in self._leases.values()]

    def lease(self, stage: Stage) -> Lease:
        """The lease of a stage."""
        return self._leases[stage]

    def adopt(self, other: "Assignment") -> None:
        """Take over the other's workers for its stages; those held for them before are let go."""
        for choice in other.decision.stages:
            self._leases[choice.stage].release()
            self._leases[choice.stage] = other.lease(choice.stage)
            self.decision = self.decision.replace(choice)

    def release(self) -> None:
        """Let every worker go. Idempotent."""
        for lease in self._leases.values():
            lease.release()
