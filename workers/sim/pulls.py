"""Transfers of KV cache from other workers to this simulated engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from slagate.workers.kv_transfer.transport import Blocks, KvTransferError, KvTransport
from slagate.workers.runtime.cooperative import Slices, Work
from slagate.workers.sim.handoff import KvMismatchError, accept_blocks, opaque_of
from slagate.workers.sim.sequence import EngineLimits, SimSequence
from slagate.workers.sim.timing import EngineTiming


@dataclass(slots=True)
class _SimPull:
    started_s: float
    first_token: int
    timer: asyncio.TimerHandle | None
    check: Work | None = None
    has_bytes: bool = False


class Pulls:
    """The transfers of generation_only sequences; each ends once, by `ready`, `refused` or `cancel`.

    `ready` is called with the first token once the bytes are there and right, and the time that they would
    take at their true size is over. Bytes are checked in slices, so that a long prompt stops no stream of
    the same loop. The transport decides how long to wait for bytes.
    """

    def __init__(
        self,
        transport: KvTransport,
        *,
        timing: EngineTiming,
        limits: EngineLimits,
        ready: Callable[[SimSequence, int], None],
        refused: Callable[[SimSequence, KvTransferError], None],
    ) -> None:
        self.n_mismatches = 0
        self._transport = transport
        self._timing = timing
        self._limits = limits
        self._ready = ready
        self._refused = refused
        self._slices = Slices()
        self._pulls: dict[SimSequence, _SimPull] = {}

    def start(self, sequence: SimSequence, now_s: float) -> None:
        """Fetch a sequence's blocks; `refused` may be called before this returns."""
        try:
            opaque = opaque_of(sequence, transport=self._transport, limits=self._limits)
        except KvTransferError as error:
            self._refused(sequence, error)
            return
        timer = asyncio.get_running_loop().call_at(
            now_s + self._timing.transfer_s(sequence.n_prompt), self._time_is_over, sequence
        )
        self._pulls[sequence] = _SimPull(now_s, opaque.first_token, timer)
        self._transport.pull(opaque.descriptor, partial(self._bytes_are_there, sequence))

    def cancel(self, sequence: SimSequence) -> None:
        """Forget a sequence; bytes that arrive later are thrown away. No-op when it pulls nothing."""
        pull = self._pulls.pop(sequence, None)
        if pull is None:
            return
        if pull.timer is not None:
            pull.timer.cancel()
        if pull.check is not None:
            self._slices.cancel(pull.check)

    def _bytes_are_there(self, sequence: SimSequence, outcome: Blocks | KvTransferError) -> None:
        pull = self._pulls.get(sequence)
        if pull is not None:
            pull.check = self._check(sequence, pull, outcome)
            self._slices.start(pull.check)

    def _check(
        self, sequence: SimSequence, pull: _SimPull, outcome: Blocks | KvTransferError
    ) -> Work:
        try:
            if isinstance(outcome, KvTransferError):
                raise outcome
            yield from accept_blocks(
                sequence, outcome, first_token=pull.first_token, limits=self._limits
            )
        except KvTransferError as error:
            self.n_mismatches += isinstance(error, KvMismatchError)
            self.cancel(sequence)
            self._refused(sequence, error)
            return
        pull.has_bytes = True
        if pull.timer is None:
            self._finish(sequence, pull)

    def _time_is_over(self, sequence: SimSequence) -> None:
        pull = self._pulls[sequence]
        pull.timer = None
        if pull.has_bytes:
            self._finish(sequence, pull)

    def _finish(self, sequence: SimSequence, pull: _SimPull) -> None:
        del self._pulls[sequence]
        sequence.feed.transferred(
            pull.started_s,
            asyncio.get_running_loop().time(),
            n_bytes=self._timing.kv_bytes(sequence.n_prompt),
        )
        self._ready(sequence, pull.first_token)
