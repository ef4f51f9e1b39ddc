"""What tests and a worker may ask of a simulated engine, or do to it, beyond TensorRT-LLM's surface."""

from slagate.workers.sim.engine import SimEngine
from slagate.workers.sim.rank import SimRank


class SimTestControls:
    """The inside of an engine, seen from outside; a base of `SimLLM`."""

    _engine: SimEngine
    _ranks: list[SimRank]

    @property
    def n_running(self) -> int:
        """Sequences admitted and not finished."""
        return self._engine.n_running

    @property
    def n_queued(self) -> int:
        """Sequences waiting for admission."""
        return self._engine.n_queued

    @property
    def n_parked(self) -> int:
        """Prefilled sessions whose blocks wait for decode."""
        return 0 if self._engine.parked is None else len(self._engine.parked)

    @property
    def n_expired(self) -> int:
        """Parked sessions nobody came for in time."""
        return 0 if self._engine.parked is None else self._engine.parked.n_expired

    @property
    def n_unsafe_aborts(self) -> int:
        """Requests aborted while another worker could still write their blocks."""
        return self._engine.n_unsafe_aborts

    @property
    def used_blocks(self) -> int:
        """KV blocks that running requests and parked sessions refer to, on all ranks."""
        return self._engine.used_blocks

    @property
    def kv_transfer_failures(self) -> int:
        """Handoffs that failed, for whatever reason."""
        return self._engine.kv_transfer_failures

    @property
    def kv_verify_failures(self) -> int:
        """Those of them whose bytes arrived whole and were not of the prompt."""
        return self._engine.kv_verify_failures

    def resident(self) -> list[dict[int, int]]:
        """For each rank, the engine hash of every full stored block and the cache level it is on.

        Hashes are made for KV cache events, so the engine must have a buffer for those.
        """
        return [rank.cache.resident() for rank in self._ranks]

    def release_session(self, ctx_request_id: int) -> bool:
        """Drop a parked session and free its blocks; False when there is none of that id."""
        return self._engine.parked is not None and self._engine.parked.release(ctx_request_id)

    async def handoffs_collected(self) -> None:
        """Wait until no session is parked any more."""
        if self._engine.parked is not None:
            await self._engine.parked.none_left()

    def inject_request_error(self, request_id: int, text: str) -> bool:
        """Fail one request as its executor does; False when it does not run."""
        return self._engine.inject_request_error(request_id, text)
