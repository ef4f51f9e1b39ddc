"""Many clients with one long prompt, between worker processes whose KV cache has room for it once."""

from contextlib import ExitStack
from pathlib import Path

import anyio

from slagate.proto import openengine_pb2 as oe
from slagate.workers.legs import decode_leg, prefill_leg
from support.engine.tokens import expected, prompt
from support.gateway.processes import MODEL
from support.kv.chaos import Side, comes_to_rest, leg_of
from support.limits import HANG_S

N_CLIENTS = 40
N_TOKENS = 4
PROMPT_TOKENS = 30_000
"""938 blocks: without sharing, NIXL's pool of 16,384 slots would hold seventeen such prompts."""


def test_forty_clients_share_the_blocks_of_their_prompt_in_the_pool_too(tmp_path: Path) -> None:
    """All are parked before the first one is collected, and then all are collected at once."""
    options = ("--transport", "nixl", "--time-scale", "0", "--kv-blocks", "1000")
    tokens = prompt(PROMPT_TOKENS)
    wanted = expected(tokens, N_TOKENS)
    with ExitStack() as stack:
        prefill, decode = (Side(role, tmp_path, options) for role in ("prefill", "decode"))
        for side in (prefill, decode):
            stack.callback(side.close)
        requests = [
            oe.GenerateRequest(
                request_id=f"r{i}",
                model=MODEL,
                token_ids=oe.TokenIds(ids=tokens),
                stopping=oe.StoppingOptions(max_tokens=N_TOKENS, ignore_eos=True),
            ).SerializeToString()
            for i in range(N_CLIENTS)
        ]
        handoffs: dict[int, oe.KvSessionRef] = {}
        outputs: dict[int, list[int]] = {}

        async def park(i: int) -> None:
            leg = prefill_leg(requests[i], f"r{i}-p")
            sink = await leg_of(prefill.process, leg, limit_s=HANG_S)
            assert sink.events == ["prefill_ready"], sink.messages
            handoffs[i] = sink.messages[0].prefill_ready.kv_session

        async def collect(i: int) -> None:
            leg = decode_leg(requests[i], f"r{i}-d", session=handoffs[i], max_tokens=None)
            sink = await leg_of(decode.process, leg, limit_s=HANG_S)
            assert sink.events[-1] == "finished", sink.messages
            outputs[i] = sink.tokens

        async def run() -> None:
            for step in (park, collect):
                async with anyio.create_task_group() as tasks:
                    for i in range(N_CLIENTS):
                        tasks.start_soon(step, i)

        anyio.run(run)
        assert outputs == dict.fromkeys(range(N_CLIENTS), wanted)
        for side in (prefill, decode):
            comes_to_rest(side)
