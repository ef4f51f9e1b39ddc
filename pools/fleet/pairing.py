"""Which ready workers fit none of the other stage: no request can go through them."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from slagate.pools.fleet.member import Member
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.pair_key import PairFit, fit, misfit
from slagate.pools.inflight.row_view import State

log = logging.getLogger(__name__)

OTHER_STAGE = {Stage.PREFILL: Stage.DECODE, Stage.DECODE: Stage.PREFILL}

LOOK_INTERVAL_S = 1.0


class PairStatus(NamedTuple):
    """What a ready worker has in the other stage."""

    n_partners: int  # ready workers that it can hand over to, or take over from
    problem: str  # why it has none although some are ready; "" also while one is joining


def pair_statuses(members: Iterable[Member]) -> Mapping[Member, PairStatus]:
    """The status of each of these workers that is ready, and not of an aggregated pool."""
    of_pairs = [member for member in members if member.stage in OTHER_STAGE]
    ready = [member for member in of_pairs if member.is_up]
    awaited = {member.stage for member in of_pairs if member.state is State.JOINING}
    kinds = {
        stage: Counter(member.pair for member in ready if member.stage is stage)
        for stage in OTHER_STAGE
    }
    found: dict[Member, PairStatus] = {}
    for member in ready:
        other, own = OTHER_STAGE[member.stage], member.pair
        pairs = {
            (own, key) if other is Stage.DECODE else (key, own): n_workers
            for key, n_workers in kinds[other].items()
        }
        n_partners = sum(n for pair, n in pairs.items() if fit(*pair) is not PairFit.NO)
        problem = ""
        if pairs and not n_partners and other not in awaited:
            why = misfit(*max(pairs, key=lambda pair: pairs[pair]))
            problem = f"fits no {other.value} worker that is ready: {why}"
        found[member] = PairStatus(n_partners, problem)
    return found


class UnpairedWorkers:
    """Logs each worker that fits none of the other stage, once, and when that is over."""

    def __init__(self, members: Callable[[], Iterable[Member]], now_s: Callable[[], float]) -> None:
        self._members = members
        self._now_s = now_s
        self._looked_s = float("-inf")
        self._known: set[Member] = set()

    def look(self) -> None:
        """Look at the fleet, unless that was done within `LOOK_INTERVAL_S`."""
        now_s = self._now_s()
        if now_s - self._looked_s < LOOK_INTERVAL_S:
            return
        self._looked_s = now_s
        statuses = pair_statuses(self._members())
        unpaired = {member for member, status in statuses.items() if status.problem}
        for member, status in statuses.items():
            about = {"worker": member.address, "pool": member.pool}
            if member in unpaired - self._known:
                log.warning("member.unpaired", extra=about | {"reason": status.problem})
            elif member in self._known - unpaired:
                log.info("member.paired", extra=about | {"partners": status.n_partners})
        self._known = unpaired
