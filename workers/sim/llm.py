"""`SimLLM`: a double of `tensorrt_llm.LLM` that needs no GPU and gives checkable tokens.

Calls, result objects, errors and order of events are those of the PyTorch backend, for text models. Times
come from a measured profile. The token after a context is a function of that context
(`kv_cache/blocks.py`), so sampling settings other than stopping do not change the output, and `min_tokens`
lets the end of text pass instead of drawing another token. `api` has the versions of TensorRT-LLM.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

from slagate.workers.sim.args import LACKS, SimSettings, parse_args
from slagate.workers.sim.build import build_engine
from slagate.workers.sim.kv_cache.events import Arrivals
from slagate.workers.sim.outputs import RequestOutput
from slagate.workers.sim.polls import IterationResult, PolledSource
from slagate.workers.sim.request import ApiTraits, EngineDeadError, RequestError
from slagate.workers.sim.submit import RequestChecker, Submission
from slagate.workers.sim.tokenizer import SimTokenizer, SimVocabulary

log = logging.getLogger(__name__)

# An executor that hands KV cache events over in batches puts this many at most into one.
_BATCH_EVENTS = 256


_MONITOR_S = 5.0
"""How often a thread of newer engines looks for processes that have died (proxy.py @0ae93999)."""


class SimExecutor:
    """`llm._executor`: the part of it that a worker uses, and what it knows of the engine's process.

    A process that quits ends the one future in `mpi_futures`, with the error, and the error is kept for the
    next submission. Before 1.3 nothing else tells of it: pending results never come (executor/proxy.py id
    3493716097 `mpi_done_callback`, executor/executor.py id 697825693 `_handle_background_error`). Since 1.3
    `check_health` looks for it, and a thread every 5 s, and `_fatal_error` is set (proxy.py @0ae93999
    `_check_mpi_futures`, `_error_monitor_loop`). The newest raises `EngineDeadError` out of results and
    submissions besides (unit tests id 55080434933).
    """

    _fatal_error: BaseException | None
    """Absent before 1.3."""

    def __init__(self, traits: ApiTraits) -> None:
        self._traits = traits
        if traits.polled_by_call:
            self.rpc_client = object()  # only its presence is asked for
        if traits.flags_death:
            self._fatal_error = None
        self.doing_shutdown = False
        self.mpi_futures: list[Future[None]] = [Future()]
        self._error: Exception | None = None  # not raised yet
        self._results: weakref.WeakValueDictionary[int, RequestOutput] = (
            weakref.WeakValueDictionary()
        )

    def is_shutdown(self) -> bool:
        """Whether it takes no request any more, as far as it has noticed."""
        return self.doing_shutdown or getattr(self, "_fatal_error", None) is not None

    def check_health(self) -> bool:
        """Whether it takes requests. Looks for a process that has died."""
        self._look_for_death()
        return not self.is_shutdown()

    def mark_dead(self, error: BaseException) -> None:
        """Take no request any more, because of an error that somebody has met."""
        self.doing_shutdown = True
        if self._traits.flags_death and self._fatal_error is None:
            self._fatal_error = error

    def mpi_worker_quit(self, error: Exception) -> None:
        """The engine's process has ended, with this error; needs a running loop."""
        self._error = error
        self.mpi_futures[0].set_exception(error)
        if self._traits.flags_death:
            asyncio.get_running_loop().call_later(_MONITOR_S, self._look_for_death)

    def thread_ended(self, error: Exception) -> None:
        """A thread of the engine's process has ended with this error, which the next submission raises."""
        self._error = error

    def raise_error(self) -> None:
        """Raise what the process died of, once; in the newest version `EngineDeadError`, always."""
        error = self._error
        if error is None:
            return
        if self._traits.tells_death:
            raise EngineDeadError(error)
        self._error = None
        self.mark_dead(error)
        raise error

    def abort_request(self, client_id: int) -> None:
        """Cancel a request by its id; an unknown or finished one is only logged."""
        result = self._results.get(client_id)
        if result is None or not result.runs():
            log.warning("request.abort_unknown", extra={"client_id": client_id})
        else:
            result.cancel()

    def _look_for_death(self) -> None:
        (process,) = self.mpi_futures
        if process.done():
            error = process.exception()
            assert error is not None, "it ends with an error only"
            self.mark_dead(error)


def _model_configs(sim: SimSettings) -> tuple[Any, Any]:
    """The model's configuration and its generation's, of which engines keep what `transformers` reads."""
    model = SimpleNamespace(
        max_position_embeddings=sim.model_max_seq_len, vocab_size=sim.vocab_size
    )
    return model, SimpleNamespace(eos_token_id=list(sim.model_end_ids))


