"""The real gateway graph over scripted workers: one call in, everything it left behind out."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import BufferedSink
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.router.app import App, build
from slagate.router.front.client_stream import Serve
from slagate.router.generate import generate
from slagate.router.request.call import ClientCall
from slagate.router.request.errors import Outcome
from slagate.router.request.metadata import RECEIPT_TRAILER
from slagate.router.request.running import CancelHandle
from slagate.router.request.settings import Settings
from support.builders import STAGE_NAMES, config, finished, prefill_ready, request, rng, token
from support.worker.fake import ROLES, FakeCall, FakeWorker, Script, Scripts, connector

PEER = "ipv4:10.0.0.1:5"
PREFILL_OK: Script = (prefill_ready(), OK)
DECODE_OK: Script = (token(11), token(12, 13), finished(), OK)


@dataclass
class Answer:
    """What the client of one call got."""

    out: BufferedSink = field(default_factory=BufferedSink)
    responses: list[oe.GenerateResponse] = field(default_factory=list)

    @property
    def status(self) -> Status:
        assert self.out.status is not None
        return self.out.status

    @property
    def tokens(self) -> list[int]:
        return [each.token_id for r in self.responses for each in r.token.tokens]

    @property
    def receipt(self) -> gw.Receipt:
        trailer = dict(self.status.trailers)[RECEIPT_TRAILER]
        assert isinstance(trailer, bytes)
        return gw.Receipt.FromString(trailer)

    async def collect(self) -> None:
        """Take the output as a client does that reads at once."""
        while (data := await self.out.next()) is not None:
            self.responses.append(oe.GenerateResponse.FromString(data))


@dataclass
class Bench:
    """A running gateway, its workers by address, and its scripts by stage."""

    app: App
    workers: dict[str, FakeWorker]
    scripts: dict[str, Scripts]

    @property
    def serve(self) -> Serve:
        """What a front serves calls with."""
        return partial(generate, gateway=self.app.gateway)

    def calls(self, stage: str) -> list[FakeCall]:
        return self.scripts[stage].calls

    @property
    def released(self) -> list[oe.KvSessionRef]:
        """Handoffs that workers were told to free."""
        return [each.kv_session for each in self._aborts("kv_session")]

    @property
    def aborted_legs(self) -> list[str]:
        """Legs that workers were told to abort, by their ids."""
        return [each.request_id for each in self._aborts("request_id")]

    def _aborts(self, target: str) -> list[oe.AbortRequest]:
        every = [each for worker in self.workers.values() for each in worker.aborts]
        assert {each.WhichOneof("target") for each in every} <= {"kv_session", "request_id"}
        return [each for each in every if each.WhichOneof("target") == target]

    async def call(
        self,
        message: oe.GenerateRequest | bytes | None = None,
        *,
        metadata: Metadata = (),
        timeout_s: float | None = None,
        answer: Answer | None = None,
        running: CancelHandle | None = None,
        reads: bool = True,
    ) -> Answer:
        """One Generate call from its arrival to its end."""
        message = request() if message is None else message
        data = message if isinstance(message, bytes) else message.SerializeToString()
        answer = answer or Answer()
        client = ClientCall(
            data=data,
            metadata=metadata,
            peer=PEER,
            timeout_s=timeout_s,
            out=answer.out,
            running=running or CancelHandle(),
        )
        async with anyio.create_task_group() as tasks:
            if reads:
                tasks.start_soon(answer.collect)
            await generate(client, self.app.gateway)
        return answer

    def outcomes(self) -> dict[str, int]:
        """Outcome -> requests, without zeros."""
        registry = self.app.gateway.metrics.registry
        counts = {
            o.value: registry.get_sample_value("slagate_requests_total", {"outcome": o.value})
            for o in Outcome
        }
        return {name: int(n) for name, n in counts.items() if n}

    async def settle(self) -> None:
        """Let clean-up that runs in the background come to its end."""
        await anyio.sleep(0.1)

    async def check_idle(self, *outcomes: Outcome) -> None:
        """Nothing is held any more, and the requests so far ended in exactly these outcomes."""
        await self.settle()
        for member in self.app.fleet.members():
            held = (member.ranks.inflight, member.ranks.queued_tokens, member.ranks.context_tokens)
            assert held == (0, 0, 0), member
            assert member.ranks.queued_s == 0.0, member
        assert self.app.gateway.releaser.n_open == 0
        assert len(self.app.gateway.live) == 0
        wanted: dict[str, int] = {}
        for outcome in outcomes:
            wanted[outcome.value] = wanted.get(outcome.value, 0) + 1
        assert self.outcomes() == wanted


@asynccontextmanager
async def bench(
    mode: str = "disagg",
    *,
    n_workers: int = 1,
    settings: Settings | None = None,
    prefill: Sequence[Script] = (PREFILL_OK,),
    decode: Sequence[Script] = (DECODE_OK,),
    agg: Sequence[Script] = (DECODE_OK,),
    scripts: Mapping[str, Sequence[Script]] | None = None,
    of_pools: Mapping[str, Any] | None = None,
    **of_file: Any,
) -> AsyncIterator[Bench]:
    """A gateway with `n_workers` for each stage, which play the stage's scripts.

    `scripts` is another way to give those of a stage whose name is a value in the test. `of_pools` goes
    into each entry of `pools` of the fleet file, `of_file` to its top.
    """
    played = {"prefill": prefill, "decode": decode, "agg": agg} | dict(scripts or {})
    failure: AssertionError | None = None
    workers: dict[str, FakeWorker] = {}
    stages: dict[str, Scripts] = {}
    pools: dict[str, Any] = {}
    for stage in STAGE_NAMES[mode]:
        stages[stage] = Scripts(list(played[stage]))
        addresses = [f"{stage[0]}{n}:1" for n in range(1, n_workers + 1)]
        pools[stage] = {"workers": addresses, **(of_pools or {})}
        for address in addresses:
            workers[address] = FakeWorker(role=ROLES[stage], scripts=stages[stage])
    async with build(
        config(mode, pools, **of_file),
        settings or Settings(),
        connect=connector(workers),
        now_s=anyio.current_time,
        rng=rng(),
    ) as app:
        await anyio.sleep(0.01)
        try:
            yield Bench(app, workers, stages)
        except AssertionError as error:
            failure = error
    if failure is not None:
        raise failure  # as it was: leaving the task groups would bury it in exception groups
