"""Small things to start a test from: fleets, members, views, requests, handoffs."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slagate.pools.estimator.estimator import Estimator
from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Pool, PoolSnapshot
from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.pools.grid.grid import Axis, Stage, StageGrid
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import RowView, State
from slagate.pools.inflight.table import UNLIMITED, LoadTable, rows_of
from slagate.pools.inflight.worker_rows import Limits
from slagate.pools.prefix.match import cached_of
from slagate.pools.prefix.overlap import Prompt
from slagate.proto import openengine_pb2 as oe
from slagate.router.request.errors import GatewayError
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.policy import StageChoice
from slagate.router.scheduling.score import RoutingRequest
from slagate.router.scheduling.wait_queue import Assignment
from slagate.workers.profiles.profile import load_profile

MODEL = "llama"
PROFILE = "llama-3.1-8b-h100"
STAGE_NAMES = {"disagg": ("prefill", "decode"), "agg": ("agg",)}


def model_info(
    name: str = MODEL, *, window: int | None = None, priority: bool = False
) -> oe.ModelInfo:
    """One served model; `window` is its context length in tokens."""
    info = oe.ModelInfo(model_id=name, served_model_name=name)
    info.generation.supports_priority = priority
    if window is not None:
        info.max_context_length = window
    return info


def member(
    address: str = "w1:1",
    *,
    stage: Stage = Stage.PREFILL,
    pool: str = "pool",
    ready: bool = True,
    models: Sequence[str] = (MODEL,),
    backend: str = "nixl",
    max_inflight: int | None = None,
) -> Member:
    """One worker's record, ready to take work unless told otherwise."""
    limits = Limits(max_inflight=max_inflight)
    made = Member(address, pool=pool, stage=stage, table=LoadTable(), limits=limits)
    made.set_models({name: model_info(name) for name in models})
    made.set_server_info(oe.ServerInfo(kv_connector=oe.KvConnectorInfo(transfer_backend=backend)))
    if ready:
        made.probe_ok()
    return made


def view(
    address: str = "w1:1",
    *,
    state: State = State.READY,
    inflight: int = 0,
    max_inflight: int = UNLIMITED,
    models: Iterable[str] = (MODEL,),
    **figures: Any,
) -> RowView:
    """A worker as the policy sees it; idle unless told otherwise. `figures` are fields of `RowView`."""
    idle: dict[str, Any] = {
        "rank": None,
        "suspect": False,
        "worker_inflight": inflight,
        "queued_tokens": 0,
        "max_queued_tokens": UNLIMITED,
        "queued_s": 0.0,
        "context_tokens": 0,
        "capacity_tokens": UNLIMITED,
        "foreign_requests": 0,
        "foreign_s": 0.0,
        "pace": 1.0,
        "itl_limit_s": math.inf,
        "stall_room_s": math.inf,
        "join_slack_s": math.inf,
        "join_quiet_s": math.inf,
        "join_tokens": 0,
        "last_chosen": 0,
        "takes_whole": 0,
    }
    return RowView(
        address=address,
        state=state,
        inflight=inflight,
        max_inflight=max_inflight,
        models=frozenset(models),
        **idle | figures,
    )


def pool_view(
    name: str, views: Iterable[RowView], *, speed: Estimator | None = None, n_leases: int = 0
) -> PoolSnapshot:
    """A pool of these workers."""
    found = list(views)
    device, host = (
        np.array([getattr(each, field) for each in found], dtype=np.int64)
        for field in ("device_tokens", "host_tokens")
    )
    speed = speed or Estimator()
    return PoolSnapshot(
        name, speed.frozen, rows_of(found), cached_of(device, device + host), n_leases
    )


def profiled() -> Estimator:
    """The estimator over real measurements that is packaged with slagate."""
    return Estimator(load_profile(PROFILE).tp(1), source=PROFILE)


def one_cell(stage: Stage, *names: str, retry: bool = False) -> StageGrid:
    """A grid of one cell, which is the last pool; the pools before it are faster ones."""
    field = "ttft_ms" if stage is Stage.PREFILL else "itl_ms"
    return StageGrid(
        axes=(Axis("isl", 0, 1000, 1), Axis(field, 0, 100, 1)),
        cells=((len(names) - 1,),),
        pool_names=names,
        priorities=tuple(range(len(names))),
        retry=retry,
    )


def ask(
    *, isl_tokens: int = 100, model: str = MODEL, sla: Sla | None = None, **more: Any
) -> RoutingRequest:
    return RoutingRequest(model, isl_tokens, sla or Sla(), **more)