class SimLLM:
    """One simulated engine. Owns its KV cache, not the transport, which must serve this engine only.

    The arguments are TensorRT-LLM's (`args`); `sim` has what a real engine has no argument for. A subclass
    gives the version's `generate_async` and `traits`. What the engine works out for itself does not come
    back into `args`: `max_seq_len` stays None unless it was given (llm_args.py id 55143598664). The model's
    own limit is in `_hf_model_config` (llm.py id 55216765702, `_TorchLLM._build_model`).

    The part below `shutdown` is beyond TensorRT-LLM's surface: what tests and a worker may ask of the
    engine, or do to it. Raises `ValueError` naming a wrong argument, `RuntimeError` when there are not
    enough GPUs, and `sim.fail_init` if that is set.
    """

    traits: ClassVar[ApiTraits]
    generate_async: Callable[..., RequestOutput]

    def __init__(
        self,
        model: object,
        tokenizer: object = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,  # noqa: FBT001, FBT002
        trust_remote_code: bool = False,  # noqa: FBT001, FBT002
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        *,
        sim: SimSettings,
        **kwargs: Any,
    ) -> None:
        args = parse_args(
            model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            lacks=LACKS[self.traits.version],
            **kwargs,
        )
        if args.world_size > sim.n_gpus:
            raise RuntimeError(f"{args.world_size} GPUs are needed, this node has {sim.n_gpus}")
        if sim.pause is not None:
            sim.pause(sim.init_s)
        if sim.fail_init is not None:
            raise sim.fail_init
        max_seq_len = args.max_seq_len or sim.model_max_seq_len
        self.llm_id = f"sim-{sim.node_id}-{sim.process_id}"
        self.args = args
        self._hf_model_config, self._generation_config = _model_configs(sim)
        self.tokenizer: SimTokenizer | None = None
        if not skip_tokenizer_init:
            self.tokenizer = SimTokenizer(
                SimVocabulary(vocab_size=sim.vocab_size, eos_token_id=sim.tokenizer_end_id)
            )
        self._engine = build_engine(args, sim, traits=self.traits, max_seq_len=max_seq_len)
        self._engine.on_fatal = self.inject_fatal
        self._ranks = self._engine.ranks
        self._block_tokens = args.kv_cache_config.tokens_per_block
        self._checker = RequestChecker(
            args,
            settings=sim,
            traits=self.traits,
            tokenizer=self.tokenizer,
            max_seq_len=max_seq_len,
            capacity_tokens=self._ranks[0].cache.total_blocks * self._block_tokens,
            generation_config=self._generation_config,
        )
        self._stats = self._polled(self._engine.stats.take_row, self._engine.stats.arrivals, sim)
        self._kv_events = self._polled_events(sim)
        self._executor: SimExecutor | None = SimExecutor(self.traits)
        self._last_id = 1  # TensorRT-LLM's client ids start at 2 too

    def __enter__(self) -> "SimLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise RuntimeError("an LLM cannot be pickled")

    def _submit(self, submission: Submission) -> RequestOutput:
        """Check and submit a request, for every version's `generate_async`; needs a running loop.

        Raises at once: `ValueError` or `TypeError` on bad arguments, `NotImplementedError` on what is
        not simulated, `RuntimeError` when the engine is shut down or dead, and `SimExecutor.raise_error`'s.
        """
        executor = self._executor
        if executor is None or executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        sequences = self._checker.checked_request(self._last_id + 1, submission)
        executor.raise_error()
        self._last_id += 1
        self._stats.request_came()
        self._kv_events.request_came()
        result = sequences[0].feed.result
        executor._results[self._last_id] = result
        fatal = self._checker.fatal_problem(sequences[0])
        if fatal is not None:
            # Its process finds that later, when it has got the request.
            asyncio.get_running_loop().call_soon(self.inject_death, fatal, result)
            return result
        problem = self._checker.enqueue_problem(sequences[0])
        if problem is not None:
            result.fail(RequestError(problem))
            return result

        def cancel() -> None:
            for sequence in sequences:
                self._engine.abort(sequence)

        result.cancel = cancel
        result.executor = weakref.ref(self._executor)
        for sequence in sequences:
            self._engine.submit(sequence)
        return result

    def generate(
        self, inputs: Any, sampling_params: Any = None, *, use_tqdm: bool = True, **arguments: Any
    ) -> Any:
        """Run one prompt, or a list of prompts, on a loop of its own and return the finished results.

        Every argument may be a list with one item a prompt. Raises `RuntimeError` on a running loop, which
        it would block, and otherwise as `generate_async` and its result.
        """
        del use_tqdm
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("generate would block the running loop; use generate_async")
        one = not (isinstance(inputs, list) and inputs) or isinstance(inputs[0], int)
        prompts: Sequence[Any] = [inputs] if one else inputs
        given = {"sampling_params": sampling_params, **arguments}

        async def run() -> list[RequestOutput]:
            results = [
                self.generate_async(
                    prompt,
                    **{
                        name: value[i] if isinstance(value, list) else value
                        for name, value in given.items()
                    },
                )
                for i, prompt in enumerate(prompts)
            ]
            return [await result for result in results]

        results = asyncio.run(run())
        return results[0] if one else results

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        """Iterations not read yet, as dicts; there are none before the first request of a queue."""
        return self._stats.poll_async(timeout)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Iterations not read yet."""
        return self._stats.poll(timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        """KV cache events not read yet; where they come through a queue, in lists.

        Raises `AssertionError` before the first request where there is a queue (executor/executor.py
        @ed53795b `aget_kv_events`).
        """
        assert self._kv_events.is_set_up, "there are no KV cache events before the first request"
        return self._kv_events.poll_async(timeout)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[Any]:
        """KV cache events not read yet. Raises as `get_kv_cache_events_async`."""
        assert self._kv_events.is_set_up, "there are no KV cache events before the first request"
        return self._kv_events.poll(timeout)

    def _polled(
        self, take: Callable[[], Any | None], arrivals: Arrivals, sim: SimSettings
    ) -> PolledSource:
        return PolledSource(take, arrivals, by_call=self.traits.polled_by_call, pause=sim.pause)

    def _polled_events(self, sim: SimSettings) -> PolledSource:
        events = self._engine.events
        if not self.traits.polled_by_call:
            events.on_dispatch_error = self._dispatch_ended
        return self._polled(self._next_events, events.arrivals, sim)

    def _dispatch_ended(self, error: Exception) -> None:
        if self._executor is not None:
            self._executor.thread_ended(error)

    def _next_events(self) -> Any | None:
        """The next item of a poll: a list in versions with a queue, else one event."""
        if self.traits.polled_by_call:
            return next(iter(self._engine.events.take_events(1)), None)
        return self._engine.events.take_events(_BATCH_EVENTS) or None

    def shutdown(self) -> None:
        """Stop; pending results raise `RuntimeError`. No-op the second time."""
        if self._executor is not None:
            self._executor = None
            self._engine.fail_all(RuntimeError("LLM was shut down"))

    @property
    def n_running(self) -> int:
        """Sequences admitted and not finished."""
        return self._engine.group.n_running

    @property
    def n_queued(self) -> int:
        """Sequences waiting for admission."""
        return len(self._engine.group.waiting)

    @property
    def is_computing(self) -> bool:
        """Whether an iteration runs."""
        return self._engine.iteration is not None

    @property
    def n_waiting(self) -> int:
        """Sequences that could be computed and are not: queued ones, and prompts that wait for their turn.

        One whose KV cache still arrives is none of them.
        """
        iteration, group = self._engine.iteration, self._engine.group
        n_chunks = 0 if iteration is None else sum([len(step.chunks) for step in iteration.steps])
        return len(group.waiting) + sum([rank.n_prefilling for rank in group.ranks]) - n_chunks

    @property
    def n_parked(self) -> int:
        """Prefilled sessions whose blocks wait for decode."""
        return 0 if self._engine.parked is None else len(self._engine.parked)

    @property
    def n_expired(self) -> int:
        """Parked sessions that no decode worker fetched in time."""
        return 0 if self._engine.parked is None else self._engine.parked.n_expired

    @property
    def n_unsafe_aborts(self) -> int:
        """Requests aborted while another worker could still write their blocks."""
        return self._engine.n_unsafe_aborts

    @property
    def used_blocks(self) -> int:
        """KV blocks that running requests and parked sessions refer to, on all ranks."""
        return sum(rank.cache.used_blocks for rank in self._ranks)

    @property
    def kv_transfer_failures(self) -> int:
        """Handoffs that failed, for whatever reason."""
        return self._engine.kv_transfer_failures

    @property
    def kv_verify_failures(self) -> int:
        """Failed handoffs whose bytes arrived whole and were not of the prompt."""
        return 0 if self._engine.pulls is None else self._engine.pulls.n_mismatches

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

    def inject_fatal(self, error: BaseException) -> None:
        """Kill the engine as an error of a thread of this process does: every pending result raises it."""
        if self._executor is not None:
            self._executor.mark_dead(error)
        self._engine.fail_all(error)

    def inject_death(self, error: Exception, culprit: RequestOutput | None = None) -> None:
        """End the engine's process with this error; `culprit` is the result of the request that did it.

        Who learns of it, and when, depends on the version: see `SimExecutor`.
        """
        if self._executor is None or self._executor.mpi_futures[0].done():
            return
        self._executor.mpi_worker_quit(error)
        death = EngineDeadError(error) if self.traits.tells_death else None
        self._engine.fail_all(death)
        if culprit is not None and death is not None:
            culprit.fail(death)
