"""The contract of the `Worker` port: ranks, limits, load and the end of the engine."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import anyio
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import WorkerError
from slagate.workers.handoff.seal import fingerprint
from slagate.workers.kv_transfer.memory import MemoryExchange, MemoryTransport
from slagate.workers.kv_transfer.transport import Done
from slagate.workers.legs import prefill_leg
from slagate.workers.profiles.profile import load_profile
from slagate.workers.sim.api import NEWEST
from support.engine.workers import MODEL, PROFILE, expected, request
from support.limits import HANG_S
from support.worker.contract import Play, Setup, ask, hand_off, resume, start
from support.worker.sinks import KeepingSink

Code = grpc.StatusCode
PROMPT = list(range(1, 101))
ENDLESS = 100_000
"""Tokens of an answer that does not end by itself while a test looks at it: minutes."""

TARGET, DECODE_RANK = "openengine-target-dp-rank", "x-slagate-dp-rank"


def plain(request_id: str = "r", prompt: list[int] = PROMPT, n: int = 4) -> oe.GenerateRequest:
    return request(request_id, prompt, n)


def test_disagg_12_a_rank_is_kept_and_named_in_the_handoff(inside: Play) -> None:
    """DISAGG-12: each leg runs on the rank asked for, and the session says which one holds the KV."""

    async def scenario(setup: Setup) -> None:
        rng = random.Random(12)
        async with (
            setup.engine("prefill", ranks=2) as prefill,
            setup.engine("decode", ranks=2) as decode,
            anyio.create_task_group() as tasks,
        ):
            info = await prefill.worker.server_info()
            assert info.parallelism.data_parallel_size == 2
            assert info.extra["trtllm_supports_dp_rank_targeting"] is True
            assert info.extra["slagate_supports_decode_dp_rank"] is False
            info = await decode.worker.server_info()
            assert info.extra["trtllm_supports_dp_rank_targeting"] is False
            assert info.extra["slagate_supports_decode_dp_rank"] is True
            wanted = {i: (rng.randrange(2), rng.randrange(2)) for i in range(64)}
            n_right = 0

            async def one(i: int, prefill_rank: int, decode_rank: int) -> None:
                nonlocal n_right
                prompt = [1000 + i, *PROMPT]
                data = plain(prompt=prompt)
                target = [(TARGET, str(prefill_rank))]
                session = await hand_off(prefill.worker, data, target, leg_id=f"p{i}")
                assert session.dp_rank == prefill_rank
                assert session.attributes_struct["ctx_dp_rank"] == prefill_rank
                to = [(DECODE_RANK, str(decode_rank))]
                sink = await resume(decode.worker, data, session, to, leg_id=f"d{i}")
                assert sink.tokens == expected(prompt, 4)
                n_right += 1

            for i, ranks in wanted.items():
                tasks.start_soon(one, i, *ranks)
        assert n_right == 64
        for at, of_requests in ((prefill, 0), (decode, 1)):
            # Each prompt has three full blocks, and decode does not fill the fourth.
            n_blocks = [len(blocks) for blocks in at.llm.resident()]
            due = Counter(ranks[of_requests] for ranks in wanted.values())
            assert n_blocks == [due[0] * 3, due[1] * 3]

    inside(scenario)


@pytest.mark.parametrize(
    ("role", "metadata", "field"),
    [
        ("agg", [(TARGET, "2")], TARGET),
        ("agg", [(TARGET, "-1")], TARGET),
        ("agg", [(TARGET, "")], TARGET),
        ("agg", [(TARGET, "0x1")], TARGET),
        ("agg", [(TARGET, "1,0")], TARGET),
        ("agg", [(TARGET, "99999999999")], TARGET),
        ("agg", [(TARGET, "1"), (TARGET, "1")], TARGET),
        ("agg", [(DECODE_RANK, "1")], DECODE_RANK),
        ("prefill", [(DECODE_RANK, "1")], DECODE_RANK),
        ("decode", [(TARGET, "1")], TARGET),
        ("decode", [(DECODE_RANK, "2")], DECODE_RANK),
        ("decode", [(DECODE_RANK, "1"), (DECODE_RANK, "1")], DECODE_RANK),
    ],
)
def test_secmm_02_a_rank_that_cannot_be_meant_is_refused(
    play: Play, role: str, metadata: list[tuple[str, str]], field: str
) -> None:
    """SECMM-02: empty, joined, repeated and misplaced values are refused, never first-wins."""

    async def scenario(setup: Setup) -> None:
        async with setup.worker("prefill", ranks=2) as prefill, setup.worker(role, ranks=2) as at:
            if role == "decode":
                sink = await resume(at, plain(), await hand_off(prefill, plain()), metadata)
            elif role == "prefill":
                sink = await ask(at, prefill_leg(plain().SerializeToString(), "p"), metadata)
            else:
                sink = await ask(at, plain(), metadata)
            assert (sink.code, sink.messages) == (Code.INVALID_ARGUMENT, [])
            assert sink.status is not None
            assert sink.status.message.startswith(f"{field}: ")

    play(scenario)


def test_disagg_12_the_rank_asked_for_comes_back(play: Play) -> None:
    """DISAGG-12: of every version, those that do not say it themselves included."""

    async def scenario(setup: Setup) -> None:
        async with setup.worker("prefill", ranks=2) as prefill:
            for rank in (1, 0):
                session = await hand_off(prefill, plain(), [(TARGET, str(rank))])
                assert session.dp_rank == session.attributes_struct["ctx_dp_rank"] == rank

    play(scenario)


def test_without_attention_dp_only_rank_0_is_right(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            assert (await ask(worker, plain(), [(TARGET, "0")])).tokens == expected(PROMPT, 4)
            assert (await ask(worker, plain(), [(TARGET, "1")])).code is Code.INVALID_ARGUMENT

    play(scenario)


def test_a_prompt_over_the_transfer_buffer_is_refused_by_name(inside: Play) -> None:
    """What the engine makes of it depends on the transport; a buffer of 0 is made for each prompt."""
    dynamic = {"cache_transceiver_config": {"max_tokens_in_buffer": 0}}
    small = {"cache_transceiver_config": {"max_tokens_in_buffer": 100}}

    async def scenario(setup: Setup) -> None:
        async with (
            setup.worker("prefill") as large,
            setup.worker("prefill", **small) as prefill,
            setup.worker("decode", **small) as decode,
            setup.worker("decode", **dynamic) as unbound,
        ):
            longer = plain(prompt=[*PROMPT, 1])
            session = await hand_off(large, longer)
            for sink in (
                await ask(prefill, prefill_leg(longer.SerializeToString(), "p")),
                await resume(decode, longer, session),
            ):
                assert (sink.code, sink.messages) == (Code.INVALID_ARGUMENT, [])
                assert sink.status is not None
                assert "max_tokens_in_buffer (100)" in sink.status.message
            answer = await resume(unbound, longer, await hand_off(large, longer))
            assert answer.tokens == expected([*PROMPT, 1], 4)
            session = await hand_off(prefill, plain())
            assert (await resume(decode, plain(), session)).tokens == expected(PROMPT, 4)

    inside(scenario)


def test_an_overlong_prompt_is_the_requests_error_in_every_version(inside: Play) -> None:
    """`ValueError` or `RequestError` out of the submission, by version; the worker lives on."""

    async def scenario(setup: Setup) -> None:
        async with setup.engine("agg", enable_chunked_prefill=False, max_num_tokens=64) as at:
            sink = await ask(at.worker, plain())
            assert (sink.code, sink.messages) == (Code.INVALID_ARGUMENT, [])
            short = list(range(1, 50))
            sink = await ask(at.worker, plain(prompt=short))
            assert sink.tokens == expected(short, 4)
            assert not at.inner.fatal.is_set()

    inside(scenario)


def test_the_end_of_the_engine_ends_every_stream_and_the_worker(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.engine("agg") as at:
            sinks = [KeepingSink() for _ in range(3)]
            for i, sink in enumerate(sinks):
                start(at.worker, plain(f"r{i}", n=ENDLESS).SerializeToString(), sink)
                await sink.at_least(1)
            at.llm.inject_fatal(MemoryError("out of memory"))
            for sink in sinks:
                await sink.done()
                assert (sink.code, sink.events[-1]) == (Code.OK, "error")
                assert sink.messages[-1].error.code == oe.ERROR_CODE_INTERNAL
                assert not sink.messages[-1].error.retryable
                assert sink.messages[-1].usage.prompt_tokens == 100
            await at.inner.fatal.wait()
            health = await at.worker.health(oe.HealthRequest())
            assert health.state == oe.HEALTH_STATE_NOT_READY
            assert (await ask(at.worker, plain())).code is Code.UNAVAILABLE

    inside(scenario)


def test_a_request_that_had_nothing_of_a_dying_engine_may_be_tried_elsewhere(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.engine("agg", max_batch_size=1) as at:
            begun, waiting = KeepingSink(), KeepingSink()
            start(at.worker, plain("begun", n=ENDLESS).SerializeToString(), begun)
            await begun.at_least(1)
            start(at.worker, plain("waiting", n=5).SerializeToString(), waiting)
            while at.inner.n_live < 2:
                await at.worker.server_info()
            at.llm.inject_fatal(MemoryError("out of memory"))
            for sink, may_be_tried in ((begun, False), (waiting, True)):
                error = (await sink.done()).messages[-1].error
                assert (error.code, error.retryable) == (oe.ERROR_CODE_INTERNAL, may_be_tried)
            assert waiting.events == ["error"]

    inside(scenario)


@pytest.mark.parametrize("role", ["agg", "decode"])
def test_a_request_that_never_fits_is_wrong_and_then_cut(inside: Play, role: str) -> None:
    """An engine that cannot tell its size says so in its own way, until its statistics have told it."""

    async def scenario(setup: Setup) -> None:
        cache = {"max_tokens": 64 * 32}
        async with (
            setup.engine("prefill") as prefill,
            setup.engine(role, kv_cache_config=cache, sim_settings={"time_scale": 0}) as at,
        ):

            async def answer(leg: oe.GenerateRequest) -> KeepingSink:
                if role == "agg":
                    return await ask(at.worker, leg)
                return await resume(at.worker, leg, await hand_off(prefill.worker, leg))

            if setup.version in ("1.1", "1.2"):
                error = (await answer(plain(n=5000))).messages[-1].error
                assert (error.code, error.retryable) == (oe.ERROR_CODE_INVALID_ARGUMENT, False)
                while not (await at.worker.load(oe.GetLoadRequest())).total_kv_blocks:
                    await answer(plain(n=100))
            sink = await answer(plain(n=5000))
            assert len(sink.tokens) == 2048 - len(PROMPT)
            long = plain(prompt=list(range(1, 2100)))
            assert (await answer(long)).code is Code.INVALID_ARGUMENT

    inside(scenario)


def test_one_requests_error_is_nobody_elses(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.engine("agg") as at:
            bad, good = KeepingSink(), KeepingSink()
            start(at.worker, plain("bad", n=ENDLESS).SerializeToString(), bad)
            await bad.at_least(1)
            start(at.worker, plain("good", n=40).SerializeToString(), good)
            assert at.llm.inject_request_error(2, "a fault of its own")
            assert (await bad.done()).messages[-1].error.message == "a fault of its own"
            assert (await good.done()).tokens == expected(PROMPT, 40)
            assert not at.inner.fatal.is_set()

    inside(scenario)


class Held:
    """A `KvTransport` in memory; what is pulled while it holds is on the way until it lets go."""

    def __init__(self, inner: MemoryTransport) -> None:
        self.name, self.export = inner.name, inner.export
        self.problem, self.counters = inner.problem, inner.counters
        self.acks, self.release, self.close = inner.acks, inner.release, inner.close
        self._inner = inner
        self._waiting: list[tuple[bytes, Done]] = []
        self._holds = False
        self.begun = anyio.Event()

    def pull(self, descriptor: bytes, done: Done) -> None:
        if self._holds:
            self._waiting.append((descriptor, done))
            self.begun.set()
        else:
            self._inner.pull(descriptor, done)

    def hold(self) -> None:
        self._holds, self.begun = True, anyio.Event()

    def let_go(self) -> None:
        self._holds = False
        waiting, self._waiting = self._waiting, []
        for pull in waiting:
            self._inner.pull(*pull)


def test_a_decode_leg_is_not_aborted_while_its_kv_is_on_the_way(inside: Play) -> None:
    """An abort before the first result would free blocks that another worker still writes."""

    async def scenario(setup: Setup) -> None:
        exchange = MemoryExchange()
        held = Held(exchange.transport())
        async with (
            setup.engine("prefill", transport=exchange.transport()) as prefill,
            setup.engine("decode", transport=held) as decode,
        ):
            for how in ("cancel", "deadline", "abort"):
                session = await hand_off(prefill.worker, plain())
                leg = plain(how, n=ENDLESS)
                leg.kv.session.CopyFrom(session)
                sink = KeepingSink()
                timeout_s = 0.2 if how == "deadline" else None
                held.hold()
                call = start(decode.worker, leg.SerializeToString(), sink, timeout_s=timeout_s)
                if how != "deadline":
                    await held.begun.wait()
                if how == "cancel":
                    call.cancel()
                elif how == "abort":
                    await decode.worker.abort(oe.AbortRequest(request_id=how))
                await sink.done()
                assert sink.messages == []
                held.let_go()
                # A request behind it: once that has gone through, the aborted one has, too.
                after = await resume(
                    decode.worker, plain("after"), await hand_off(prefill.worker, plain())
                )
                assert after.tokens == expected(PROMPT, 4)
                assert decode.inner.n_live == 0
                assert decode.llm.n_unsafe_aborts == 0
                assert decode.llm.n_running == 0

    inside(scenario)


def test_w12_blocks_on_the_host_are_not_the_gpus(inside: Play) -> None:
    """Early versions count both in one, as if the host's were all in use."""

    async def scenario(setup: Setup) -> None:
        n_bytes = 500 * 32 * load_profile(PROFILE).tp(1).kv_bytes_per_token
        cache = {"max_tokens": 3200, "host_cache_size": n_bytes, "event_buffer_max_size": 0}
        slow = {"time_scale": 10.0}
        async with setup.worker("agg", kv_cache_config=cache, sim_settings=slow) as worker:
            await ask(worker, plain("first", n=1))
            sink = KeepingSink()
            start(worker, plain(n=2500).SerializeToString(), sink)
            while True:
                await sink.at_least(len(sink.messages) + 5)
                load = await worker.load(oe.GetLoadRequest())
                if load.decode_batch_size:
                    break
            # Where it has to be learnt, a block may have been in use whenever it was told.
            assert 99 <= load.total_kv_blocks <= 100
            assert 0 < load.used_kv_blocks < 90
            model = await worker.model_info(MODEL)
            assert 99 * 32 <= model.max_context_length <= 3200
            await worker.abort(oe.AbortRequest(all_requests=oe.AllRequests()))
            await sink.done()

    inside(scenario)


