"""The simulated engine's loop: continuous batching with chunked prefill, tokens, handoff.

Driven by callbacks on the running loop and by nothing else: no task, no thread, no clock but
`loop.time()`, so the same engine runs in real and in virtual time. An idle engine has no timer pending,
unless handoffs are parked.

    submit -> prefill -> first token -> decode -> done
         |                    `-> done, blocks parked        (context_only)
         `-> pull ---> first token -> decode -> done         (generation_only)

Who waits, who runs and on which blocks is kept by `sim_schedule`.
"""

import asyncio
from dataclasses import replace

from slagate.workers.kv_transfer import KvTransferError, KvTransport
from slagate.workers.sim_handoff import DisaggIds, KvMismatchError, export_prompt, pull_prompt
from slagate.workers.sim_kv_cache import SimKvCache, next_token
from slagate.workers.sim_parking import ParkedSessions
from slagate.workers.sim_request import DisaggregatedParams, RequestError
from slagate.workers.sim_schedule import SimSchedule
from slagate.workers.sim_sequence import EngineLimits, Iteration, SimSequence
from slagate.workers.sim_stats import StatsQueue, iteration_record
from slagate.workers.sim_timing import EngineTiming, PrefillChunk

# A loop that wakes late starts the next iteration where the last one should have ended, so that timer
# resolution (uvloop: 1 ms) does not add up; one that was stuck for longer does not catch up in a burst.
CATCH_UP_S = 0.05