def config(
    mode: str = "disagg", pools: Mapping[str, Mapping[str, Any]] | None = None, **more: Any
) -> FleetConfig:
    """A fleet with one pool a stage, named as the stage is; `pools` adds to a pool's entry.

    The workers are p1:1 and p2:1, d1:1 and d2:1, or a1:1 and a2:1.
    """
    content: dict[str, Any] = {"mode": mode, "pools": {}, **more}
    low_high = {"ttft_min_ms": 100, "ttft_max_ms": 900, "itl_min_ms": 5, "itl_max_ms": 45}
    axes = {"prefill": ("isl", "ttft"), "decode": ("context_length", "itl"), "agg": ("ttft", "itl")}
    for stage in STAGE_NAMES[mode]:
        content[f"num_{stage}_pools"] = 1
        content[f"{stage}_pools"] = [stage]
        strategy: dict[str, Any] = {f"{stage}_pool_mapping": [[0]]}
        for axis in axes[stage]:
            strategy[f"{axis}_resolution"] = 1
            if axis in ("isl", "context_length"):
                strategy |= {f"{axis}_min": 0, f"{axis}_max": 8000}
            strategy |= {k: v for k, v in low_high.items() if k.startswith(f"{axis}_m")}
        content[f"{stage}_pool_selection_strategy"] = strategy
        workers = [f"{stage[0]}1:1", f"{stage[0]}2:1"]
        content["pools"][stage] = {"workers": workers, **(pools or {}).get(stage, {})}
    return parse_config(content, source="fleet.json", serving=True)


def fleet(mode: str = "disagg", *, ready: bool = True, **more: Any) -> Fleet:
    """The fleet of `config(mode, ...)`, every worker ready and serving `MODEL` unless told otherwise."""
    made = Fleet(prepare(config(mode, **more)))
    for each in made.members():
        if ready:
            each.set_models({MODEL: model_info()})
            each.probe_ok()
    return made


def put_in(member: Member, state: State) -> None:
    """A member in another state of health, however it came to that."""
    member.health.state = state
    member._show_state()


def pool(*addresses: str, stage: Stage = Stage.AGG, max_inflight: int | None = None) -> Pool:
    limits = Limits(max_inflight=max_inflight)
    made = Pool("pool", stage=stage, index=0, estimator=Estimator(), limits=limits)
    for address in addresses:
        made.join(address)
    for each in made.members.values():
        each.set_models({MODEL: model_info()})
        each.probe_ok()
    return made


def work_of(choice: StageChoice) -> Work:
    """What the request puts on the row that was chosen."""
    assert choice.row is not None
    return choice.won.work(choice.row)


def take_now(
    dispatcher: Dispatcher, asked: RoutingRequest, prompt: Prompt | None = None, **more: Any
) -> Assignment:
    """Workers for a request that need not wait. Raises as `PendingAssignment.assigned` does."""
    with dispatcher.submit(asked, prompt, **more) as ticket:
        if isinstance(ticket.outcome, GatewayError):
            raise ticket.outcome
        assert ticket.outcome is not None, "it waits"
        return ticket.outcome


def request(
    request_id: str = "client-1", *, tokens: Sequence[int] = (1, 2, 3), model: str = MODEL
) -> oe.GenerateRequest:
    """A valid request without an output budget; change it, then serialise it."""
    return oe.GenerateRequest(
        request_id=request_id, model=model, token_ids=oe.TokenIds(ids=list(tokens))
    )


def session(
    session_id: str = "77", *, backend: str = "nixl", state: str = "AAAA"
) -> oe.KvSessionRef:
    """A handoff that passes every guard."""
    made = oe.KvSessionRef(session_id=session_id, transfer_backend=backend)
    if state:
        made.attributes_struct.update({"opaque_state": state, "first_gen_tokens": [1]})
    return made


def token(*ids: int, usage: oe.Usage | None = None) -> oe.GenerateResponse:
    tokens = [oe.TokenInfo(token_id=i) for i in ids]
    return oe.GenerateResponse(token=oe.TokenOutput(output_index=0, tokens=tokens), usage=usage)


def finished(
    reason: oe.FinishReason.ValueType = oe.FINISH_REASON_LENGTH, *, cached: int | None = None
) -> oe.GenerateResponse:
    made = oe.GenerateResponse(finished=oe.GenerationFinished(output_index=0, reason=reason))
    if cached is not None:
        made.usage.cached_prompt_tokens = cached
    return made


def prefill_ready(
    kv_session: oe.KvSessionRef | None = None, *, cached: int | None = None
) -> oe.GenerateResponse:
    ready = oe.PrefillReady(kv_session=session() if kv_session is None else kv_session)
    made = oe.GenerateResponse(prefill_ready=ready)
    if cached is not None:
        made.usage.cached_prompt_tokens = cached
    return made


def engine_error(code: oe.ErrorCode.ValueType, message: str) -> oe.GenerateResponse:
    return oe.GenerateResponse(error=oe.EngineError(code=code, message=message))


def rng(seed: int = 7) -> random.Random:
    return random.Random(seed)
