"""Requests and results of the simulated engine, in the shape of TensorRT-LLM's LLM API.

Field names, defaults and errors follow `tensorrt_llm.SamplingParams`, `DisaggregatedParams`,
`SchedulingParams`, `RequestOutput` and `CompletionOutput`, so that code written for those runs here.
"""

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")


class RequestError(RuntimeError):
    """One request failed; the engine stays usable."""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to sample and when to stop. Raises `ValueError` on contradicting values."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_perf_metrics: bool = False
    guided_decoding: object | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.best_of is None:
            self.best_of = self.n
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        greedy = self.top_k in (None, 1) and self.top_p in (None, 0.0)
        if self.best_of > 1 and greedy and not self.use_beam_search:
            raise ValueError("greedy decoding needs best_of 1")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1: {self.truncate_prompt_tokens}")


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """Which phase to run and the handoff between phases. Raises `ValueError` on a bad request_type."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: dict[str, Any] | None = None
    conversation_id: str | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in REQUEST_TYPES:
                raise ValueError(
                    f"request_type must be one of {', '.join(REQUEST_TYPES)}: {self.request_type}"
                )


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """Which attention-DP rank to run on; `attention_dp_relax=False` means that rank or wait."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = True


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence; `token_ids` is cumulative."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: object | None = None
    _n_seen: int = 0

    @property
    def length(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        """Tokens that are new since the previous yield."""
        return self.token_ids[self._n_seen :]

    @property
    def text_diff(self) -> str:
        """Always empty: the simulated engine has no tokenizer."""
        return ""


class RequestOutput:
    """A request's result: an async iterator that yields this same object, changed in place.

    The engine feeds `push`, `finish` and `fail`; what they bring becomes visible at the next yield
    only. Several tokens may arrive in one yield when the reader is slower than the engine. One reader.
    """

    __slots__ = (
        "_abort_request",
        "_aborted",
        "_closing",
        "_error",
        "_loop",
        "_pending",
        "_streaming",
        "_waiter",
        "cached_tokens",
        "disaggregated_params",
        "finished",
        "outputs",
        "prompt",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        *,
        sampling_params: SamplingParams,
        streaming: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt: str | None = None
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.outputs = [CompletionOutput(0)]
        self.finished = False
        self.cached_tokens = 0
        self.disaggregated_params: DisaggregatedParams | None = None
        self._loop = asyncio.get_running_loop()
        self._streaming = streaming
        self._abort_request: Callable[[], None] | None = None
        self._aborted = False
        self._pending: list[int] = []
        self._closing: tuple[str, int | None, DisaggregatedParams | None] | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def abort(self) -> None:
        """Cancel the request; one last yield says "cancelled". No-op once it has ended."""
        self._aborted = True
        if self._abort_request is not None:
            self._abort_request()

    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        """The same object with what is new. Raises `RequestError`, or the engine's fatal error."""
        while True:
            unseen = bool(self._pending) and self._streaming
            if self._error is not None and not unseen:
                error, self._error = self._error, None
                self.finished = True
                raise error
            if self.finished:
                raise StopAsyncIteration
            if self._closing is not None or unseen:
                self._show()
                return self
            self._waiter = self._loop.create_future()
            await self._waiter

    async def aresult(self) -> "RequestOutput":
        """Wait for the end. Raises like iteration does."""
        async for _ in self:
            pass
        return self

    def __await__(self) -> Generator[Any, None, "RequestOutput"]:
        return self.aresult().__await__()

    def on_abort(self, abort_request: Callable[[], None]) -> None:
        """What `abort` calls; the engine's side of the request."""
        self._abort_request = abort_request

    def push(self, token: int) -> None:
        """One more token."""
        self._pending.append(token)
        if self._streaming:
            self._wake()

    def finish(
        self,
        finish_reason: str,
        *,
        stop_reason: int | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
    ) -> None:
        """The last response."""
        self._closing = (finish_reason, stop_reason, disaggregated_params)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End with an error instead of a last response."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _show(self) -> None:
        output = self.outputs[0]
        output._n_seen = len(output.token_ids)
        output.token_ids += self._pending
        self._pending.clear()
        if self._closing is not None:
            output.finish_reason, output.stop_reason, params = self._closing
            output.disaggregated_params = self.disaggregated_params = params
            self.finished = True
