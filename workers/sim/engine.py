"""The simulated engine's loop: continuous batching with chunked prefill, tokens, handoff.

Callbacks on the running loop drive it, and nothing else: no task, no thread, no clock but the loop's
`time()`, so it runs in real and in virtual time. An idle engine has no timer unless handoffs are parked.

    submit -> prefill -> first token -> decode -> done
         |                    `-> done, blocks parked        (context_only)
         `-> pull ---> first token -> decode -> done         (generation_only)

`rank` keeps who waits for which rank, who runs there and on which blocks.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slagate.workers.kv_transfer.transport import KvTransferError, KvTransport
from slagate.workers.sim.handoff import DisaggIds, ParkedSessions, Pulls
from slagate.workers.sim.kv_cache.events import KvEventQueue
from slagate.workers.sim.rank import Iteration, RankGroup, SimRank
from slagate.workers.sim.request import RequestError
from slagate.workers.sim.sequence import EngineLimits, SimSequence
from slagate.workers.sim.stats import StatsQueue, iteration_record
from slagate.workers.sim.timing import Conditions, EngineTiming

# After a loop that woke late the next iteration starts where the last one should have ended, so that timer
# resolution (uvloop: 1 ms) does not add up. A loop stuck for longer does not catch up in a burst.
CATCH_UP_S = 0.05


class SimEngine:
    """Runs sequences on its ranks; `parked` and `pulls` are None without a transport, so without handoffs.

    A critical section is a whole method: nothing here awaits. An exception that leaves a step is fatal, and
    given to `on_fatal`, which is `fail_all` unless the owner has set another. `events` and `stats` are what
    pollers read, `iteration` is the one that runs, if any.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        timing: EngineTiming,
        ranks: Sequence[SimRank],
        transport: KvTransport | None,
        handoff_timeout_s: float,
        disagg_ids: DisaggIds,
        events: KvEventQueue,
        stats: StatsQueue,
        conditions: Conditions,
    ) -> None:
        self.ranks = ranks
        self.group = RankGroup(ranks, limits)
        self.events = events
        self.stats = stats
        self.kv_transfer_failures = self.n_unsafe_aborts = 0
        self.on_fatal: Callable[[BaseException], None] = self.fail_all
        self.parked: ParkedSessions | None = None
        self.pulls: Pulls | None = None
        if transport is not None:
            self.parked = ParkedSessions(
                transport,
                limits=limits,
                disagg_ids=disagg_ids,
                timeout_s=handoff_timeout_s,
                freed=self._go_on,
            )
            self.pulls = Pulls(
                transport,
                timing=timing,
                limits=limits,
                ready=partial(self._guarded, self._finish_pull),
                refused=self._refuse,
                connect_s=conditions.connect_s,
            )
        self._limits = limits
        self._timing = timing
        self._step_factor = conditions.step_factor
        self.iteration: Iteration | None = None
        self._wake: asyncio.Handle | None = None
        self._n_iterations = 0

    def submit(self, sequence: SimSequence) -> None:
        """Queue a sequence; it starts with the next iteration that has room."""
        self.group.waiting.append(sequence)
        self._go_on()

    def abort(self, sequence: SimSequence) -> None:
        """End a sequence with finish_reason "cancelled" and free its blocks. No-op when done.

        A sequence that still waits for another worker's blocks is counted in `n_unsafe_aborts` and never
        gives its own back: in TensorRT-LLM the peer may write into them later.
        """
        if sequence.done:
            return
        if sequence.is_pull and not sequence.generated:
            self.n_unsafe_aborts += 1
            sequence.allocation = None
        self._end(sequence)
        sequence.feed.finish("cancelled")

    def inject_request_error(self, request_id: int, text: str) -> bool:
        """Fail one request as an executor error of that request does; False when it does not run."""
        found = [one for one in self.group.sequences() if one.request_id == request_id]
        for sequence in found:
            self._end(sequence)
            sequence.feed.result.fail(RequestError(text))
        return bool(found)

    def fail_all(self, error: BaseException | None) -> None:
        """End every sequence with `error`, or in silence, and withdraw parked handoffs."""
        for sequence in self.group.sequences():
            self._end(sequence)
            if error is not None:
                sequence.feed.result.fail(error)
        if self.parked is not None:
            self.parked.clear()
        self._cancel_wake()
        self.group.flush()

    def _go_on(self) -> None:
        """Schedule an iteration if it would have anything to do, else publish pending KV events."""
        if self._wake is not None or self.iteration is not None:
            return
        if self.group.is_ready():
            self._wake = asyncio.get_running_loop().call_soon(self._guarded, self._begin)
        else:
            self.group.flush()

    def _cancel_wake(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None

    def _begin(self) -> None:
        self._wake = None
        self._start_iteration(asyncio.get_running_loop().time())

    def _guarded(self, step: Callable[..., None], *args: object) -> None:
        """Do a step. A step that fails leaves no timer to go on with, so it must end the engine."""
        try:
            step(*args)
        except Exception as error:
            self.iteration = None
            self.on_fatal(error)
            raise

    def _start_iteration(self, now_s: float) -> None:
        """Admit, plan one iteration and set the timer for its end; stay idle with nothing to run."""
        # A refused pull gives its room back at once, so each admission is decided after the last pull.
        for sequence in self.group.admit():
            self._start(sequence, now_s)
        steps = [rank.plan() for rank in self.ranks]
        # Requests refused at admission asked for a wake-up, which this iteration makes needless.
        self._cancel_wake()
        if not any(step.decoding or step.chunks for step in steps):
            self.group.flush()
            return
        # Ranks meet at the end of each iteration: the slowest one sets the pace.
        seconds = max([step.seconds(self._timing) for step in steps])
        if self._step_factor is not None:
            seconds *= self._step_factor(now_s)
        ends_s = now_s + seconds
        timer = asyncio.get_running_loop().call_at(ends_s, self._guarded, self._finish_iteration)
        self.iteration = Iteration(now_s, ends_s, steps, timer)

    def _start(self, sequence: SimSequence, now_s: float) -> None:
        """Tell a sequence's result that it was admitted, and start its pull if it has one."""
        allocation = sequence.allocation
        assert allocation is not None
        sequence.feed.started(now_s, allocation)
        if sequence.is_pull:
            assert self.pulls is not None
            self.pulls.start(sequence, now_s)

    def _finish_iteration(self) -> None:
        iteration = self.iteration
        assert iteration is not None, "the timer dies with its iteration"
        for rank, step in zip(self.ranks, iteration.steps, strict=True):
            for sequence in step.decoding:
                for _ in range(self._limits.tokens_per_step):
                    if not sequence.done:
                        self._decode(rank, sequence)
                sequence.feed.end_step()
            for sequence, n in step.chunks:
                if not sequence.done:
                    sequence.prefilled_tokens += n
                    if sequence.prefilled_tokens == sequence.n_prompt:
                        self._finish_prefill(rank, sequence)
            rank.flush()
        self.iteration = None
        self._n_iterations += 1
        for rank, step in zip(self.ranks, iteration.steps, strict=True):
            self.stats.put(
                iteration_record(
                    rank,
                    step,
                    number=self._n_iterations,
                    started_s=iteration.started_s,
                    ended_s=iteration.ends_s,
                    queued=self.group.waiting.totals,
                )
            )
        now_s = asyncio.get_running_loop().time()
        late = now_s - iteration.ends_s > CATCH_UP_S
        self._start_iteration(now_s if late else iteration.ends_s)

    def _finish_prefill(self, rank: SimRank, sequence: SimSequence) -> None:
        """Deliver the first token of a prompt that is whole in the cache; hand a context_only one off."""
        prompt, block_tokens = sequence.prompt, self._limits.block_tokens
        n_full = sequence.n_prompt // block_tokens
        sequence.start_chain(prompt.states[n_full - 1] if n_full else prompt.seed, block_tokens)
        rank.start_decoding(sequence)
        state = prompt.states[-1]
        token = sequence.draw(state, self._limits.vocab_size)
        if sequence.request_type == "context_only" and sequence.stop.check([token]) is None:
            self._hand_off(rank, sequence, token)
        else:
            self._emit(sequence, token, state)
            sequence.feed.end_step()

    def _decode(self, rank: SimRank, sequence: SimSequence) -> None:
        """Put a sequence's last token into the cache and deliver the next one."""
        chain, allocation = sequence.chain, sequence.allocation
        assert chain is not None
        assert allocation is not None
        if sequence.kv_tokens % self._limits.block_tokens == 0:
            rank.cache.grow(allocation)
        sequence.kv_tokens += 1
        chain.append(sequence.generated[-1])
        state = chain.state
        self._emit(sequence, sequence.draw(state, self._limits.vocab_size), state)

    def _emit(
        self,
        sequence: SimSequence,
        token: int,
        state: bytes,
        *,
        logprobs: Sequence[Any] | None = None,
    ) -> None:
        """Deliver a token drawn from the context in `state`; end the sequence if it is the last one.

        `logprobs` are what there is of a token that was not drawn here: one entry, or none. Such a token
        ends nothing, neither by what it is nor by the budget: py_executor.py id 736889464,
        `_prepare_disagg_gen_transmission_complete`, only adds it (pull request #16691 would check it).
        """
        generated, feed = sequence.generated, sequence.feed
        generated.append(token)
        feed.push(token, state, logprobs=logprobs)
        if logprobs is not None:
            return
        stop = sequence.stop.check(generated, max_tokens=sequence.max_tokens)
        if stop is not None:
            self._end(sequence)
            feed.finish(stop.reason, stop_reason=stop.stop_reason, n_trim=stop.n_trim)

    def _hand_off(self, rank: SimRank, sequence: SimSequence, token: int) -> None:
        """Export the prompt's blocks and park them; the sequence ends with the params for decode."""
        assert self.parked is not None
        try:
            params = self.parked.park(
                sequence,
                token,
                ctx_dp_rank=rank.index if len(self.ranks) > 1 else None,
                free=partial(rank.free, sequence),
            )
        except KvTransferError as error:
            self._refuse(sequence, error)
            return
        self._end(sequence, keeps_blocks=True)
        sequence.feed.push(token, sequence.prompt.states[-1])
        sequence.feed.end_step()
        sequence.feed.finish("length", params=params)

    def _finish_pull(self, sequence: SimSequence, first_token: int) -> None:
        """Start decoding a pulled prompt; its first token comes from the prefill worker.

        So do its log probabilities, in versions that carry them, and if the prefill worker was asked for
        them (TensorRT-LLM's pull request #11727).
        """
        assert sequence.rank is not None
        self.ranks[sequence.rank].start_decoding(sequence)
        carried = getattr(sequence.params, "first_gen_log_probs", None) or []
        self._emit(sequence, first_token, sequence.prompt.states[-1], logprobs=carried[:1])
        sequence.feed.end_step()
        self._go_on()

    def _refuse(self, sequence: SimSequence, error: KvTransferError) -> None:
        self.kv_transfer_failures += 1
        self._end(sequence)
        sequence.feed.result.fail(RequestError(f"KV transfer failed: {error}"))

    def _end(self, sequence: SimSequence, *, keeps_blocks: bool = False) -> None:
        """Take a sequence out and free its blocks unless it `keeps_blocks`; its timers end with it."""
        sequence.done = True
        self.group.remove(sequence, keeps_blocks=keeps_blocks)
        if self.pulls is not None:
            self.pulls.cancel(sequence)
        # Also reached from inside the iteration's own end, where its timer is spent already.
        iteration = self.iteration
        if iteration is not None and not any(step.has_work() for step in iteration.steps):
            iteration.timer.cancel()
            self.iteration = None
        self._go_on()
