"""`SimLLM`: a double of `tensorrt_llm.LLM` that needs no GPU and gives checkable tokens.

Same calls, result objects, errors and order of events as the PyTorch backend, for token prompts and one
sequence a request; times come from a measured profile. The token after a context is a function of that
context (`sim_kv_cache`), so sampling settings other than stopping do not change the output, and
`min_tokens` lets a stop token pass instead of drawing another one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slagate.workers.kv_transfer import KvTransport
from slagate.workers.profile import TpProfile
from slagate.workers.sim_engine import SimEngine
from slagate.workers.sim_handoff import DisaggIds
from slagate.workers.sim_kv_cache import SimKvCache
from slagate.workers.sim_request import (
    DisaggregatedParams,
    RequestError,
    RequestOutput,
    SamplingParams,
    SchedulingParams,
)
from slagate.workers.sim_sequence import EngineLimits
from slagate.workers.sim_stats import IterationResult, StatsLimits, StatsQueue
from slagate.workers.sim_submit import check_arguments, checked_sequence, enqueue_problem
from slagate.workers.sim_timing import EngineTiming

__all__ = [
    "DisaggregatedParams",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulingParams",
    "SimLLM",
    "SimLlmArgs",
]


VOCAB_SIZE = 128_256
"""Default vocabulary: Llama 3's."""


@dataclass(frozen=True, slots=True)
class KvCacheArgs:
    """`args.kv_cache_config`, as far as it is simulated."""

    tokens_per_block: int
    enable_block_reuse: bool = True
    event_buffer_max_size: int = 0


@dataclass(frozen=True, slots=True)
class SimLlmArgs:
    """`llm.args`: the fields of TensorRT-LLM's `LlmArgs` that a worker reads."""

    model: str
    tensor_parallel_size: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    kv_cache_config: KvCacheArgs
    enable_attention_dp: bool = False
    enable_chunked_prefill: bool = True
    enable_iter_perf_stats: bool = True
    skip_tokenizer_init: bool = True
    stream_interval: int = 1
    backend: str = "pytorch"


class _Executor:
    """`llm._executor`, as far as a worker looks: what killed the engine, or None."""

    def __init__(self) -> None:
        self._fatal_error: BaseException | None = None


