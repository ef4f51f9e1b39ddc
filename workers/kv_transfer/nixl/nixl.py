"""The KV transport over NIXL: one worker reads the host memory of another, over UCX."""

import asyncio
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from typing_extensions import override

from slagate.workers.kv_transfer.nixl.agent import NixlAgent, PoisonedMetadata, ReadOrder
from slagate.workers.kv_transfer.nixl.descriptor import TAG_BYTES, NixlDescriptor, unpack_descriptor
from slagate.workers.kv_transfer.nixl.generation import Generation
from slagate.workers.kv_transfer.nixl.slots import SlotPool
from slagate.workers.kv_transfer.transport import (
    Blocks,
    Done,
    KvBadDescriptor,
    KvTimeout,
    KvTransferError,
    KvTransport,
    KvUnavailable,
    block_shape,
    used_up,
)

log = logging.getLogger(__name__)

START_LIMIT_S = 30.0
CLOSE_LIMIT_S = 2.0

MAX_RETIRED = 2
"""Replaced agents that may be kept for the sessions and transfers that they still have."""

N_REMEMBERED = 4096
"""Pulled sessions that are remembered, so that none is pulled again before its owner has noticed."""

RETRY_S = 0.02
"""How soon the first pull is tried again without a call of `retry_soon`: a new agent makes none."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    wanted: NixlDescriptor
    done: Done
    due_s: float


class PullQueue:
    """Pulls that wait for room in the pool; each begins after those before it, or ends with an error.

    `begin` begins a pull if there is room, and returns whether it has; it raises `KvTransferError` if there
    will never be room. `full` makes the error of a pull that waited too long. All have the same time limit.
    """

    def __init__(
        self,
        begin: Callable[[NixlDescriptor, Done, float], bool],
        full: Callable[[NixlDescriptor], KvTimeout],
    ) -> None:
        self._begin = begin
        self._full = full
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, tag: bytes) -> bool:
        return any(each.wanted.tag == tag for each in self._waiting)

    def enqueue(self, wanted: NixlDescriptor, done: Done, *, due_s: float) -> None:
        """Begin a pull when its turn comes, which may be now."""
        self._waiting.append(_Waiting(wanted, done, due_s))
        self._serve()

    def retry_soon(self) -> None:
        """Try again in the next turn of the loop, as there may be room."""
        if self._waiting:
            self._set_timer(asyncio.get_running_loop().call_soon(self._serve))

    def fail_all(self) -> None:
        """End every pull that waits, with the error of a closed transport."""
        self._set_timer(None)
        while self._waiting:
            self._waiting.popleft().done(KvTransferError("transport is closed"))

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            # Taken out first, as its `done` may enqueue another pull, which is then served within this
            # call.
            first = self._waiting.popleft()
            try:
                if first.due_s <= loop.time():
                    raise self._full(first.wanted)
                if not self._begin(first.wanted, first.done, first.due_s):
                    self._waiting.appendleft(first)
                    break
            except KvTransferError as error:
                first.done(error)
        due_s = self._waiting[0].due_s if self._waiting else None
        self._set_timer(
            None if due_s is None else loop.call_at(min(loop.time() + RETRY_S, due_s), self._serve)
        )

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


class NixlTransport(KvTransport):
    """A pool of block slots that peers read from, and reads from the pools of peers.

    Blocks with equal content share a slot, however many sessions they are part of. An export fails if the
    pool has no room; a pull waits for room, in order of arrival, within its time limit.

    A pull that runs out of time ends with `KvTimeout`, but its slots stay taken until NIXL reports its end,
    as bytes may arrive long after (`n_quarantined`).

    The agent is replaced when its thread is stuck or has ended, when damaged metadata has spoilt it, or
    when more than half of its pool is in quarantine. A session is never moved, as its descriptor names its
    agent: a replaced agent is kept until its sessions and transfers have ended. At most `MAX_RETIRED` are
    kept; while there are as many, no agent is replaced.

    Raises `KvUnavailable` if NIXL does not work on this machine.
    """

    name = "NIXL"

    def __init__(
        self,
        worker_name: str,
        *,
        n_slots: int,
        block_bytes: int,
        loopback: bool,
        pull_limit_s: float,
    ) -> None:
        self._pull_limit_s = pull_limit_s
        self._n_slots = n_slots
        self._block_bytes = block_bytes
        self._loopback = loopback
        # NIXL would take a restarted peer of the same name for the old one, so every start has a new name.
        self._base_name = f"{worker_name}.{os.urandom(8).hex()}"
        self._n_started = 0
        self._closed = False
        self._pulled: dict[bytes, None] = {}  # Tags, the oldest first.
        self._agents: list[NixlAgent] = []
        self._retired: list[Generation] = []
        self._next: Generation | None = None
        self._queue = PullQueue(self._begin, self._full)
        self._current = self._start_generation()
        # A thread that is inside UCX while the interpreter exits would abort the process.
        self._end_agents = weakref.finalize(self, _end_all, self._agents)
        agent = self._current.agent
        if not agent.ready.wait(START_LIMIT_S) or agent.failure is not None:
            self.close()
            raise agent.failure or KvUnavailable(f"NIXL did not start in {START_LIMIT_S:g} s")

    @property
    def n_slots(self) -> int:
        """The number of slots of the current pool."""
        return self._current.pool.n_slots

    @property
    def n_free(self) -> int:
        """The number of slots of the current pool that are free."""
        return self._current.pool.n_free

    @property
    def n_quarantined(self) -> int:
        """The number of slots, of all pools, that wait for the end of an abandoned transfer."""
        return sum(each.n_quarantined for each in self._generations())

    @property
    def n_agents(self) -> int:
        """The number of agents: the current one, and replaced ones that are still needed."""
        self._retire_and_promote()
        return len(self._generations())

    @override
    def export(self, session_id: int, blocks: Blocks) -> bytes:
        if self._closed:
            raise KvTransferError("transport is closed")
        if any(session_id in each for each in self._generations()):
            raise KvTransferError(f"session {session_id} is already exported")
        block_shape(blocks)
        return self._living().offer(session_id, blocks)

    @override
    def pull(self, descriptor: bytes, done: Done) -> None:
        # The time limit includes waiting for room.
        try:
            if self._closed:
                raise KvTransferError("transport is closed")
            wanted = unpack_descriptor(descriptor)
            if wanted.tag in self._pulled or wanted.tag in self._queue:
                raise used_up(wanted.session_id)
            self._living().check_fits(wanted)
            due_s = asyncio.get_running_loop().time() + self._pull_limit_s
            self._queue.enqueue(wanted, done, due_s=due_s)
        except KvTransferError as error:
            done(error)

    @override
    def acks(self) -> list[int]:
        sessions = sorted(i for each in self._generations() for i in each.acknowledged())
        self._retire_and_promote()
        self._queue.retry_soon()
        return sessions

    @override
    def release(self, session_id: int) -> None:
        # A read that runs now still gets its blocks, or fails its checks.
        for each in self._generations():
            each.withdraw(session_id)
        self._retire_and_promote()
        self._queue.retry_soon()

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.fail_all()
            self._end_agents()
            for each in self._generations():
                each.end_all()

    @override
    def problem(self) -> str:
        if self._closed:
            return "transport is closed"
        self._retire_and_promote()
        current = self._current
        if not current.agent.alive:
            return "the NIXL agent has ended"
        if current.stuck:
            return "the NIXL agent does not answer"
        if not current.pool.n_free and current.n_quarantined:
            return f"the pool is full: {current.n_quarantined} blocks wait for peers that hang"
        return ""

    @override
    def counters(self) -> dict[str, int]:
        pools = [each.pool for each in self._generations()]
        return {
            "kv_slots_taken": sum(pool.n_slots - pool.n_free for pool in pools),
            "kv_slots_quarantined": self.n_quarantined,
            "kv_pulls_waiting": len(self._queue),
            "kv_agents": self.n_agents,
        }

    def _generations(self) -> list[Generation]:
        return [*self._retired, self._current]

    def _start_generation(self) -> Generation:
        self._n_started += 1
        generation = Generation(
            f"{self._base_name}.{self._n_started}",
            SlotPool(self._n_slots, self._block_bytes),
            loopback=self._loopback,
            changed=self._changed,
        )
        self._agents.append(generation.agent)
        return generation

    def _living(self) -> Generation:
        """The current generation. Raises `KvUnavailable` if its agent has ended."""
        self._retire_and_promote()
        if not self._current.agent.alive:
            self._replace("it has ended")
            raise KvUnavailable("the NIXL agent has ended")
        return self._current

    def _begin(self, wanted: NixlDescriptor, done: Done, due_s: float) -> bool:
        generation = self._living()
        if len(wanted.slots) > generation.pool.n_free:
            return False

        def ended(result: Blocks | KvTransferError) -> None:
            if isinstance(result, KvBadDescriptor):
                # Nothing was read, so the session can still be pulled with its true descriptor.
                self._pulled.pop(wanted.tag, None)
            done(result)

        generation.pull(wanted, ended, due_s=due_s)
        self._remember(wanted.tag)
        return True

    def _full(self, wanted: NixlDescriptor) -> KvTimeout:
        """The error of a pull that waited for room until its limit."""
        return KvTimeout(
            f"session {wanted.session_id}: the pool was full for {self._pull_limit_s:g} s: "
            f"{len(wanted.slots)} slots wanted, {self.n_free} of {self.n_slots} free, "
            f"{self._current.n_quarantined} wait for peers that hang"
        )

    def _remember(self, tag: bytes) -> None:
        self._pulled[tag] = None
        if len(self._pulled) > N_REMEMBERED:
            del self._pulled[next(iter(self._pulled))]

    def _changed(self, generation: Generation, result: Blocks | KvTransferError) -> None:
        if generation is self._current:
            if isinstance(result, PoisonedMetadata):
                self._replace(str(result))
            elif generation.stuck:
                self._replace("its thread does not answer")
            elif 2 * generation.n_quarantined > generation.pool.n_slots:
                self._replace("most of its pool waits for peers that hang")
        self._retire_and_promote()
        self._queue.retry_soon()

    def _replace(self, why: str) -> None:
        if self._next is None and not self._closed and len(self._retired) < MAX_RETIRED:
            log.warning("kv_transfer.agent_replaced %s: %s", self._current.agent.name, why)
            self._next = self._start_generation()

    def _retire_and_promote(self) -> None:
        """Use a new agent once it runs, and end replaced ones that are not needed any more."""
        if self._next is not None and self._next.agent.ready.is_set():
            ready, self._next = self._next, None
            if ready.agent.failure is None:
                self._retired.append(self._current)
                self._current = ready
            else:
                log.error("kv_transfer.agent_failed %s", ready.agent.failure)
        for each in [each for each in self._retired if not each.needed]:
            each.agent.close()
            each.end_all()
            self._retired.remove(each)
        # In place, as `_end_all` has this list, to join every thread that may still be inside UCX.
        self._agents[:] = [agent for agent in self._agents if not agent.join(0.0)]


SELF_CHECK_LIMIT_S = 30.0
"""Seconds for a transfer of one block. A busy machine may need some of them, and where only one worker of a
pair falls back to shared memory, every handoff between the two fails."""


def self_check(
    transport: NixlTransport, *, loopback: bool, limit_s: float = SELF_CHECK_LIMIT_S
) -> None:
    """Have a second agent read a block from the transport. Raises `KvUnavailable` if that fails."""
    pool = SlotPool(2, TAG_BYTES)
    probe = NixlAgent(f"probe.{os.urandom(8).hex()}", pool, loopback=loopback)
    try:
        if not probe.ready.wait(START_LIMIT_S) or probe.failure is not None:
            raise KvUnavailable(f"a second NIXL agent does not start: {probe.failure}")
        block = pool.memory[:1, :TAG_BYTES].copy() + 85
        results: SimpleQueue[Blocks | KvTransferError] = SimpleQueue()
        wanted = unpack_descriptor(transport.export(0, block))
        probe.read(ReadOrder(wanted, pool.take_slots(2), results.put))
        result = results.get(timeout=limit_s)
        if isinstance(result, KvTransferError):
            raise KvUnavailable(f"a NIXL transfer to itself failed: {result}")
    except Empty:
        raise KvUnavailable(f"a NIXL transfer to itself took over {limit_s:g} s") from None
    finally:
        transport.release(0)
        probe.close()
        probe.join(CLOSE_LIMIT_S)


def _end_all(agents: list[NixlAgent]) -> None:
    for agent in agents:
        agent.close()
    for agent in agents:
        agent.join(CLOSE_LIMIT_S)