def test_load_is_that_of_the_ranks(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        cache = {"max_tokens": 3200}
        # The answer fills the cache of its rank, and takes minutes where time is real.
        slow = {"time_scale": 10.0}
        async with setup.worker("agg", ranks=2, kv_cache_config=cache, sim_settings=slow) as worker:
            idle = await worker.load(oe.GetLoadRequest(include_per_rank=True))
            assert (idle.running_requests, idle.queued_requests) == (0, 0)
            assert [rank.data_parallel_rank for rank in idle.ranks] == [0, 1]
            assert not idle.HasField("prefill_batch_size")
            sink = KeepingSink()
            data = plain(n=3000).SerializeToString()
            start(worker, data, sink, metadata=[(TARGET, "1")])
            if setup.version in ("1.1", "1.2"):
                # All its rows are of the first rank, which has nothing to do.
                await sink.at_least(100)
                busy = await worker.load(oe.GetLoadRequest(include_per_rank=True))
                assert not busy.HasField("decode_batch_size")
                assert busy.attributes["ranks_without_stats"] == 1
                assert busy.ranks[0].HasField("decode_batch_size")
                assert busy.ranks[0].decode_batch_size == 0
                # Neither busy nor idle.
                assert not busy.ranks[1].HasField("decode_batch_size")
                assert not busy.ranks[1].HasField("running_requests")
                return
            while True:
                await sink.at_least(len(sink.messages) + 5)
                busy = await worker.load(oe.GetLoadRequest(include_per_rank=True))
                if busy.decode_batch_size:
                    break
            assert (busy.running_requests, busy.total_kv_blocks) == (1, 200)
            assert [rank.decode_batch_size for rank in busy.ranks] == [0, 1]
            assert [rank.running_requests for rank in busy.ranks] == [0, 1]
            assert [rank.total_kv_blocks for rank in busy.ranks] == [100, 100]
            # Its row has the first rank's blocks in use, and so none.
            assert not busy.ranks[1].HasField("used_kv_blocks")
            assert busy.ranks[0].used_kv_blocks == 0
            assert busy.running_tokens > 100
            assert busy.waiting_tokens == 0
            assert busy.attributes["ranks_without_stats"] == 0
            assert not (await worker.load(oe.GetLoadRequest())).ranks
            await worker.abort(oe.AbortRequest(all_requests=oe.AllRequests()))
            await sink.done()
            await ask(worker, plain("after"))
            idle = await worker.load(oe.GetLoadRequest(include_per_rank=True))
            assert (idle.running_requests, idle.decode_batch_size, idle.running_tokens) == (0, 0, 0)
            assert [rank.running_requests for rank in idle.ranks] == [0, 0]

    inside(scenario)


class BrokenConnector:
    def problem(self) -> str:
        return "the agent is gone"

    def counters(self) -> dict[str, int]:
        return {"kv_slots_quarantined": 7}


def test_a_worker_says_so_when_its_kv_transport_is_broken(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        options = {"connector": BrokenConnector()}
        async with setup.worker("decode", worker_options=options) as worker:
            health = await worker.health(oe.HealthRequest())
            check = {check.name: check for check in health.checks}["kv_connector"]
            assert health.state == check.state == oe.HEALTH_STATE_NOT_READY
            assert check.message == "the agent is gone"
            load = await worker.load(oe.GetLoadRequest())
            assert load.attributes["kv_slots_quarantined"] == 7

    inside(scenario)


def test_a_sealed_handoff_is_taken_by_who_has_the_key(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        keys = {role: {"handoff_key": key * 16} for role, key in (("a", b"k"), ("b", b"x"))}
        async with setup.worker("prefill", worker_options=keys["a"]) as prefill:
            session = await hand_off(prefill, plain())
            for options, code in ((keys["b"], Code.INVALID_ARGUMENT), (keys["a"], Code.OK)):
                async with setup.worker("decode", worker_options=options) as decode:
                    assert (await resume(decode, plain(), session)).code is code

    inside(scenario)


def test_an_abort_without_a_target_says_so(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            with pytest.raises(WorkerError) as raised:
                await worker.abort(oe.AbortRequest(kv_session=oe.KvSessionRef(session_id="7")))
            assert raised.value.status.code is Code.UNIMPLEMENTED

    play(scenario)


@pytest.mark.parametrize("role", ["prefill", "decode", "agg"])
def test_server_info_has_what_the_two_workers_of_a_handoff_must_agree_on(
    play: Play, role: str
) -> None:
    """A key that does not apply is missing, and a stock server has none."""
    key = b"k" * 16

    async def scenario(setup: Setup) -> None:
        sealed = {} if role == "agg" else {"worker_options": {"handoff_key": key}}
        cache: dict[str, Any] = {"dtype": "fp8"}
        async with setup.worker(role, kv_cache_config=cache, **sealed) as worker:
            info = await worker.server_info()
        given = {
            name: value
            for name, value in info.extra.items()
            if name.startswith("slagate_") and name != "slagate_supports_decode_dp_rank"
        }
        is_newest = setup.version == NEWEST
        wanted: dict[str, Any] = {
            "slagate_kv_dtype": "fp8",
            "slagate_kv_cache_manager": "auto" if is_newest else "v1",
        }
        if role != "agg":
            is_process = setup.way == "process"
            default = "UCX" if setup.version == "1.1" else "NIXL"
            wanted |= {
                "slagate_kv_transport": default if is_process else "SHM",
                "slagate_transceiver_runtime": "auto" if is_newest else "cpp",
                "slagate_handoff_key": fingerprint(key),
                "slagate_handoff_limit_s": HANG_S if is_process else 60.0,
            }
            if is_process:
                wanted["slagate_kv_transport_library"] = "UCX"
        if role == "decode":
            wanted |= {"slagate_repeats_first_token": True, "slagate_takes_whole_requests": True}
        assert given == wanted

    play(scenario)


@pytest.mark.parametrize(
    ("args", "takes"),
    [
        ({"enable_chunked_prefill": True, "max_num_tokens": 256}, True),
        ({"enable_chunked_prefill": False, "max_num_tokens": 256}, False),
        ({"enable_chunked_prefill": False, "max_num_tokens": 4096, "max_seq_len": 4096}, True),
    ],
    ids=["chunked", "too long for a step", "one step"],
)
def test_a_decode_worker_takes_whole_requests_if_its_engine_takes_any_prompt(
    inside: Play, args: Mapping[str, Any], *, takes: bool
) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("decode", **args) as worker:
            info = await worker.server_info()
            assert info.extra["slagate_takes_whole_requests"] is takes

    inside(scenario)
