"""The watch loops over fake workers, on the virtual loop."""

import logging
from dataclasses import dataclass, field

import anyio
import grpc
import pytest

from slagate.pools.fleet.watch import JITTER_RATIO, PROBE_LIMIT_S
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import State
from slagate.pools.prefix.overlap import Prompt
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.worker import SCHEMA_RELEASE
from support.builders import MODEL, model_info
from support.fleet.watched import LOOK_S, first, watched
from support.worker.fake import ROLES, FakeWorker

UNAVAILABLE = Status(
    grpc.StatusCode.UNAVAILABLE, "failed to connect: ipv4:10.1.2.3:50051: Connection refused"
)


def test_a_healthy_fleet_is_ready_after_one_look() -> None:
    async def main() -> None:
        async with watched() as of:
            assert {member.state for member in of.members()} == {State.READY}
            assert of.unready_stages() == []
            assert of.models() == {MODEL}
            assert first(of).load is not None
            assert first(of).server_info is not None

    run(main)


def test_a_worker_that_cannot_be_reached_stays_connecting_and_says_why_without_addresses() -> None:
    async def main() -> None:
        down = FakeWorker(down=UNAVAILABLE)
        async with watched({"p1:1": down}) as of:
            await anyio.sleep(3 * LOOK_S)
            assert first(of).state is State.CONNECTING
            assert (
                first(of).reason == "UNAVAILABLE: failed to connect: (address) Connection refused"
            )
            down.down = None
            await anyio.sleep(LOOK_S)
            assert first(of).state is State.READY

    run(main)


@dataclass
class Timed(FakeWorker):
    """Notes when it was looked at."""

    looks_s: list[float] = field(default_factory=list)
    hangs: bool = False

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        self.looks_s.append(anyio.current_time())
        if self.hangs:
            await anyio.sleep_forever()
        return await super().health(request)

    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.looks_s, self.looks_s[1:], strict=False)]


def assert_about(gaps_s: list[float], expected_s: list[float]) -> None:
    assert gaps_s == pytest.approx(expected_s, rel=JITTER_RATIO)


BACKED_OFF_S = [1, 1, 1, 1, 1.5, 2.25, 3.375, 5.0625, 7.59375, 10, 10, 10]


def test_health_05_a_worker_that_gives_no_answer_is_asked_ever_more_rarely() -> None:
    async def main() -> None:
        worker = Timed(down=UNAVAILABLE)
        async with watched({"p1:1": worker}) as of:
            await anyio.sleep(100)
            gaps_s = worker.gaps_s()
            assert_about(gaps_s[:12], BACKED_OFF_S)
            assert len(set(gaps_s[9:])) == len(gaps_s[9:]) > 2  # still not in step
            # Up again: seen within a wait of the longest, and then every second, failing or not.
            worker.down = None
            await anyio.sleep(10 * (1 + JITTER_RATIO))
            assert first(of).state is State.READY
            worker.looks_s.clear()
            worker.down = UNAVAILABLE
            await anyio.sleep(6)
            assert_about(worker.gaps_s()[:4], [1, 1, 1, 1])
            assert first(of).state is State.NOT_READY

    run(main)


def test_health_05_a_look_without_an_answer_counts_however_it_ends() -> None:
    async def main() -> None:
        worker = Timed(hangs=True)
        async with watched({"p1:1": worker}):
            await anyio.sleep(100)
            waits_s = [gap_s - PROBE_LIMIT_S for gap_s in worker.gaps_s()]
            assert_about(waits_s[:12], BACKED_OFF_S)

    run(main)


@pytest.mark.parametrize("why", ["not ready", "of another role"])
def test_a_worker_that_answers_is_asked_every_second_whatever_it_says(why: str) -> None:
    async def main() -> None:
        worker = Timed(role=ROLES["decode" if why == "of another role" else "prefill"])
        if why == "not ready":
            worker.state = oe.HEALTH_STATE_NOT_READY
        async with watched({"p1:1": worker}) as of:
            await anyio.sleep(30)
            assert first(of).state is not State.READY
            assert_about(worker.gaps_s()[:20], [1] * 20)

    run(main)


def test_health_05_a_stage_without_workers_shows_within_three_looks_and_heals_in_two() -> None:
    async def main() -> None:
        decodes = {a: FakeWorker(role=ROLES["decode"]) for a in ("d1:1", "d2:1")}
        async with watched(decodes) as of:
            for worker in decodes.values():
                worker.down = UNAVAILABLE
            await anyio.sleep(3 * LOOK_S)
            assert of.unready_stages() == [Stage.DECODE]
            for worker in decodes.values():
                worker.down = None
            await anyio.sleep(2 * LOOK_S)
            assert of.unready_stages() == []

    run(main)


