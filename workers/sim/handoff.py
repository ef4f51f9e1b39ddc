"""The handoff between two simulated engines: ids, opaque state, parked sessions, pulls.

prefill: park -> acknowledged | released | expired     (`ParkedSessions`)
decode:  start -> bytes checked, time over -> ready    (`Pulls`)
"""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from slagate.workers.kv_transfer.transport import (
    Blocks,
    KvBadDescriptor,
    KvIntegrity,
    KvTransferError,
    KvTransport,
)
from slagate.workers.runtime.cooperative import SLICE_BYTES, Slices, Steps
from slagate.workers.runtime.waiting import UntilEmpty
from slagate.workers.sim.kv_cache.blocks import (
    STATE_BYTES,
    block_contents,
    state_of,
    verify,
)
from slagate.workers.sim.request import DisaggregatedParams12, changed_params
from slagate.workers.sim.sequence import EngineLimits, KvLayout, SimSequence
from slagate.workers.sim.timing import EngineTiming

# Ids of ordinary requests stay below this, so the two kinds can never be confused (TensorRT-LLM's rule).
MIN_GLOBAL_ID = 1 << 40
_ID_SPACE = (1 << 63) - MIN_GLOBAL_ID


class KvMismatchError(KvIntegrity):
    """Blocks arrived whole, but they are not the KV cache of this prompt."""


class DisaggIds:
    """Makes globally unique request ids in [2^40, 2^63): 39 bits ms, 8 node, 6 process, 10 counter.

    They follow TensorRT-LLM's `get_global_disagg_request_id`. Raises `ValueError` on an id out of range.
    """

    def __init__(self, node_id: int, process_id: int = 0) -> None:
        if not (0 <= node_id < 256 and 0 <= process_id < 64):
            raise ValueError(f"node_id {node_id} must be < 256 and process_id {process_id} < 64")
        self._place = node_id << 6 | process_id
        self._last = -1

    def next(self, now_s: float) -> int:
        """A new id. More than 1024 in one millisecond borrow from the next one."""
        ms = int(now_s * 1000) & ((1 << 39) - 1)
        self._last = max(ms << 10, self._last + 1)
        ms, count = self._last >> 10, self._last & 1023
        return (ms << 24 | self._place << 10 | count) % _ID_SPACE + MIN_GLOBAL_ID


def worker_of(disagg_id: int) -> int:
    """The node and process that made an id of `DisaggIds`, as one number."""
    return (disagg_id - MIN_GLOBAL_ID) >> 10 & 0x3FFF


class OpaqueState(NamedTuple):
    """The handoff's content: which blocks these are, and the descriptor to pull them with."""

    transport: str
    ctx_request_id: int
    prompt_tokens: int
    block_tokens: int
    first_token: int
    last_state: bytes  # Of the prompt's last block, so of the whole prompt.
    layout: KvLayout
    descriptor: bytes


_OPAQUE = struct.Struct(f"<4sQIII{STATE_BYTES}sB")
_OPAQUE_MAGIC = b"SOS3"


def _pack(state: OpaqueState) -> bytes:
    names = " ".join((state.transport, *state.layout)).encode("ascii")
    return _OPAQUE.pack(_OPAQUE_MAGIC, *state[1:6], len(names)) + names + state.descriptor


def is_well_formed(raw: bytes) -> bool:
    """Whether a simulated prefill engine made these bytes, as far as can be told without its blocks."""
    return len(raw) >= _OPAQUE.size and raw.startswith(_OPAQUE_MAGIC)


def _unpack(raw: bytes) -> OpaqueState:
    if not is_well_formed(raw):
        raise KvBadDescriptor("opaque_state has no bytes in it")
    _, ctx_request_id, prompt_tokens, block_tokens, first_token, last_state, n_name = (
        _OPAQUE.unpack_from(raw)
    )
    rest = raw[_OPAQUE.size :]
    transport, *layout = rest[:n_name].decode("ascii", "replace").split(" ")
    if len(layout) != len(KvLayout._fields):
        raise KvBadDescriptor("opaque_state does not say how the KV cache lies")
    return OpaqueState(
        transport=transport,
        ctx_request_id=ctx_request_id,
        prompt_tokens=prompt_tokens,
        block_tokens=block_tokens,
        first_token=first_token,
        last_state=last_state,
        layout=KvLayout(*layout),
        descriptor=rest[n_name:],
    )