class SimLLM:
    """One simulated engine. Owns its KV cache, not the transport, which must serve this engine only.

    `transport` None is an engine without `cache_transceiver_config`: disaggregated requests fail.
    `end_id` stands in for the tokenizer's EOS; None makes requests name their own.
    `kv_cache_blocks` None takes the profile's capacity. Raises `ValueError` naming a wrong argument.
    """

    def __init__(
        self,
        model: str,
        *,
        profile: TpProfile,
        transport: KvTransport | None = None,
        end_id: int | None = None,
        vocab_size: int = VOCAB_SIZE,
        max_batch_size: int = 256,
        max_num_tokens: int = 8192,
        max_seq_len: int = 131_072,
        tokens_per_block: int = 32,
        kv_cache_blocks: int | None = None,
        kv_block_bytes: int = 4096,
        time_scale: float = 1.0,
        transfer_bytes_per_s: float = 50e9,
        handoff_timeout_s: float = 60.0,
        node_id: int = 0,
        process_id: int = 0,
    ) -> None:
        positive = {
            "vocab_size": vocab_size,
            "max_batch_size": max_batch_size,
            "max_num_tokens": max_num_tokens,
            "max_seq_len": max_seq_len,
            "tokens_per_block": tokens_per_block,
            "handoff_timeout_s": handoff_timeout_s,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        if kv_block_bytes < 16 or kv_block_bytes % 16:
            raise ValueError(f"kv_block_bytes must be a positive multiple of 16: {kv_block_bytes}")
        if kv_cache_blocks is None:
            kv_cache_blocks = profile.kv_capacity_tokens // tokens_per_block
        self.llm_id = f"sim-{node_id}-{process_id}"
        self.tokenizer = None
        self.args = SimLlmArgs(
            model=model,
            tensor_parallel_size=profile.tensor_parallel_size,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            kv_cache_config=KvCacheArgs(tokens_per_block),
        )
        self._limits = EngineLimits(
            max_batch_size, max_num_tokens, tokens_per_block, vocab_size, kv_block_bytes
        )
        self._end_id = end_id
        self._has_transceiver = transport is not None
        self._stats = StatsQueue(
            StatsLimits(max_batch_size, max_num_tokens, kv_cache_blocks, tokens_per_block)
        )
        self._engine = SimEngine(
            self._limits,
            timing=EngineTiming(profile, time_scale, transfer_bytes_per_s),
            cache=SimKvCache(kv_cache_blocks, tokens_per_block),
            transport=transport,
            handoff_timeout_s=handoff_timeout_s,
            disagg_ids=DisaggIds(node_id, process_id),
            stats=self._stats,
        )
        self._executor: _Executor | None = _Executor()
        # TensorRT-LLM's client ids start at 2 too.
        self._last_id = 1

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: object | None = None,
        *,
        streaming: bool = False,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        scheduling_params: SchedulingParams | None = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        """Submit a request; needs a running loop. Its iterator raises `RequestError` when it fails.

        Raises at once: `ValueError` or `TypeError` on bad arguments, `NotImplementedError` on what is
        not simulated, `RuntimeError` when the engine is shut down or dead.
        """
        del trace_headers  # Accepted as in TensorRT-LLM; there is no tracer to give them to.
        if self._executor is None:
            raise RuntimeError("LLM is shutting down")
        if self._executor._fatal_error is not None:
            raise RuntimeError(f"executor died: {self._executor._fatal_error}")
        sampling = SamplingParams() if sampling_params is None else sampling_params
        check_arguments(
            sampling, lora_request=lora_request, scheduling=scheduling_params, priority=priority
        )
        sequence = checked_sequence(
            self._last_id + 1,
            inputs,
            sampling=sampling,
            params=disaggregated_params,
            streaming=streaming,
            cache_salt=cache_salt,
            model=self.args.model,
            max_seq_len=self.args.max_seq_len,
            end_id=self._end_id,
            limits=self._limits,
        )
        self._last_id += 1
        result = sequence.result
        result.on_abort(lambda: self._engine.abort(sequence))
        problem = enqueue_problem(
            sequence,
            max_seq_len=self.args.max_seq_len,
            capacity_tokens=self._engine.cache.total_blocks * self._limits.block_tokens,
            has_transceiver=self._has_transceiver,
        )
        if problem is None:
            self._engine.submit(sequence)
        else:
            sequence.done = True
            result.fail(RequestError(problem))
        return result

    @property
    def n_running(self) -> int:
        """Requests admitted and not finished."""
        return self._engine.n_running

    @property
    def n_queued(self) -> int:
        """Requests waiting for admission."""
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
    def used_blocks(self) -> int:
        """KV blocks that running requests and parked sessions refer to."""
        return self._engine.cache.used_blocks

    @property
    def kv_transfer_failures(self) -> int:
        """Handoffs that failed, for whatever reason."""
        return self._engine.kv_transfer_failures

    @property
    def kv_verify_failures(self) -> int:
        """Those of them whose bytes arrived whole and were not of the prompt."""
        return self._engine.kv_verify_failures

    def release_session(self, ctx_request_id: int) -> bool:
        """Drop a parked session and free its blocks; False when there is none of that id."""
        return self._engine.parked is not None and self._engine.parked.release(ctx_request_id)

    async def handoffs_collected(self) -> None:
        """Wait until no session is parked any more."""
        if self._engine.parked is not None:
            await self._engine.parked.none_left()

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        """Iterations not read yet, as dicts; ends when none comes for `timeout` seconds."""
        # TensorRT-LLM has no stats queue before the first request, so nothing is waited for.
        return IterationResult(self._stats, timeout_s=(timeout or 0) if self._last_id > 1 else 0)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Size of the KV cache."""
        blocks, block_tokens = self._engine.cache.total_blocks, self._limits.block_tokens
        return {
            "maxNumBlocks": blocks,
            "tokensPerBlock": block_tokens,
            "maxNumTokens": blocks * block_tokens,
        }

    def _check_health(self) -> bool:
        return self._executor is not None and self._executor._fatal_error is None

    def inject_fatal(self, error: BaseException) -> None:
        """Kill the engine as a fatal executor error does: every pending result raises `error`."""
        if self._executor is not None:
            self._executor._fatal_error = error
        self._engine.fail_all(error)

    def shutdown(self) -> None:
        """Stop; pending results raise `RuntimeError`. No-op the second time."""
        if self._executor is not None:
            self._executor = None
            self._engine.fail_all(RuntimeError("LLM was shut down"))
