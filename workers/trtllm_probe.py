"""The inference probe of a health check: one token, had for all who ask while it runs."""

import logging

import anyio
from anyio.abc import TaskGroup

from slagate.workers.trtllm_engine import Engine
from slagate.workers.trtllm_poll import Activity
from slagate.workers.trtllm_request import LOCAL

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
SALT = "slagate-health-check"
"""Keeps the probe's prompt apart: TensorRT-LLM uses the same one for its idle attention-DP ranks."""


class InferenceProbe:
    """Runs in the worker's task group, so that a caller may give up without ending it for the others."""

    def __init__(
        self, engine: Engine, activity: Activity, *, end_id: int, tasks: TaskGroup
    ) -> None:
        self._engine = engine
        self._activity = activity
        self._end_id = end_id
        self._tasks = tasks
        self._running: _Run | None = None

    async def __call__(self) -> str:
        """Why one token could not be had in `TIMEOUT_S`, or ""; shares the run that is on."""
        if self._running is None:
            self._running = _Run()
            self._tasks.start_soon(self._go, self._running)
        running = self._running
        await running.done.wait()
        return running.failure

    async def _go(self, running: "_Run") -> None:
        self._activity.started()
        try:
            with anyio.fail_after(TIMEOUT_S):
                await self._one_token()
            running.failure = ""
            self._activity.answered()
        except Exception as error:
            # Whatever the engine raises is a finding: the requests it runs decide whether it is dead.
            log.exception("probe.failed")
            running.failure = str(error) or type(error).__name__
        finally:
            self._activity.ended()
            self._running = None
            running.done.set()

    async def _one_token(self) -> None:
        """A full local run, which needs no peer in any role."""
        engine = self._engine
        result = engine.submit(
            [1],
            sampling_params=engine.sampling(end_id=self._end_id, max_tokens=1, detokenize=False),
            disaggregated_params=engine.disaggregated(request_type=LOCAL),
            cache_salt=SALT,
        )
        try:
            await result.aresult()
        except BaseException:
            # Nobody waits for it any more: left alone, every probe of an engine that hangs would queue.
            result.abort()
            raise


class _Run:
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.failure = "the worker is shutting down"