class SimEngine:
    """Runs sequences over one KV cache; `transport` and `parked` are None where no handoff is possible.

    A critical section is a whole method: nothing here awaits.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        timing: EngineTiming,
        cache: SimKvCache,
        transport: KvTransport | None,
        handoff_timeout_s: float,
        disagg_ids: DisaggIds,
        stats: StatsQueue,
    ) -> None:
        self.cache = cache
        self.kv_verify_failures = 0
        self.kv_transfer_failures = 0
        self.parked: ParkedSessions | None = None
        if transport is not None:
            self.parked = ParkedSessions(
                cache, transport=transport, timeout_s=handoff_timeout_s, freed=self._kick
            )
        self._limits = limits
        self._timing = timing
        self._transport = transport
        self._disagg_ids = disagg_ids
        self._stats = stats
        self._schedule = SimSchedule(cache, limits)
        self._iteration: Iteration | None = None
        self._wake: asyncio.Handle | None = None
        self._n_iterations = 0
        self._n_completed = 0

    @property
    def n_running(self) -> int:
        """Requests admitted and not finished."""
        return self._schedule.n_running

    @property
    def n_queued(self) -> int:
        """Requests waiting for admission."""
        return len(self._schedule.waiting)

    def submit(self, sequence: SimSequence) -> None:
        """Queue a sequence; it starts with the next iteration that has room."""
        self._schedule.add(sequence)
        self._kick()

    def abort(self, sequence: SimSequence) -> None:
        """End a sequence with finish_reason "cancelled" and free what it holds. No-op when done."""
        if not sequence.done:
            self._end(sequence)
            sequence.result.finish("cancelled", disaggregated_params=_copy_params(sequence))

    def fail_all(self, error: BaseException) -> None:
        """End every sequence with `error` and withdraw parked handoffs; nothing is left to run."""
        for sequence in self._schedule.sequences():
            self._end(sequence)
            sequence.result.fail(error)
        if self.parked is not None:
            self.parked.clear()
        self._cancel_wake()

    def _kick(self) -> None:
        if self._wake is None and self._iteration is None and self._schedule.is_ready():
            self._wake = asyncio.get_running_loop().call_soon(self._begin)

    def _cancel_wake(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None

    def _begin(self) -> None:
        self._wake = None
        self._start_iteration(asyncio.get_running_loop().time())

    def _start_iteration(self, now_s: float) -> None:
        """Admit, plan one iteration and set the timer for its end; nothing to run = stay idle."""
        n_new = self._admit(now_s)
        decoding = list(self._schedule.decoding)
        # A decoding request takes one token of the budget each.
        chunks = self._schedule.plan_chunks(self._limits.max_num_tokens - len(decoding))
        # Requests refused at admission asked for a wake-up, which this iteration makes needless.
        self._cancel_wake()
        if not decoding and not chunks:
            return
        context_tokens = sum([one.kv_tokens for one in decoding]) / max(1, len(decoding))
        ends_s = now_s + self._timing.iteration_s(
            [PrefillChunk(n, one.prefilled_tokens) for one, n in chunks],
            batch_size=len(decoding),
            context_tokens=context_tokens,
        )
        timer = asyncio.get_running_loop().call_at(ends_s, self._finish_iteration)
        self._iteration = Iteration(now_s, ends_s, decoding, chunks, n_new, timer)

    def _finish_iteration(self) -> None:
        iteration = self._iteration
        assert iteration is not None, "the timer dies with its iteration"
        for sequence in iteration.decoding:
            if not sequence.done:
                self._decode(sequence)
        for sequence, n in iteration.chunks:
            if not sequence.done:
                sequence.prefilled_tokens += n
                if sequence.prefilled_tokens == sequence.n_prompt:
                    self._finish_prefill(sequence)
        self._iteration = None
        self._n_iterations += 1
        self._stats.put(
            iteration_record(
                iteration,
                number=self._n_iterations,
                n_active=self.n_running,
                queued=list(self._schedule.waiting),
                n_completed=self._n_completed,
                cache=self.cache,
            )
        )
        now_s = asyncio.get_running_loop().time()
        late = now_s - iteration.ends_s > CATCH_UP_S
        self._start_iteration(now_s if late else iteration.ends_s)

    def _admit(self, now_s: float) -> int:
        """Let in what fits, in order of arrival, and start its pulls; returns how many came in."""
        n_admitted = 0
        # A refused pull gives its room back at once, so each admission is decided after the last pull.
        while (sequence := self._schedule.admit()) is not None:
            n_admitted += 1
            if sequence.request_type == "generation_only":
                self._pull(sequence, now_s)
        return n_admitted

    def _finish_prefill(self, sequence: SimSequence) -> None:
        """The whole prompt is in the cache: first token, and the handoff of a context_only request."""
        block_tokens = self._limits.block_tokens
        n_full = sequence.n_prompt // block_tokens
        parent = sequence.states[n_full - 1] if n_full else sequence.seed
        sequence.start_chain(parent, block_tokens)
        self._schedule.start_decoding(sequence)
        token = next_token(sequence.states[-1], self._limits.vocab_size)
        if sequence.request_type == "context_only" and not sequence.stops_at(token):
            self._hand_off(sequence, token)
        else:
            self._emit(sequence, token)

    def _decode(self, sequence: SimSequence) -> None:
        """One decode step: the last token enters the cache, the next one comes out."""
        chain = sequence.chain
        assert chain is not None
        if sequence.kv_tokens % self._limits.block_tokens == 0:
            self._schedule.grow(sequence)
        sequence.kv_tokens += 1
        chain.append(sequence.last_token)
        self._emit(sequence, next_token(chain.state, self._limits.vocab_size))

    def _emit(self, sequence: SimSequence, token: int) -> None:
        """Deliver a token, and end the sequence if it is the last one."""
        result = sequence.result
        if token in sequence.stop_ids and sequence.stops_at(token):
            is_end = token == sequence.end_id
            if is_end or sequence.keep_stop_token:
                result.push(token)
            self._end(sequence)
            result.finish(
                "stop",
                stop_reason=None if is_end else token,
                disaggregated_params=_copy_params(sequence),
            )
            return
        sequence.last_token = token
        sequence.n_generated += 1
        result.push(token)
        if sequence.n_generated >= sequence.max_tokens:
            self._end(sequence)
            result.finish("length", disaggregated_params=_copy_params(sequence))

    def _hand_off(self, sequence: SimSequence, token: int) -> None:
        """Export the prompt's blocks and park them; the sequence ends with the params for decode."""
        assert sequence.params is not None
        assert self._transport is not None
        assert self.parked is not None
        disagg_id = sequence.params.disagg_request_id
        if disagg_id is None:
            disagg_id = self._disagg_ids.next(asyncio.get_running_loop().time())
        try:
            params = export_prompt(
                sequence,
                token,
                transport=self._transport,
                limits=self._limits,
                disagg_request_id=disagg_id,
            )
        except KvTransferError as error:
            self._refuse(sequence, error)
            return
        allocation = self._schedule.take_blocks(sequence)
        self._end(sequence)
        self.parked.park(sequence.result.request_id, allocation)
        sequence.result.push(token)
        sequence.result.finish("length", disaggregated_params=params)

    def _pull(self, sequence: SimSequence, now_s: float) -> None:
        """Fetch a generation_only sequence's blocks; it decodes after the time they need to move."""
        assert self._transport is not None
        try:
            pull_prompt(sequence, transport=self._transport, limits=self._limits)
        except KvTransferError as error:
            self.kv_verify_failures += isinstance(error, KvMismatchError)
            self._refuse(sequence, error)
            return
        sequence.result.cached_tokens = sequence.n_prompt
        sequence.transfer_timer = asyncio.get_running_loop().call_at(
            now_s + self._timing.transfer_s(sequence.n_prompt), self._finish_transfer, sequence
        )

    def _finish_transfer(self, sequence: SimSequence) -> None:
        sequence.transfer_timer = None
        self._schedule.start_decoding(sequence)
        self._emit(sequence, sequence.last_token)
        self._kick()

    def _refuse(self, sequence: SimSequence, error: KvTransferError) -> None:
        self.kv_transfer_failures += 1
        self._end(sequence)
        sequence.result.fail(RequestError(f"KV transfer failed: {error}"))

    def _end(self, sequence: SimSequence) -> None:
        """Take a sequence out and free what it holds; no timer of it is left behind."""
        self._schedule.remove(sequence)
        sequence.done = True
        if sequence.transfer_timer is not None:
            sequence.transfer_timer.cancel()
            sequence.transfer_timer = None
        self._n_completed += 1
        # Also reached from inside the iteration's own end, where its timer is spent already.
        if self._iteration is not None and not self._iteration.has_work():
            self._iteration.timer.cancel()
            self._iteration = None
        self._kick()


def _copy_params(sequence: SimSequence) -> DisaggregatedParams | None:
    # As TensorRT-LLM does: a result's params start as a copy of the request's.
    return None if sequence.params is None else replace(sequence.params)