def test_a_worker_that_says_it_is_not_ready_leaves_like_one_that_is_silent() -> None:
    async def main() -> None:
        worker = FakeWorker()
        async with watched({"p1:1": worker}) as of:
            worker.state = oe.HEALTH_STATE_NOT_READY
            await anyio.sleep(3 * LOOK_S)
            assert first(of).state is State.NOT_READY
            assert first(of).reason == "reports HEALTH_STATE_NOT_READY"

    run(main)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"engine_role": oe.ENGINE_ROLE_DECODE}, "is a decode worker, but listed in prefill pool"),
        ({"engine_role": oe.ENGINE_ROLE_AGGREGATED}, "is a aggregated worker"),
        ({"schema_revision": 2}, "speaks OpenEngine revision 2"),
        ({"minimum_client_revision": 2}, "this gateway revision 1"),
        ({"schema_release": "another"}, "speaks OpenEngine release 'another'"),
    ],
)
def test_a_worker_that_is_not_what_the_file_says_is_refused(
    change: dict[str, object], reason: str
) -> None:
    async def main() -> None:
        worker = FakeWorker()
        right = oe.ServerInfo()
        right.CopyFrom(worker.info)
        right.instance_id = "i2"  # another process, at the same address
        for name, value in change.items():
            setattr(worker.info, name, value)
        async with watched({"p1:1": worker}) as of:
            assert first(of).state is State.REFUSED
            assert reason in first(of).reason
            worker.info = right
            await anyio.sleep(2 * LOOK_S)
            assert first(of).state is State.READY

    run(main)


def test_a_refused_worker_without_instance_id_says_what_its_cache_holds_once_it_fits() -> None:
    async def main() -> None:
        worker = FakeWorker()
        worker.info.instance_id = ""
        worker.info.capacity.kv_block_size, worker.info.capacity.total_kv_blocks = 32, 6
        worker.info.schema_release = "another"
        async with watched({"p1:1": worker}) as of:
            worker.info = oe.ServerInfo.FromString(worker.info.SerializeToString())
            worker.info.schema_release = SCHEMA_RELEASE
            await anyio.sleep(2 * LOOK_S)
            assert first(of).state is State.READY
            pool, row = of.pools["prefill"], first(of).ranks.rows[0]
            prompts = [Prompt(bytes([n]) * 4 * 100) for n in range(3)]
            for prompt in prompts:
                pool.lease(row, Work(100, 0.1, 0), prompt)
            found = [int(pool.snapshot(prompt).cached.device_tokens[row]) for prompt in prompts]
            assert found == [0, 96, 96]

    run(main)


def test_a_server_that_cannot_say_its_role_is_believed() -> None:
    async def main() -> None:
        worker = FakeWorker()
        worker.info.engine_role = oe.ENGINE_ROLE_UNSPECIFIED
        async with watched({"p1:1": worker}) as of:
            assert first(of).state is State.READY

    run(main)


def test_models_are_asked_for_once_an_instance_and_again_after_a_restart() -> None:
    async def main() -> None:
        worker = FakeWorker()
        async with watched({"p1:1": worker}) as of:
            await anyio.sleep(5 * LOOK_S)
            assert worker.n_model_infos == 1
            restarted = oe.ServerInfo()
            restarted.CopyFrom(worker.info)
            restarted.instance_id = "i2"
            del restarted.supported_models[:]
            restarted.supported_models.append("other")
            worker.models = {"other": model_info("other")}
            worker.info = restarted
            await anyio.sleep(LOOK_S)
            assert set(first(of).models) == {"other"}
            assert worker.n_model_infos == 2
            assert of.models() == {MODEL, "other"}

    run(main)


def test_a_change_of_state_is_one_log_line_and_steady_health_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        worker = FakeWorker()
        async with watched({"p1:1": worker}):
            await anyio.sleep(20 * LOOK_S)
            assert len(caplog.records) == 4
            worker.down = UNAVAILABLE
            await anyio.sleep(20 * LOOK_S)
        lines = [record for record in caplog.records if vars(record)["worker"] == "p1:1"]
        assert [vars(record)["state"] for record in lines] == ["ready", "not_ready"]
        assert {record.getMessage() for record in lines} == {"member.state"}

    caplog.set_level(logging.INFO, logger="slagate.pools.fleet.member")
    run(main)


def test_workers_are_not_looked_at_in_step() -> None:
    async def main() -> None:
        async with watched() as of:
            await anyio.sleep(10 * LOOK_S)
            assert len({member.load_at_s for member in of.members()}) == 4

    run(main)


def test_i9_no_loop_is_left_behind() -> None:
    async def main() -> None:
        worker = FakeWorker()
        async with watched({"p1:1": worker}) as of:
            looked_at_s = first(of).load_at_s
        await anyio.sleep(10 * LOOK_S)
        assert first(of).load_at_s == looked_at_s

    run(main)
