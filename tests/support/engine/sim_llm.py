"""Simulated engines in virtual time, alone or as a prefill and decode pair, and what they must answer."""

import asyncio
import contextlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.profiles.profile import load_profile
from slagate.workers.runtime.virtual_loop import VirtualLoop
from slagate.workers.sim.api import NEWEST, sim_api
from slagate.workers.sim.args import SimSettings
from slagate.workers.sim.kv_cache.blocks import continuation
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.outputs import RequestOutput
from slagate.workers.sim.polls import IterationResult
from slagate.workers.sim.request import DisaggregatedParams, DisaggregatedParams12, RequestError

MODEL = "m"
VOCAB = 5000
END = 4999
PROFILE = load_profile("llama-3.1-8b-h100").tp(1)
CONTEXT_ONLY = DisaggregatedParams(request_type="context_only")


_SETTINGS = {field.name for field in fields(SimSettings)}


def llm(
    *,
    api: str = NEWEST,
    kv_cache_blocks: int | None = None,
    handoff_timeout_s: float = 60.0,
    tokens_per_block: int = 32,
    **changed: Any,
) -> SimLLM:
    """An engine of version `api`, without transport unless given one, with chunked prefill and stats.

    `changed` are fields of `SimSettings` or arguments of `SimLLM`; with a transport there is a transceiver.
    """
    settings: dict[str, Any] = {"profile": PROFILE, "vocab_size": VOCAB, "end_id": END}
    settings |= {"kv_block_bytes": 64}
    arguments: dict[str, Any] = {
        "max_batch_size": 256,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "disable_overlap_scheduler": True,  # early versions hand nothing off otherwise
        "kv_cache_config": {},
    }
    if "transport" in changed:
        timeout_ms = int(handoff_timeout_s * 1000)
        arguments["cache_transceiver_config"] = {
            "backend": "DEFAULT",
            "kv_transfer_timeout_ms": timeout_ms,
        }
    for name, value in changed.items():
        (settings if name in _SETTINGS else arguments)[name] = value
    cache = {"tokens_per_block": tokens_per_block, **arguments["kv_cache_config"]}
    if kv_cache_blocks is not None:
        cache["max_tokens"] = kv_cache_blocks * cache["tokens_per_block"]
    arguments["kv_cache_config"] = cache
    return sim_api(api).LLM(MODEL, sim=SimSettings(**settings), **arguments)


class Pair:
    """A prefill and a decode engine of version `api` on one shared-memory root.

    `changed` are arguments of `llm` for both.
    """

    def __init__(self, root: Path, *, api: str = NEWEST, **changed: Any) -> None:
        self.root = root
        self.api = sim_api(api)
        self.transports = [SharedMemoryTransport(root) for _ in range(2)]
        self.prefill = llm(api=api, transport=self.transports[0], **changed)
        self.decode = llm(api=api, transport=self.transports[1], **changed)

    async def hand_off(self, prompt: list[int], **sampling: Any) -> DisaggregatedParams12:
        """Run the prompt on the prefill engine; the params that the decode engine needs for it."""
        result = await self.prefill.generate_async(
            prompt,
            self.api.SamplingParams(**sampling),
            disaggregated_params=self.api.DisaggregatedParams(request_type="context_only"),
        )
        params = result.outputs[0].disaggregated_params
        assert params is not None
        return replace(params, request_type="generation_only")

    def resume(
        self, prompt: list[int], params: DisaggregatedParams12, **sampling: Any
    ) -> RequestOutput:
        """Submit the prompt to the decode engine with these params."""
        return self.decode.generate_async(
            prompt,
            self.api.SamplingParams(**sampling),
            streaming=True,
            disaggregated_params=params,
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


async def polled(result: IterationResult) -> list[Any]:
    """What a poll with a time limit of 0 brings."""
    items: list[Any] = []
    with contextlib.suppress(asyncio.QueueEmpty):
        async for item in result:
            items.append(item)
    return items
