"""What a gateway needs of the other gateways that send to the same workers and answer the same clients.

Pools ask what is in flight elsewhere, the dispatcher who waits elsewhere, `Control` for requests elsewhere.
The one implementation is `multiprocess/peers.py`, over memory that processes of one host share.
"""

from collections.abc import Callable, Mapping, Set

from slagate.pools.inflight.table import LoadTable


class PeerGateways:
    """The other gateways. As it is here: there are none. Pools are named by their `Pool.key`."""

    n_peers = 0

    def __init__(self) -> None:
        # Called when a request that waits here may have its turn for what has changed elsewhere.
        self.on_change: Callable[[], None] = lambda: None

    def load_table(self, pool: str) -> LoadTable:
        """A new pool's table, whose `rows` have what the peers have in flight on each rank as well."""
        return LoadTable()

    @property
    def n_running(self) -> int:
        """Requests that the peers serve."""
        return 0

    @property
    def n_waiting(self) -> int:
        """Requests that wait in the peers for a worker."""
        return 0

    def waited_for(self, since_s: float) -> Set[str]:
        """Pools that a request waits for in a peer which came before `since_s`."""
        return frozenset()

    def show_running(self, n_requests: int) -> None:
        """Tell the peers how many requests this gateway serves."""

    def show_waiting(self, n_requests: int, oldest_s: Mapping[str, float]) -> None:
        """Tell the peers how many requests wait here, and since when the oldest does for each pool."""

    def wake(self) -> None:
        """Have those peers look again in which somebody waits: something was given back."""

    async def abort(self, peer: str, request_id: str) -> bool:
        """End the requests of a client with this id in whichever peer has them; False: none has."""
        return False

    def receipt_number(self, place: int) -> int:
        """A number that no peer gives to a receipt; `place` counts this gateway's own, from 1 on."""
        return place
