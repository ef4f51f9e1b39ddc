"""From a client's cancel, or its deadline, to a worker that is free again; beside it, without the gateway.

The worker is asked for its running requests as fast as it answers, so a figure includes one such call.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from bench.figures import figures, ratio
from slagate.proto import openengine_pb2 as oe
from slagate.proto import openengine_pb2_grpc as oe_grpc
from slagate.workers.legs import prefill_leg
from support.gateway.processes import MODEL, Cluster, Pool, cluster

ROUNDS = 25

BOUND_MS = 1000.0
"""What users of such gateways count as "at once" when they leave."""

DEADLINE_S = 0.3

LONG_PROMPT = list(range(60_000))


def measure(folder: Path) -> dict[str, Any]:
    """Cancel in prefill and in decode."""
    pools = {"prefill": Pool("prefill"), "decode": Pool("decode"), "agg": Pool("agg")}
    result: dict[str, Any] = {"rounds": ROUNDS, "bound_ms": BOUND_MS, "missed": []}
    disagg = {name: pools[name] for name in ("prefill", "decode")}
    (folder / "agg").mkdir()
    with (
        cluster(folder, disagg) as fleet,
        cluster(folder / "agg", {"agg": pools["agg"]}) as single,
    ):
        for stage, prompt, n_messages in (("prefill", LONG_PROMPT, 0), ("decode", [1, 2, 3], 3)):
            # Straight to a decode worker would need a handoff; an aggregated one decodes the same way.
            straight_to = (
                fleet.addresses("prefill") if stage == "prefill" else single.addresses("agg")
            )
            watched = {"gateway": fleet.addresses(stage)[0], "direct": straight_to[0]}
            entry = {"gateway": fleet.gateway.address, "direct": straight_to[0]}
            for what, timeout_s in (("cancel", None), ("deadline", DEADLINE_S)):
                seconds: dict[str, list[float]] = {"gateway": [], "direct": []}
                for number in range(ROUNDS):
                    for way in ("gateway", "direct"):
                        data = _request(f"{what}-{number}", prompt)
                        if way == "direct" and stage == "prefill":
                            data = prefill_leg(data, f"{what}-{number}")
                        took_s = _one(entry[way], watched[way], data, n_messages, timeout_s)
                        seconds[way].append(took_s)
                _wait_idle(fleet)
                name = f"{what} in {stage}"
                result[name] = figures("gateway", seconds["gateway"])
                result[name] |= figures("direct", seconds["direct"])
                result[name]["ratio"] = ratio(seconds["gateway"], seconds["direct"])
                if result[name]["gateway_ms"] > BOUND_MS:
                    result["missed"].append(f"{name}: over {BOUND_MS} ms")
    return result


def _request(request_id: str, prompt: list[int]) -> bytes:
    return oe.GenerateRequest(
        request_id=request_id,
        model=MODEL,
        token_ids=oe.TokenIds(ids=prompt),
        stopping=oe.StoppingOptions(max_tokens=20_000, ignore_eos=True),
    ).SerializeToString()


def _one(address: str, worker: str, data: bytes, n_messages: int, timeout_s: float | None) -> float:
    """Seconds from the cancel, or the client's end by deadline, until the worker runs nothing."""
    with grpc.insecure_channel(address) as channel, grpc.insecure_channel(worker) as control:
        running = _running(control)
        call = channel.unary_stream("/openengine.v1.Inference/Generate")(data, timeout=timeout_s)
        for _ in range(n_messages):
            next(call)
        _until(lambda: running() == 1)
        if timeout_s is None:
            started_s = time.perf_counter()
            call.cancel()
        else:
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    pass
            started_s = time.perf_counter()
        _until(lambda: running() == 0)
        return time.perf_counter() - started_s


def _running(channel: grpc.Channel) -> Callable[[], int]:
    stub = oe_grpc.ControlStub(channel)
    return lambda: int(stub.GetLoad(oe.GetLoadRequest(), timeout=10).running_requests)


def _until(holds: Callable[[], bool]) -> None:
    deadline_s = time.perf_counter() + 30
    while not holds():
        if time.perf_counter() > deadline_s:
            raise SystemExit("the worker did not get there within 30 s")


def _wait_idle(fleet: Cluster) -> None:
    _until(fleet.gateway.is_idle)
