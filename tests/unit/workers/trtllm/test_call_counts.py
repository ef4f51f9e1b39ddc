"""A request's way through the adapter, in Python calls: what is known of the engine costs it nothing."""

from collections.abc import Awaitable, Callable

from slagate.workers.runtime import virtual_loop
from slagate.workers.worker import Worker
from support.engine.sim_llm import prompt_of
from support.engine.workers import engine_worker, request
from support.gateway.call_counts import CallRecorder
from support.worker.contract import ask, hand_off, resume

NEWEST = {"aggregated": 97, "prefill": 67, "decode": 120, "further_token": 6}
"""Of a request of 8 tokens, and of each further one. When each token had messages made for it, and a turn
of the loop: 127, 67, 150 and 10. Before the adapter was held against TensorRT-LLM: 131, 71, 152 and 10."""

MARGIN = 0.05

ELSEWHERE = ("/sim/", "/kv_events/", "/runtime/", "/trtllm/poll.py", "/trtllm/events.py")
"""Not the request's own: the engine, and what is polled meanwhile."""


async def calls(leg: Callable[[int], Awaitable[object]]) -> int:
    """Calls for the third of three legs, which are told their number."""
    for i in range(2):
        await leg(i)
    recorder = CallRecorder()
    with recorder.on():
        await leg(2)
    files = [code.co_filename for code in recorder.codes]
    return sum("/workers/" in file and not any(e in file for e in ELSEWHERE) for file in files)


async def aggregated(worker: Worker, n_tokens: int) -> int:
    return await calls(
        lambda i: ask(worker, request(f"{n_tokens}-{i}", prompt_of(64, i), n_tokens))
    )


async def count() -> dict[str, int]:
    async with (
        engine_worker("agg") as agg,
        engine_worker("prefill") as prefill,
        engine_worker("decode") as decode,
    ):
        legs = [request(f"d{i}", prompt_of(64, 10 + i)) for i in range(3)]
        sessions = {}

        async def prefilled(i: int) -> None:
            sessions[i] = await hand_off(prefill.worker, legs[i], leg_id=f"p{i}")

        few, many = [await aggregated(agg.worker, n_tokens) for n_tokens in (8, 108)]
        return {
            "aggregated": few,
            "prefill": await calls(prefilled),
            "decode": await calls(
                lambda i: resume(decode.worker, legs[i], sessions[i], leg_id=f"r{i}")
            ),
            "further_token": round((many - few) / 100),
        }


def test_a_request_passes_as_many_functions_of_the_adapter_as_it_did() -> None:
    counted = virtual_loop.run(count)
    for name, newest in NEWEST.items():
        # Fewer by more are a figure that is not the newest any more.
        assert abs(counted[name] - newest) <= MARGIN * newest, counted
