"""An engine's result as TensorRT-LLM gives it, without an engine."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any


class Result:
    """A result that is there at once. `tokens` may be what no engine gives, to break who reads them."""

    def __init__(
        self,
        *,
        ctx_request_id: int | None = None,
        tokens: list[Any],
        finish_reason: str | None = "length",
        stop_reason: int | str | None = None,
    ) -> None:
        self.params = SimpleNamespace(
            ctx_request_id=ctx_request_id,
            opaque_state=b"state",
            first_gen_tokens=tokens,
            draft_tokens=None,
            disagg_request_id=None,
            ctx_dp_rank=None,
            ctx_info_endpoint=None,
        )
        self.outputs = [self.output(tokens, finish_reason, stop_reason=stop_reason)]
        self.cached_tokens = 0
        self.n_aborts = 0

    def output(
        self,
        tokens: list[Any],
        finish_reason: str | None = None,
        *,
        stop_reason: int | str | None = None,
    ) -> SimpleNamespace:
        """One `CompletionOutput`."""
        return SimpleNamespace(
            token_ids=tokens,
            text="",
            logprobs=[],
            prompt_logprobs=[],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            disaggregated_params=self.params,
        )

    def abort(self) -> None:
        self.n_aborts += 1

    async def __aiter__(self) -> AsyncIterator["Result"]:
        yield self
