"""Requests that a worker makes itself: the warm-up before it is ready, and the probe of health checks."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from slagate.workers.legs import LOCAL
from slagate.workers.trtllm.engine import Engine, abort
from slagate.workers.trtllm.poll import Activity

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
SALT = "slagate-health-check"
"""The cache salt of these prompts, which TensorRT-LLM also uses for its idle attention-DP ranks."""

FIRST = 1.0
"""The priority of a probe, which passes the queue: it asks whether the engine works."""


class InferenceProbe:
    """Has the engine generate one token; callers that come while a probe runs share its result.

    A probe runs in the worker's task group, so that a caller who is cancelled does not end it for others.
    """

    def __init__(
        self,
        engine: Engine,
        activity: Activity,
        end_id: int,
        *,
        tasks: TaskGroup,
        on_fatal: Callable[[Exception], None],
    ) -> None:
        """`on_fatal` gets an error that means that the engine is dead."""
        self._engine = engine
        self._on_fatal = on_fatal
        self._activity = activity
        self._end_id = end_id
        self._tasks = tasks
        self._running: asyncio.Future[str] | None = None

    async def __call__(self) -> str:
        """Why the engine did not generate a token within `TIMEOUT_S`, or ""."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_future()
            self._tasks.start_soon(self._run, self._running)
        return await asyncio.shield(self._running)

    async def warm_up(self, limit_s: float) -> str:
        """Generate a quarter of a block from half a block of prompt on each rank. Why that failed, or "".

        The engine makes its last preparations during its first requests, which must not be clients'. What
        is shorter than a block does not appear in KV events. A window or step that is shorter takes the
        block's place.
        """
        engine = self._engine
        limits = (engine.block_tokens, engine.window_tokens, engine.max_prompt_tokens)
        size = min(limit for limit in limits if limit)
        ranks: list[int | None] = [None]
        if engine.n_ranks > 1 and engine.takes("scheduling_params"):
            ranks = list(range(engine.n_ranks))
        for rank in ranks:
            failure = await self._attempt(
                max(1, size // 2), max(1, size // 4), rank=rank, limit_s=limit_s
            )
            if failure:
                return failure if rank is None else f"rank {rank}: {failure}"
        return ""

    async def _run(self, answer: asyncio.Future[str]) -> None:
        failure = "the worker is shutting down"
        try:
            failure = await self._attempt(1, 1, rank=None, limit_s=TIMEOUT_S)
        finally:
            self._running = None
            answer.set_result(failure)

    async def _attempt(
        self, n_prompt: int, max_tokens: int, *, rank: int | None, limit_s: float
    ) -> str:
        self._activity.request_started()
        try:
            with anyio.fail_after(limit_s):
                await self._generate(n_prompt, max_tokens, rank)
            self._activity.result_came()
        except TimeoutError:
            log.error("probe.timeout", extra={"limit_s": limit_s})
            return f"no answer in {limit_s:g} s"
        except Exception as error:
            log.exception("probe.failed")
            if self._engine.is_dead_by(error):
                self._on_fatal(error)
            return str(error) or type(error).__name__
        finally:
            self._activity.request_ended()
        return ""

    async def _generate(self, n_prompt: int, max_tokens: int, rank: int | None) -> None:
        """Run a request from prompt to output, which needs no other worker. Raises if no token comes."""
        engine = self._engine
        scheduling: Any = None
        if rank is not None:
            scheduling = engine.api.SchedulingParams(
                attention_dp_rank=rank, attention_dp_relax=False
            )
        result = engine.submit(
            [engine.probe_token] * n_prompt,
            sampling_params=engine.sampling(
                end_id=self._end_id,
                max_tokens=max_tokens,
                min_tokens=0,
                temperature=0.0,
                top_p=1.0,
                top_k=1,
                ignore_eos=True,
                detokenize=False,
            ),
            disaggregated_params=engine.disaggregated(request_type=LOCAL),
            cache_salt=SALT,
            scheduling_params=scheduling,
            priority=FIRST,
        )
        try:
            await result.aresult()
        except BaseException:
            # Else the probes of an engine that hangs would queue up in it.
            abort(result)
            raise
        if not result.outputs[0].token_ids:
            raise engine.api.RequestError("the engine answered without a token")
