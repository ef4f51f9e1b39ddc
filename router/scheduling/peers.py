"""What a gateway needs of the other gateways that send to the same workers and answer the same clients.

Pools use it for load in the others, the dispatcher for requests that wait there, `Control` to abort there.
The one implementation is `multiprocess/peers.py`, over memory that processes of one host share.
"""

from collections.abc import Callable, Mapping, Set

from slagate.pools.inflight.table import LoadTable


class PeerGateways:
    """The other gateways; in this base class there are none. A pool is named by its `Pool.key`."""

    n_peers = 0  # other gateways, whether or not they run

    def __init__(self) -> None:
        # Called when a change in a peer may let a request that waits here go on.
        self.on_change: Callable[[], None] = lambda: None

    def load_table(self, pool: str) -> LoadTable:
        """The table for a new pool; its `rows` include what the peers have in flight on each rank."""
        return LoadTable()

    @property
    def n_running(self) -> int:
        """Requests that the peers serve."""
        return 0

    @property
    def n_waiting(self) -> int:
        """Requests that wait in the peers for a worker."""
        return 0

    @property
    def n_relegated(self) -> int:
        """Those of them that are behind all others."""
        return 0

    def waited_for(self, since_s: float) -> Set[str]:
        """Pools that a request in some peer has been waiting for since before `since_s`."""
        return frozenset()

    def show_running(self, n_requests: int) -> None:
        """Publish to the peers how many requests this gateway serves."""

    def show_waiting(self, n_requests: int, n_last: int, oldest_s: Mapping[str, float]) -> None:
        """Publish how many wait here, how many of them behind all others, and since when for each pool."""

    def wake(self) -> None:
        """Wake the peers in which requests wait: a lease was released here."""

    async def abort(self, peer: str, request_id: str) -> bool:
        """End a client's requests with this id, in whichever peers serve them. False: no peer does."""
        return False

    def receipt_number(self, place: int) -> int:
        """The number of this gateway's `place`-th receipt (from 1 on); no peer uses it."""
        return place
