"""Results of the simulated engine, in the shape of TensorRT-LLM's `RequestOutput`.

The engine writes to one `OutputFeed` per sequence. The caller reads the `RequestOutput`, which has a
`CompletionOutput` for each sequence.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from slagate.workers.sim.kv_cache.cache import Allocation
from slagate.workers.sim.request import DisaggregatedParams12, SamplingParams12
from slagate.workers.sim.sampling import LogprobMaker, chosen_logprob
from slagate.workers.sim.tokenizer import SimTokenizer

_NEVER = timedelta(0)


@dataclass(slots=True)
class TimingMetrics:
    """When things happened, on the loop's clock; zero where it did not happen."""

    arrival_time: timedelta = _NEVER
    first_scheduled_time: timedelta = _NEVER
    first_token_time: timedelta = _NEVER
    last_token_time: timedelta = _NEVER
    kv_cache_transfer_start: timedelta = _NEVER
    kv_cache_transfer_end: timedelta = _NEVER
    kv_cache_size: int = 0  # bytes


@dataclass(slots=True)
class KvCacheMetrics:
    """KV blocks that the request took, and how many of its prompt's were found in the cache."""

    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0


@dataclass(slots=True)
class SpeculativeMetrics:
    """Figures of speculative decoding: all zero, as the simulated engine drafts nothing."""

    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass(slots=True)
class RequestPerfMetrics:
    """The performance figures of one sequence, in the shape of `request_perf_metrics`."""

    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeMetrics = field(default_factory=SpeculativeMetrics)

    def mark_token(self, now_s: float) -> None:
        """Note the time of a token."""
        timing = self.timing_metrics
        timing.last_token_time = timedelta(seconds=now_s)
        if timing.first_token_time == _NEVER:
            timing.first_token_time = timing.last_token_time


