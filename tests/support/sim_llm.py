"""Simulated engines in virtual time, alone or as a prefill and decode pair, and what they must answer."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slagate.workers.kv_transfer import SharedMemoryTransport
from slagate.workers.profile import load_profile
from slagate.workers.sim_kv_cache import continuation
from slagate.workers.sim_llm import SimLLM
from slagate.workers.sim_request import (
    DisaggregatedParams,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from support.virtual_loop import VirtualLoop

MODEL = "m"
VOCAB = 5000
END = 4999
PROFILE = load_profile("llama-3.1-8b-h100").tp(1)
CONTEXT_ONLY = DisaggregatedParams(request_type="context_only")


def llm(**changed: Any) -> SimLLM:
    """An engine without transport unless given one; `changed` are arguments of `SimLLM`."""
    settings = {"profile": PROFILE, "vocab_size": VOCAB, "end_id": END, "kv_block_bytes": 64}
    return SimLLM(MODEL, **{**settings, **changed})


class Pair:
    """A prefill and a decode engine on one shared-memory root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.transports = [SharedMemoryTransport(root) for _ in range(2)]
        self.prefill = llm(transport=self.transports[0])
        self.decode = llm(transport=self.transports[1])

    async def hand_off(self, prompt: list[int], **sampling: Any) -> DisaggregatedParams:
        """Run the prompt on the prefill engine; the params that the decode engine needs for it."""
        result = await self.prefill.generate_async(
            prompt, SamplingParams(**sampling), disaggregated_params=CONTEXT_ONLY
        )
        params = result.outputs[0].disaggregated_params
        assert params is not None
        return replace(params, request_type="generation_only")

    def resume(
        self, prompt: list[int], params: DisaggregatedParams, **sampling: Any
    ) -> RequestOutput:
        """Submit the prompt to the decode engine with these params."""
        return self.decode.generate_async(
            prompt, SamplingParams(**sampling), streaming=True, disaggregated_params=params
        )

    async def refused(self, prompt: list[int], params: DisaggregatedParams) -> str:
        """Why the decode engine refuses this handoff, as it must; it keeps nothing of it."""
        with pytest.raises(RequestError) as caught:
            await self.resume(prompt, params)
        assert self.decode.used_blocks == 0
        assert self.decode.n_running == 0
        return str(caught.value)

    async def blocks_come_back(self) -> None:
        """Wait until the prefill engine has noticed every pull."""
        while self.prefill.n_parked:
            await until(asyncio.get_running_loop().time() + 0.05)


def prompt_of(n: int, first: int = 1) -> list[int]:
    """`n` token ids; prompts of different `first` share no prefix."""
    return [(first * 7919 + i * 31) % VOCAB for i in range(n)]


def expected(prompt: list[int], n: int, salt: str = "") -> list[int]:
    """The first `n` tokens that any right stream has after the prompt."""
    return continuation(prompt, n, model=MODEL, block_tokens=32, vocab_size=VOCAB, cache_salt=salt)


async def until(time_s: float) -> None:
    """Wait for a point in virtual time."""
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    loop.call_at(time_s, reached.set_result, None)
    await reached


def virtual_loop() -> VirtualLoop:
    """The loop that this runs on."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def n_timers() -> int:
    """Timers pending on this loop."""
    return virtual_loop().n_timers


async def tokens_of(result: RequestOutput) -> list[int]:
    """Every token of a request, once it is done."""
    await result.aresult()
    return result.outputs[0].token_ids