ACK_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Session:
    free: Callable[[], None]
    expires_s: float


class ParkedSessions:
    """Parked sessions by id; each ends once, acknowledged, released or expired, and frees its blocks.

    While any is parked, one timer asks the transport for acknowledgements every `ACK_POLL_S`; otherwise
    no timer is pending. A session's time to expire runs from when it is parked, not from its admission.
    `freed` is called after blocks came back.
    """

    def __init__(
        self,
        transport: KvTransport,
        *,
        limits: EngineLimits,
        disagg_ids: DisaggIds,
        timeout_s: float,
        freed: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._disagg_ids = disagg_ids
        self._timeout_s = timeout_s
        self._freed = freed
        self._sessions: dict[int, _Session] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._empty = UntilEmpty(self._sessions)
        self.n_expired = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def park(
        self,
        sequence: SimSequence,
        first_token: int,
        *,
        ctx_dp_rank: int | None,
        free: Callable[[], None],
    ) -> DisaggregatedParams12:
        """Export a prefilled sequence's blocks and keep them; returns the params that decode needs.

        The session has the id of the request; `free` gives the blocks back, and is called once.
        Raises `KvTransferError`, with nothing parked, when the transport cannot take the blocks.
        """
        assert sequence.params is not None, "only a disaggregated request is handed off"
        session_id, loop = sequence.request_id, asyncio.get_running_loop()
        # The oldest version has no such field.
        disagg_request_id = getattr(sequence.params, "disagg_request_id", None)
        if disagg_request_id is None:
            disagg_request_id = self._disagg_ids.next(loop.time())
        opaque = OpaqueState(
            transport=self._transport.name,
            ctx_request_id=session_id,
            prompt_tokens=sequence.n_prompt,
            block_tokens=self._limits.block_tokens,
            first_token=first_token,
            last_state=sequence.prompt.states[-1],
            layout=self._limits.kv_layout,
            descriptor=self._transport.export(
                session_id, block_contents(sequence.prompt.states, self._limits.kv_block_bytes)
            ),
        )
        params = changed_params(
            sequence.params,
            first_gen_tokens=[first_token],
            ctx_request_id=session_id,
            opaque_state=_pack(opaque),
            disagg_request_id=disagg_request_id,
            ctx_dp_rank=ctx_dp_rank,
        )
        self._sessions[session_id] = _Session(free, loop.time() + self._timeout_s)
        self._arm(loop)
        return params

    def release(self, session_id: int) -> bool:
        """Withdraw a session and free its blocks; False when it is not parked."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self._transport.release(session_id)
        session.free()
        if not self._sessions:
            self._empty.set()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._freed()
        return True

    async def none_left(self) -> None:
        """Wait until no session is parked."""
        await self._empty.wait()

    def clear(self) -> None:
        """Withdraw every session."""
        for session_id in list(self._sessions):
            self.release(session_id)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._sessions:
            first_s = next(iter(self._sessions.values())).expires_s
            self._timer = loop.call_at(min(loop.time() + ACK_POLL_S, first_s), self._poll)

    def _poll(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for session_id in self._transport.acks():
            self.release(session_id)
        now_s = loop.time()
        while self._sessions:
            # All sessions have the same time, so the one parked first expires first.
            session_id, session = next(iter(self._sessions.items()))
            if session.expires_s > now_s:
                break
            self.n_expired += 1
            self.release(session_id)
        self._arm(loop)


@dataclass(slots=True)
class _SimPull:
    started_s: float
    first_token: int
    timer: asyncio.TimerHandle | None
    check: Steps[None] | None = None
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
        connect_s: float = 0.0,
    ) -> None:
        """The first transfer from each prefill worker takes `connect_s` longer."""
        self.n_mismatches = 0
        self._connect_s = connect_s
        self._peers: set[int] = set()
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
            opaque = self._opaque_of(sequence)
        except KvTransferError as error:
            self._refused(sequence, error)
            return
        ends_s = now_s + self._timing.transfer_s(sequence.n_prompt)
        assert sequence.params is not None
        peer = worker_of(getattr(sequence.params, "disagg_request_id", None) or 0)
        if peer not in self._peers:
            self._peers.add(peer)
            ends_s += self._connect_s
        timer = asyncio.get_running_loop().call_at(ends_s, self._time_is_over, sequence)
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
    ) -> Steps[None]:
        try:
            if isinstance(outcome, KvTransferError):
                raise outcome
            yield from self._accept(sequence, outcome, pull.first_token)
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

    def _opaque_of(self, sequence: SimSequence) -> OpaqueState:
        """The handoff of a generation_only sequence, checked as far as possible without its blocks.

        Raises `KvBadDescriptor`, before a pull could use the blocks up.
        """
        params, block_tokens = sequence.params, self._limits.block_tokens
        assert params is not None
        # Other malformed bytes have ended the engine before; none at all fail here, in the transceiver.
        opaque = _unpack(params.opaque_state or b"")
        if opaque.transport != self._transport.name:
            problem = f"prefill used {opaque.transport}, this worker uses {self._transport.name}"
        elif opaque.block_tokens != block_tokens:
            problem = f"prefill has {opaque.block_tokens} tokens per block, here {block_tokens}"
        elif opaque.layout != self._limits.kv_layout:
            problem = (
                f"prefill has {' '.join(opaque.layout)}, here {' '.join(self._limits.kv_layout)}"
            )
        elif opaque.prompt_tokens != sequence.n_prompt:
            problem = f"it is of {opaque.prompt_tokens} prompt tokens, not {sequence.n_prompt}"
        elif params.ctx_request_id not in (None, opaque.ctx_request_id):
            problem = f"it is of session {opaque.ctx_request_id}, not {params.ctx_request_id}"
        elif opaque.last_state != sequence.prompt.states[-1]:
            problem = "it is of another prompt, model or cache salt"
        elif params.first_gen_tokens != [opaque.first_token]:
            problem = "first_gen_tokens is missing or of another request"
        else:
            return opaque
        raise KvBadDescriptor(f"the handoff does not fit: {problem}")

    def _accept(self, sequence: SimSequence, blocks: Blocks, first_token: int) -> Steps[None]:
        """Check the blocks that a generation_only sequence pulled, and start its context from them.

        Yields between slices of work, and before the first where there are several. Raises
        `KvMismatchError` when the blocks are not of its prompt, `KvTransferError` when prefill and decode
        disagree on their shape or on the first token.
        """
        states = sequence.prompt.states
        expected = (len(states), self._limits.kv_block_bytes)
        if blocks.shape != expected:
            raise KvTransferError(f"got blocks of shape {blocks.shape}, expected {expected}")
        n_slice = max(1, SLICE_BYTES // self._limits.kv_block_bytes)
        wrong: list[int] = []
        for start in range(0, len(blocks), n_slice):
            if len(blocks) > n_slice:
                yield
            ends = start + n_slice
            wrong += [start + i for i in verify(blocks[start:ends], states[start:ends])]
        if wrong:
            raise KvMismatchError(
                f"{len(wrong)} of {len(blocks)} blocks do not hold this prompt, first block {wrong[0]}"
            )
        # A token that logits processors changed does not follow from the prompt's blocks.
        follows = sequence.processors or first_token == sequence.draw(
            state_of(blocks[-1]), self._limits.vocab_size
        )
        if not follows:
            raise KvTransferError(f"first token {first_token} does not follow from the blocks")
        n_full = sequence.n_prompt // self._limits.block_tokens
        parent = state_of(blocks[n_full - 1]) if n_full else sequence.prompt.seed
        sequence.start_chain(parent, self._limits.block_tokens)