def metrics_dict(
    perf: RequestPerfMetrics, *, n_tokens: int, finish_reason: str | None
) -> dict[str, Any]:
    """`RequestOutput.metrics_dict` of a finished request; times in seconds."""
    timing = perf.timing_metrics
    decode_s = (timing.last_token_time - timing.first_token_time).total_seconds()
    return {
        "ttft": (timing.first_token_time - timing.arrival_time).total_seconds(),
        "tpot": decode_s / (n_tokens - 1) if n_tokens > 1 else 0.0,
        "e2e": (timing.last_token_time - timing.arrival_time).total_seconds(),
        "request_queue_time": (timing.first_scheduled_time - timing.arrival_time).total_seconds(),
        "arrival_timestamp": timing.arrival_time.total_seconds(),
        "finished_reason": finish_reason,
    }


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence; `token_ids`, `text` and `logprobs` are cumulative."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: None = None
    disaggregated_params: DisaggregatedParams12 | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    _n_seen: int = 0
    _n_text_seen: int = 0
    _n_logprobs_seen: int = 0

    @property
    def length(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        """Tokens since the previous yield."""
        return self.token_ids[self._n_seen :]

    @property
    def text_diff(self) -> str:
        """Text since the previous yield."""
        return self.text[self._n_text_seen :]

    def mark_seen(self) -> None:
        """Note a yield: what is there now is in no later diff."""
        self._n_seen, self._n_text_seen = len(self.token_ids), len(self.text)
        self._n_logprobs_seen = len(self.logprobs)

    def extend(self, tokens: list[int], logprobs: list[Any]) -> None:
        """Append tokens; `add_text` makes their text."""
        self.token_ids += tokens
        self.logprobs += logprobs

    def trim(self, n_tokens: int) -> None:
        """Take a stop word off the end. Log probabilities stay, as in TensorRT-LLM's `_handle_sequence`."""
        if n_tokens:
            del self.token_ids[-n_tokens:]

    def add_text(self, tokenizer: SimTokenizer, *, streaming: bool) -> None:
        """Make the text of what was appended since the previous yield.

        In a stream text only grows: the beginning of a stop word that an earlier yield showed stays in it,
        when its tokens are taken off (executor/result.py @123741b1 and @a678b91a, `decode_incrementally`).
        """
        if streaming:
            self.text += tokenizer.decode(self.token_ids_diff)
        else:
            self.text = tokenizer.decode(self.token_ids)

    @property
    def logprobs_diff(self) -> list[Any]:
        """Log probabilities since the previous yield."""
        return self.logprobs[self._n_logprobs_seen :]


@dataclass(frozen=True, slots=True)
class SimOutputForm:
    """What a request's results contain, and how often they come.

    `stream_interval` is in engine iterations (py_executor.py id 1891464528: `py_decoding_iter %
    stream_interval`). `tokenizer` None means no text, `logprobs` None no log probabilities. `ends_apart` is
    `ApiTraits`'s.
    """

    streaming: bool = False
    stream_interval: int = 1
    tokenizer: SimTokenizer | None = None
    logprobs: LogprobMaker | None = None
    prompt_logprobs: tuple[Any, ...] = ()
    perf_metrics: bool = False
    ends_apart: bool = True


class RequestOutput:
    """A request's result: an async iterator that yields this same object, changed in place.

    Output becomes visible at the next yield only. One yield may bring several tokens, because of
    `stream_interval`, of drafts, or because the reader is slower than the engine. The iterator ends when
    each of its `feeds` has ended, or once a stop text is found in the text of one of them, of which the
    executor hears nothing. It has one reader, on the loop it was made on.

    With fewer log probabilities than tokens it raises an `AssertionError`, and the request goes on; a
    generation_only one of a version that carries the first token's may lack one (executor/result.py
    @a678b91a and @123741b1, `_handle_sequence`).
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        *,
        sampling_params: SamplingParams12,
        form: SimOutputForm,
        prompt: str | None = None,
        disaggregated_params: DisaggregatedParams12 | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.finished = False
        self.cached_tokens = 0
        self.context_logits: None = None
        self.mm_embedding_handle: None = None
        self.sent_params = disaggregated_params
        self.disaggregated_params = copy(disaggregated_params)
        self.decoding_iter = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()
        self._form = form
        n_sequences = sampling_params.best_of or 1
        self.feeds = [OutputFeed(self, index, form) for index in range(n_sequences)]
        self.cancel: Callable[[], None] = lambda: None  # the executor's end of `abort`
        self.executor: Callable[[], Any] | None = None  # a weak reference
        self._n_open = n_sequences
        self._last_closed: OutputFeed | None = None
        self._aborted = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The `n` sequences; of more (`best_of`), those with the best cumulative log probability."""
        outputs = [feed.output for feed in self.feeds]
        n = self.sampling_params.n
        if n < len(outputs):
            outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
            for index, output in enumerate(outputs):
                output.index = index
        return outputs[:n]

    def abort(self) -> None:
        """Cancel the request; the last yield has reason "cancelled". No-op once it has ended.

        Raises `AttributeError` after the engine's shutdown: executor/result.py @123741b1 and @a678b91a
        call a weak reference, and use what it returns.
        """
        if self.executor is not None:
            self.executor().abort_request(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        """The same object with what is new. Raises `RequestError`, or the engine's fatal error."""
        while True:
            unseen = self._form.streaming and any(map(OutputFeed.has_unseen, self.feeds))
            if self._error is not None and not unseen:
                error, self._error = self._error, None
                self.finished = True
                raise error
            if self.finished:
                raise StopAsyncIteration
            if unseen or not self._n_open:
                self._show()
                return self
            self._waiter = self.loop.create_future()
            await self._waiter

    async def aresult(self) -> "RequestOutput":
        """Wait for the end. Raises like iteration does."""
        async for _ in self:
            pass
        return self

    def __await__(self) -> Generator[Any, None, "RequestOutput"]:
        return self.aresult().__await__()

    def runs(self) -> bool:
        """Whether the executor still works on it, whatever the reader has been told."""
        return self._error is None and self._n_open > 0

    def fail(self, error: BaseException) -> None:
        """End with an error instead of a last response."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Wake the reader, if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def closed_by(self, feed: "OutputFeed") -> None:
        """Note that a sequence has ended."""
        self._last_closed = feed
        self._n_open -= 1
        self.wake()

    def _show(self) -> None:
        all_closed = not self._n_open
        for feed in self.feeds:
            ends_all = all_closed and feed is self._last_closed
            feed.show(has_reason=self._form.ends_apart or ends_all)
        first = self.feeds[0]
        n_steps, n_tokens = first.n_steps, len(first.output.token_ids)
        self.decoding_iter = n_steps
        self.avg_decoded_tokens_per_iter = n_tokens / n_steps if n_tokens else None
        self.disaggregated_params = first.output.disaggregated_params
        self.finished = all_closed
        if self._form.tokenizer is not None:
            self._search_stop_texts()
        if self.finished and first.output.request_perf_metrics is not None:
            self.metrics_dict = metrics_dict(
                first.output.request_perf_metrics,
                n_tokens=first.output.length,
                finish_reason=first.output.finish_reason,
            )

    def _search_stop_texts(self) -> None:
        """End the result at a stop text in any output's text, which is cut there; its tokens are not."""
        was_finished, includes = self.finished, self.sampling_params.include_stop_str_in_output
        reasons = [reason for reason, _ in self.sampling_params._get_stop_reasons_and_words()]
        texts = [reason for reason in reasons if isinstance(reason, str)]
        for output in self.outputs:
            if was_finished and output.finish_reason not in ("stop", "length"):
                continue
            found = next((text for text in texts if text in output.text), None)
            if found is None:
                continue
            place = output.text.find(found)
            output.text = output.text[: place + (len(found) if includes else 0)]
            output.finish_reason, output.stop_reason = "stop", found
            if not self._form.ends_apart:
                self.abort()
            self.finished = True


class _Closing(NamedTuple):
    reason: str
    stop_reason: int | str | None
    n_trim: int
    params: DisaggregatedParams12 | None


class OutputFeed:
    """The engine's end of one sequence of a request: any number of `push`, then `finish`."""

    def __init__(self, result: RequestOutput, index: int, form: SimOutputForm) -> None:
        self.result = result
        self.index = index
        self.output = CompletionOutput(
            index, disaggregated_params=copy(result.disaggregated_params)
        )
        self._form = form
        self._tokens: list[int] = []
        self._logprobs: list[Any] = []
        self._cumulative: float | None = None
        self.n_steps = 0  # iterations that gave it tokens
        self._n_ready = 0
        self._n_lacking = 0  # tokens not shown yet that have no log probabilities
        self._is_ended = False  # and its end was shown
        self._closing: _Closing | None = None
        self._perf: RequestPerfMetrics | None = None
        sampling = result.sampling_params
        if form.logprobs is not None or sampling.n < (sampling.best_of or 1):
            self._cumulative = 0.0
        if form.perf_metrics:
            self._perf = RequestPerfMetrics()
            self._perf.timing_metrics.arrival_time = timedelta(seconds=result.loop.time())

    @property
    def closed(self) -> bool:
        """Whether the sequence has had its `finish`."""
        return self._closing is not None

    def push(self, token: int, state: bytes, *, logprobs: Sequence[Any] | None = None) -> None:
        """Add a token, chosen after the context in `state`; `logprobs` are its entry, or no entry."""
        self._tokens.append(token)
        if self._form.logprobs is not None:
            made = [self._form.logprobs.of(token, state)] if logprobs is None else logprobs
            self._logprobs += made
            self._n_lacking += not made
        if self._cumulative is not None:
            self._cumulative += chosen_logprob(token, state)
        if self._perf is not None:
            self._perf.mark_token(self.result.loop.time())

    def end_step(self) -> None:
        """Note the end of an iteration that pushed tokens: every `stream_interval` of them are shown."""
        self.n_steps += 1
        if self.n_steps == 1 or self.n_steps % self._form.stream_interval == 0:
            self._n_ready = len(self._tokens)
            if self._n_ready and self._form.streaming:
                self.result.wake()

    def finish(
        self,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        n_trim: int = 0,
        params: DisaggregatedParams12 | None = None,
    ) -> None:
        """Make the next response the last, without `n_trim` tokens at the end.

        `params` None leaves the request's own params in it.
        """
        if self._closing is None:
            self._closing = _Closing(reason, stop_reason, n_trim, params)
            self.result.closed_by(self)

    def started(self, now_s: float, allocation: Allocation) -> None:
        """Note that the sequence was admitted at `now_s`, with these blocks."""
        if self.index == 0:
            self.result.cached_tokens = allocation.reused_tokens
        if self._perf is not None:
            self._perf.timing_metrics.first_scheduled_time = timedelta(seconds=now_s)
            self._perf.kv_cache_metrics = KvCacheMetrics(
                num_total_allocated_blocks=allocation.allocated_blocks,
                num_new_allocated_blocks=allocation.new_blocks,
                num_reused_blocks=allocation.reused_blocks,
                num_missed_blocks=allocation.missed_blocks,
            )

    def transferred(self, started_s: float, ended_s: float, *, n_bytes: int) -> None:
        """Note that the prompt's KV cache came from another worker; all of it counts as cached."""
        self.result.cached_tokens = len(self.result.prompt_token_ids)
        if self._perf is not None:
            timing = self._perf.timing_metrics
            timing.kv_cache_transfer_start = timedelta(seconds=started_s)
            timing.kv_cache_transfer_end = timedelta(seconds=ended_s)
            timing.kv_cache_size = n_bytes

    def has_unseen(self) -> bool:
        """Whether there is output that a streaming reader has not seen."""
        return self._n_ready > 0 or (self._closing is not None and not self._is_ended)

    def show(self, *, has_reason: bool) -> None:
        """Show the reader all ready tokens, or all tokens once the sequence has ended.

        With `has_reason` the end has a reason, and a stop is cut off. A cancelled one always has.
        """
        output, closing = self.output, self._closing
        output.mark_seen()
        if self._is_ended:
            return
        n = len(self._tokens) if closing is not None else self._n_ready
        n_logprobs, self._n_lacking = n - self._n_lacking, 0
        output.extend(self._tokens[:n], self._logprobs[:n_logprobs])
        del self._tokens[:n], self._logprobs[:n_logprobs]
        self._n_ready = 0
        output.cumulative_logprob = self._cumulative
        output.prompt_logprobs = list(self._form.prompt_logprobs)
        if self._form.logprobs is not None and not (closing and closing.reason == "cancelled"):
            self._check_logprobs()
        if closing is not None:
            self._show_end(closing, has_reason=has_reason or closing.reason == "cancelled")
        if self._form.tokenizer is not None:
            output.add_text(self._form.tokenizer, streaming=self._form.streaming)

    def _show_end(self, closing: _Closing, *, has_reason: bool) -> None:
        output = self.output
        self._is_ended = True
        output.request_perf_metrics = self._perf
        if has_reason:
            output.trim(closing.n_trim)
            output.finish_reason, output.stop_reason = closing.reason, closing.stop_reason
        if closing.params is not None:
            output.disaggregated_params = closing.params
            if hasattr(closing.params, "first_gen_log_probs") and output.logprobs:
                closing.params.first_gen_log_probs = list(output.logprobs)

    def _check_logprobs(self) -> None:
        params = self.result.sent_params
        decodes = params is not None and params.request_type == "generation_only"
        n_may_lack = int(decodes and hasattr(params, "first_gen_log_probs"))
        n_tokens, n_logprobs = self.output.length, len(self.output.logprobs)
        assert n_logprobs >= n_tokens - n_may_lack, f"logprobs length: {n_logprobs} < {n_tokens}"
